"""Names of full KV blocks inside one engine and in its KV events, byte for byte those of vLLM: a hash chain over blocks.

A name covers its parent's name, the block's token ids, and the extra keys that separate tenants and adapters, each tagged
with its source. Outside the engine blocks go by `block_key`'s names, which cover the model as well.
"""

import hashlib
import logging
import os
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pdmesh.engine.hashed_bytes import Cbor, Keys, Pickled

log = logging.getLogger(__name__)

HashAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

# vLLM's, so that engines without a seed name equal blocks alike.
DEFAULT_SEED = "vllm-none-hash"
RANDOM_SEED_BYTES = 32


class ExtraKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What besides its tokens a sequence's KV depends on."""

    cache_salt: str = ""
    """Separates tenants; in the first block's name, and through it in all."""
    lora_name: str = ""
    lora_path: str = ""

    def tagged(self, *, is_first: bool) -> Keys:
        """What is hashed into a block's name."""
        keys: list[tuple[str, ...]] = [("lora", self.lora_name, self.lora_path)] if self.lora_name else []
        if is_first and self.cache_salt:
            keys.append(("cache_salt", self.cache_salt))
        return tuple(keys) or None

    def untagged(self, *, is_first: bool) -> tuple[str, ...] | None:
        """What a KV event says of a block: the keys' values without tags, and of a LoRA only its name."""
        keys = self.tagged(is_first=is_first)
        return None if keys is None else tuple(key[1] for key in keys)


NO_EXTRA_KEYS = ExtraKeys()


class BlockHasher:
    """Names blocks of one size with one algorithm and one seed."""

    def __init__(self, algorithm: HashAlgorithm, seed: str, block_size: int) -> None:
        """`seed` is what vLLM takes from PYTHONHASHSEED; "" is vLLM's fixed one, or for xxhash a random one, logged."""
        self.block_size = block_size
        self._encoding = Cbor(block_size) if algorithm.endswith("_cbor") else Pickled(block_size)
        self._digest: Callable[[bytes], bytes] = _sha256 if algorithm.startswith("sha256") else xxhash.xxh3_128_digest
        if not seed and algorithm.startswith("xxhash"):
            # Collisions under a known seed can be computed beforehand and would hand out another tenant's KV.
            seed = os.urandom(RANDOM_SEED_BYTES).hex()
            log.warning(
                "prefix_caching_hash_algo %s is not collision-proof, so its seed is random: block names in KV events are "
                "this process's own. prefix_caching_hash_seed gives engines a common secret seed; sha256 needs none",
                algorithm,
            )
        self.none_hash = self._digest(self._encoding.text(seed or DEFAULT_SEED))
        """The parent of every first block."""

    def extend(self, chain: list[bytes], token_ids: NDArray[np.integer], extras: ExtraKeys = NO_EXTRA_KEYS) -> None:
        """Append to `chain` the names of the full blocks of `token_ids`, which follow the blocks that are in it.

        `token_ids` starts at token `len(chain) * block_size`; what does not fill a block is left alone. 16 bytes a name
        with xxhash, 32 with SHA-256. Raises ValueError for ids outside 0…2³¹-1.
        """
        encoding, digest = self._encoding, self._digest
        parent = chain[-1] if chain else self.none_hash
        first = encoding.encode_keys(extras.tagged(is_first=not chain))
        rest = encoding.encode_keys(extras.tagged(is_first=False))
        block = encoding.block
        for tokens in encoding.blocks(token_ids):
            parent = digest(block(parent, tokens, first))
            chain.append(parent)
            first = rest


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
