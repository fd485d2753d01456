"""Reads a Hugging Face directory's tokenizer: tokenizer.json, and the chat template wherever that version keeps it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdmesh.errors import ConfigError
from pdmesh.models.hf_config import read_json

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class HFTokenizer:
    """What the directory says about text."""

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    """Role (bos_token, …) to its text; templates read them."""


def read_hf_tokenizer(folder: Path) -> HFTokenizer:
    """Load from `folder`. Raises ConfigError that names the file and the remedy."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:
        # tokenizers raises bare Exception for whatever is wrong in the file.
        raise ConfigError(f"{path}: is no tokenizer ({exc}); download it again") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _read_json(folder / "special_tokens_map.json") | config
    return HFTokenizer(tokenizer, _chat_template(folder, config), _special_tokens(special))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path}: cannot be read ({exc})") from exc
    found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        # Several named templates; the one for plain chat is "default".
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
