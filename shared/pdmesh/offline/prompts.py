"""The forms a prompt may have in `LLM.generate`, made one; and lists that go with prompts, made as long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec

from pdmesh.errors import InvalidRequest
from pdmesh.openai.intake.identity import check_salt, narrow_salt

ItemT = TypeVar("ItemT")


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt
"""Text, token ids, or a dictionary with one of the two (and, if wanted, a `cache_salt`)."""

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """One prompt as it was given."""

    text: str | None
    token_ids: list[int] | None
    """None: to be tokenised."""
    cache_salt: str = ""
    add_special_tokens: bool = True


def read_prompts(prompts: PromptType | Sequence[PromptType]) -> list[GivenPrompt]:
    """Take one prompt or several. Raises InvalidRequest that tells which one is of no known form."""
    if isinstance(prompts, str | dict) or _is_ids(prompts):
        return [_read(prompts, "prompts")]
    if not isinstance(prompts, list | tuple):
        raise InvalidRequest(
            f"prompts must be a prompt or a list of them, got {type(prompts).__name__}", param="prompts"
        )
    return [_read(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def per_prompt(name: str, value: ItemT | Sequence[ItemT], num_prompts: int) -> list[ItemT]:
    """Give each prompt its own of `value`, or all the same one. Raises InvalidRequest when the lengths differ."""
    if not isinstance(value, list | tuple):
        return [value] * num_prompts  # type: ignore[list-item]
    if len(value) != num_prompts:
        raise InvalidRequest(f"{name} has {len(value)} entries for {num_prompts} prompts", param=name)
    return list(value)


def check_text(name: str, value: Any) -> None:
    """Raise InvalidRequest for a string in `value`, however deep, that is no text as it holds half a surrogate pair."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"{name} holds the lone surrogate {exc.object[exc.start]!r}, which cannot be encoded", param=name
        ) from exc
    except (TypeError, OverflowError, RecursionError):
        # What is no text is for others to judge.
        return


def _is_ids(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(item) is int for item in value)


def _read(prompt: Any, where: str) -> GivenPrompt:
    if isinstance(prompt, str):
        return GivenPrompt(text=prompt, token_ids=None)
    if _is_ids(prompt) or prompt == []:
        return GivenPrompt(text=None, token_ids=list(prompt))
    if not isinstance(prompt, dict):
        raise InvalidRequest(
            f"{where} must be text, token ids or a dictionary, got {type(prompt).__name__}", param=where
        )
    return _read_dictionary(prompt, where)


def _read_dictionary(prompt: dict[str, Any], where: str) -> GivenPrompt:
    unknown = sorted(set(prompt) - _KEYS)
    if unknown:
        raise InvalidRequest(
            f"{where} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}", param=where
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise InvalidRequest(f"{where} needs prompt or prompt_token_ids", param=where)
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"{where}['prompt'] must be text, got {type(text).__name__}", param=where)
    if token_ids is not None and not (_is_ids(token_ids) or token_ids == []):
        raise InvalidRequest(f"{where}['prompt_token_ids'] must be a list of integers", param=where)
    check_text(f"{where}['cache_salt']", prompt.get("cache_salt"))
    salt = check_salt(prompt.get("cache_salt"))
    return GivenPrompt(
        text=text,
        token_ids=None if token_ids is None else list(token_ids),
        cache_salt=narrow_salt("", salt),
    )
