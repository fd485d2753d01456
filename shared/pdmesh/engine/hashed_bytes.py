"""The bytes that vLLM hashes to name a KV block, made without pickle: (parent, token ids, extra keys) in two encodings.

`Pickled` writes what protocol 5 writes for that one shape, `Cbor` the canonical CBOR of RFC 8949 §4.2.1. Nothing here is
ever decoded. All tokens of a prompt are encoded at once; a block then costs one concatenation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Keys = tuple[tuple[str, ...], ...] | None
"""A block's extra keys, each a tag and its values."""

MAX_TOKEN_ID = 2**31 - 1
# A pickle of 64 KiB or more is cut into several frames; no block should come near it.
MAX_PICKLE_BYTES = 64 << 10
# Up to here, Python's integers are quicker than numpy's start.
FEW_TOKENS = 96

PROTOCOL, FRAME, STOP, MEMOIZE, MARK, NONE = b"\x80\x05", b"\x95", b".", b"\x94", b"(", b"N"
TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
"""Tuples of one to three items have a code of their own and no mark before them."""


class HashedBytes(ABC):
    """One encoding of what a block's name depends on, for one block size."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    @abstractmethod
    def text(self, value: str) -> bytes:
        """Encode a seed."""

    @abstractmethod
    def encode_keys(self, keys: Keys) -> bytes:
        """Encode extra keys."""

    @abstractmethod
    def block(self, parent: bytes, tokens: bytes, keys: bytes) -> bytes:
        """Put a block together from encoded tokens (one item of `blocks`) and encoded keys."""

    def blocks(self, token_ids: NDArray[np.integer]) -> list[bytes]:
        """Encode the tokens of all full blocks in `token_ids`, each 0…2³¹-1. Raises ValueError for others."""
        size = self._block_size
        num_blocks = len(token_ids) // size
        ids = token_ids[: num_blocks * size]
        if not num_blocks:
            return []
        if len(ids) <= FEW_TOKENS:
            values = ids.tolist()
            if min(values) < 0 or max(values) > MAX_TOKEN_ID:
                raise ValueError(_out_of_range(values))
            encoded = list(map(self._token, values))
            return [b"".join(encoded[start : start + size]) for start in range(0, len(ids), size)]
        if int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
            raise ValueError(_out_of_range(ids.tolist()))
        rows, widths = self._rows(ids.astype("<u4"))
        data = rows[np.arange(rows.shape[1]) < widths[:, None]].tobytes()
        ends = np.cumsum(widths.reshape(num_blocks, size).sum(axis=1)).tolist()
        return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    @property
    @abstractmethod
    def _token(self) -> Callable[[int], bytes]:
        """Encodes one token id."""

    @abstractmethod
    def _rows(self, ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Encode ids as the beginnings of rows [N, 5], and say how long each is [N]."""


class Pickled(HashedBytes):
    """What `pickle.dumps(…, protocol=5)` gives, for objects none of which occurs twice."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._open = b"" if block_size in TUPLES else MARK
        self._close = TUPLES.get(block_size, b"t") + MEMOIZE

    def text(self, value: str) -> bytes:
        return _framed(self._string(value) + STOP)

    def encode_keys(self, keys: Keys) -> bytes:
        encoded = NONE if keys is None else self._tuple([self._tuple(list(map(self._string, key))) for key in keys])
        return encoded + TUPLES[3] + MEMOIZE + STOP

    def block(self, parent: bytes, tokens: bytes, keys: bytes) -> bytes:
        # A parent is a digest, so its length fits a byte.
        return _framed(
            b"".join((b"C", len(parent).to_bytes(1, "little"), parent, MEMOIZE, self._open, tokens, self._close, keys))
        )

    def _string(self, value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        head = b"\x8c%c" % len(data) if len(data) < 256 else b"X" + len(data).to_bytes(4, "little")
        return head + data + MEMOIZE

    def _tuple(self, items: list[bytes]) -> bytes:
        if len(items) in TUPLES:
            return b"".join((*items, TUPLES[len(items)], MEMOIZE))
        return b"".join((MARK, *items, b"t", MEMOIZE))

    @property
    def _token(self) -> Callable[[int], bytes]:
        return _pickled_int

    def _rows(self, ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        widths = 2 + (ids > 0xFF) + 2 * (ids > 0xFFFF).astype(np.int64)
        rows = np.empty((len(ids), 5), np.uint8)
        rows[:, 0] = np.select([ids <= 0xFF, ids <= 0xFFFF], [ord("K"), ord("M")], ord("J"))
        rows[:, 1:] = ids.view(np.uint8).reshape(-1, 4)
        return rows, widths


class Cbor(HashedBytes):
    """Arrays for tuples, and every integer and length in its shortest form."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._array = _head(4, block_size)

    def text(self, value: str) -> bytes:
        data = value.encode()
        return _head(3, len(data)) + data

    def encode_keys(self, keys: Keys) -> bytes:
        if keys is None:
            return b"\xf6"
        texts = [b"".join((_head(4, len(key)), *map(self.text, key))) for key in keys]
        return b"".join((_head(4, len(texts)), *texts))

    def block(self, parent: bytes, tokens: bytes, keys: bytes) -> bytes:
        return b"".join((b"\x83", _head(2, len(parent)), parent, self._array, tokens, keys))

    @property
    def _token(self) -> Callable[[int], bytes]:
        return _cbor_int

    def _rows(self, ids: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        big_endian = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
        rows = np.zeros((len(ids), 5), np.uint8)
        rows[:, 0] = np.where(ids < 24, ids, np.select([ids <= 0xFF, ids <= 0xFFFF], [0x18, 0x19], 0x1A))
        rows[:, 1:] = big_endian
        short, medium = ids <= 0xFF, (ids > 0xFF) & (ids <= 0xFFFF)
        rows[short, 1] = big_endian[short, 3]
        rows[medium, 1:3] = big_endian[medium, 2:]
        return rows, 1 + (ids > 23).astype(np.int64) + (ids > 0xFF) + 2 * (ids > 0xFFFF).astype(np.int64)


def _framed(content: bytes) -> bytes:
    if len(content) >= MAX_PICKLE_BYTES:
        raise ValueError(
            f"a block's extra keys make it {len(content)} bytes; at most {MAX_PICKLE_BYTES - 1} are possible"
        )
    return b"".join((PROTOCOL, FRAME, len(content).to_bytes(8, "little"), content))


def _pickled_int(value: int) -> bytes:
    if value <= 0xFF:
        return b"K%c" % value
    if value <= 0xFFFF:
        return b"M" + value.to_bytes(2, "little")
    return b"J" + value.to_bytes(4, "little")


def _cbor_int(value: int) -> bytes:
    return _head(0, value)


def _head(kind: int, value: int) -> bytes:
    """A CBOR item's first bytes: its kind, and its value or length."""
    if value < 24:
        return (kind << 5 | value).to_bytes(1, "big")
    for code, width in ((24, 1), (25, 2), (26, 4)):
        if value < 1 << 8 * width:
            return (kind << 5 | code).to_bytes(1, "big") + value.to_bytes(width, "big")
    raise ValueError(f"{value} does not fit four bytes")


def _out_of_range(values: list[int]) -> str:
    wrong = next(value for value in values if not 0 <= value <= MAX_TOKEN_ID)
    return f"token id {wrong} is outside 0…{MAX_TOKEN_ID}"
