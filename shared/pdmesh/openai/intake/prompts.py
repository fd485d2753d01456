"""Turns `prompt` into token ids within the context, before anything reaches an engine."""

import asyncio
from dataclasses import dataclass
from typing import Any

from pdmesh.errors import InvalidRequest
from pdmesh.openai.generator import ModelCard
from pdmesh.openai.intake.sampling import check_token_ids
from pdmesh.openai.schemas.generation import GenerationBody
from pdmesh.openai.text import TextModel

MAX_PROMPTS = 1024
# Below it tokenising takes less time than a thread switch is worth (about 0.2 ms).
INLINE_CHARS = 1024
EMPTY = "The decoder prompt cannot be empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine."""

    token_ids: list[int]
    text: str | None
    """As the client wrote it; None when it gave ids or was truncated."""


def split_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Tell the four forms of `prompt` apart. Raises InvalidRequest for anything else, and for empty ones."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        prompts = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = prompt
    else:
        missing = (
            "is required" if prompt is None else "must be a non-empty string, list of token ids, or list of either"
        )
        raise InvalidRequest(f"prompt {missing}", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts per request, got {len(prompts)}", param="prompt")
    is_text = all(isinstance(item, str) for item in prompts)
    is_ids = all(isinstance(item, list) and all(type(token_id) is int for token_id in item) for item in prompts)
    if not (is_text or is_ids):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
            param="prompt",
        )
    if not all(prompts):
        raise InvalidRequest(EMPTY, param="prompt")
    return prompts


async def encode_texts(
    values: list[str], *, text: TextModel, card: ModelCard, add_special_tokens: bool, param: str, bounded: bool = True
) -> list[list[int]]:
    """Tokenise, off the event loop when it takes long. A text that cannot fit is refused before any is tokenised."""
    max_chars = card.max_model_len * text.max_chars_per_token
    for value in values:
        if bounded and len(value) > max_chars:
            raise InvalidRequest(
                f"This model's maximum context length is {card.max_model_len} tokens. However, your prompt has "
                f"{len(value)} characters, and more than {max_chars} cannot fit. Please shorten it.",
                param=param,
            )

    def encode_all() -> list[list[int]]:
        return [text.encode(value, add_special_tokens) for value in values]

    return encode_all() if sum(map(len, values)) <= INLINE_CHARS else await asyncio.to_thread(encode_all)


def fit_prompt(token_ids: list[int], body: GenerationBody, card: ModelCard, max_tokens: int | None) -> list[int]:
    """Apply truncate_prompt_tokens and check ids and length."""
    keep = body.truncate_prompt_tokens
    if keep is not None:
        if not -1 <= keep <= card.max_model_len or keep == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or between 1 and max_model_len={card.max_model_len}, got {keep}",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, card.max_model_len - (max_tokens or 1))
        if len(token_ids) > keep:
            token_ids = token_ids[:keep] if body.truncation_side == "right" else token_ids[len(token_ids) - keep :]
    check_prompt(token_ids, card)
    return token_ids


def check_prompt(token_ids: list[int], card: ModelCard) -> None:
    """Refuse a prompt that is empty, holds unknown ids or is longer than the context. Raises InvalidRequest."""
    if not token_ids:
        raise InvalidRequest(EMPTY, param="prompt")
    check_token_ids("prompt", token_ids, card.vocab_size)
    if len(token_ids) > card.max_model_len:
        raise InvalidRequest(
            f"This model's maximum context length is {card.max_model_len} tokens. However, your prompt contains at least "
            f"{len(token_ids)} input tokens. Please reduce the length of the input prompt or the number of requested "
            "output tokens.",
            param="input_tokens",
        )


def resolve_max_tokens(
    requested: int | None, *, name: str, num_prompt_tokens: int, card: ModelCard, zero_allowed: bool = False
) -> int:
    """Clamp what was asked for to what the context leaves; None asks for all of it."""
    room = card.max_model_len - num_prompt_tokens
    if requested is not None:
        if requested > card.max_model_len:
            raise InvalidRequest(
                f"{name}={requested} cannot be greater than max_model_len={card.max_model_len}. "
                f"Please request fewer output tokens.",
                param=name,
            )
        if requested == 0 and zero_allowed:
            return 0
        if requested < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {requested}.", param=name)
    if room < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {room}.", param=name)
    return room if requested is None else min(requested, room)
