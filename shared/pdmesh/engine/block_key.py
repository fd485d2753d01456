"""Names of full KV blocks: a SHA-256 chain over token ids, so that equal keys mean equal KV, in every process and tier.

A key covers everything that its block's content depends on: all tokens up to its end (through its parent), the model and
layout (through the root), and the extra keys that separate tenants and adapters (through the first block's parent).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32


def root_key(model_fingerprint: str, layout_fingerprint: str, group: int) -> bytes:
    """Return the parent of every first block in one KV group of one model; 32 bytes."""
    return _digest_of(b"pdmesh-block-v1", model_fingerprint.encode(), layout_fingerprint.encode(), b"%d" % group)


def first_parent(root: bytes, *, cache_salt: str = "", lora: str = "") -> bytes:
    """Return the parent of a request's first block: the root, plus each extra key under a tag that names its source."""
    tagged = [(b"salt", cache_salt), (b"lora", lora)]
    extras = [part for tag, value in tagged if value for part in (tag, value.encode())]
    return _digest_of(root, *extras) if extras else root


def block_keys(
    token_ids: Sequence[int] | NDArray[np.int64], block_size: int, *, root: bytes, cache_salt: str = "", lora: str = ""
) -> list[bytes]:
    """Return the 32-byte keys of all full blocks of `token_ids`, in order."""
    chain: list[bytes] = []
    extend_chain(chain, token_ids, block_size, first_parent(root, cache_salt=cache_salt, lora=lora))
    return chain


def extend_chain(
    chain: list[bytes], token_ids: Sequence[int] | NDArray[np.int64], block_size: int, parent: bytes
) -> None:
    """Append to `chain` the keys of the full blocks of `token_ids`, whose first block follows `parent`."""
    words = memoryview(np.asarray(token_ids, dtype="<u4").tobytes())
    width = 4 * block_size
    for start in range(0, len(words) - width + 1, width):
        # One update on an initialised hash is the cheapest form hashlib has.
        digest = hashlib.sha256(parent)
        digest.update(words[start : start + width])
        parent = digest.digest()
        chain.append(parent)


def _digest_of(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        # Lengths in front keep ("ab", "c") and ("a", "bc") apart.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
