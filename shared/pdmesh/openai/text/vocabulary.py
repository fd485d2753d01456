"""What each token id stands for, as bytes; the detokeniser, logprobs and the length bound are built on it."""

import json
from enum import Enum
from typing import Any

from tokenizers import Tokenizer

SP_SPACE = "\u2581"


class Spelling(Enum):
    """How a tokenizer writes bytes into its vocabulary."""

    BYTE_LEVEL = "byte-level"
    """Each character of a token is one byte (GPT-2 and its heirs)."""
    SENTENCEPIECE = "sentencepiece"
    """Plain text with U+2581 for a space; `<0xNN>` for single bytes."""
    OTHER = "other"
    """Anything else: only the tokenizer's own decoder knows."""


def _byte_level_table() -> dict[str, int]:
    """Map GPT-2's printable stand-ins to bytes: printable Latin-1 is itself, the others follow from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    moved = [byte for byte in range(256) if byte not in kept]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(moved)}


BYTE_LEVEL_TABLE = _byte_level_table()


class Vocabulary:
    """Token ids to bytes, computed on first use and kept (at most one entry per id)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        steps = decoder.get("decoders", [decoder])
        kinds = {step.get("type") for step in steps}
        self._byte_fallback = "ByteFallback" in kinds
        self.spelling = _spelling(kinds)
        self.strips_first_space = self.spelling is Spelling.SENTENCEPIECE and _strips_first_space(steps)
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size = max([tokenizer.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added)])
        self.longest_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; an id outside the vocabulary (padding rows of the model) has none."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._spell(token_id)
            if token_id < self.size:
                self._bytes[token_id] = found
        return found

    def token_of(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it; "" outside."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self.token_of(token_id)
        if self.spelling is Spelling.BYTE_LEVEL:
            try:
                return bytes([BYTE_LEVEL_TABLE[char] for char in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        return token.replace(SP_SPACE, " ").encode()


def _spelling(kinds: set[str | None]) -> Spelling:
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return Spelling.BYTE_LEVEL
    if kinds & {"Metaspace", "Replace"} and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return Spelling.SENTENCEPIECE
    return Spelling.OTHER


def _strips_first_space(steps: list[dict[str, Any]]) -> bool:
    for step in steps:
        if step.get("type") == "Strip" and step.get("content") == " " and step.get("start"):
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never":
            return True
    return False
