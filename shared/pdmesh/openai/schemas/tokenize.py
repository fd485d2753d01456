"""Bodies of /tokenize and /detokenize."""

from typing import Any

from pdmesh.openai.schemas.fields import Flag, Integer, RequestBody, Text


class TokenizeBody(RequestBody):
    """Either `prompt` or `messages`."""

    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: Flag | None = None
    """Default true for a prompt, false for messages (the chat template has them)."""
    return_token_strs: Flag | None = False
    add_generation_prompt: Flag | None = True
    continue_final_message: Flag | None = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(RequestBody):
    tokens: list[Integer]
