"""Body of /v1/chat/completions."""

from typing import Any

from pydantic import Field

from pdmesh.openai.schemas.fields import Flag, Integer, Text
from pdmesh.openai.schemas.generation import GenerationBody


class ChatBody(GenerationBody):
    """A chat completion request. Unsupported OpenAI and vLLM fields are refused by name, see `unsupported.py`."""

    messages: list[dict[str, Any]] = Field(max_length=65536)
    """The conversation; each message is checked by `messages.py`."""
    max_completion_tokens: Integer | None = None
    """Wins over max_tokens."""
    logprobs: Flag | None = False
    top_logprobs: Integer | None = None
    echo: Flag | None = False
    """Begin the answer with the last message's content when it is continued."""
    tools: list[dict[str, Any]] | None = None
    """Shown to the chat template; only with tool_choice "none" until there are tool parsers."""
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    response_format: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = True
    continue_final_message: Flag | None = False
    add_special_tokens: Flag | None = False
    documents: list[dict[str, Any]] | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    """Given to the chat template."""
    return_prompt_text: Flag | None = False
