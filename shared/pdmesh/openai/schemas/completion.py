"""Body of /v1/completions."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from pdmesh.openai.schemas.fields import Flag, Integer
from pdmesh.openai.schemas.generation import GenerationBody

PROMPT_SCHEMA: dict[str, Any] = {
    "title": "Prompt",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
}


class CompletionBody(GenerationBody):
    """A completion request. Unsupported OpenAI and vLLM fields are refused by name, see `unsupported.py`."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = Field(default=None)
    """Text, token ids, or a list of either; checked in one pass by `prompts.py`, as pydantic's unions are slow on ids."""
    max_tokens: Integer | None = 16
    echo: Flag | None = False
    logprobs: Integer | None = None
    add_special_tokens: Flag | None = True
