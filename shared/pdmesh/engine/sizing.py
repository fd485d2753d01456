"""How large the KV pool and the context become: configuration, model and memory resolved into numbers, logged once."""

import logging
from dataclasses import dataclass

from pdmesh.config import EngineConfig
from pdmesh.engine.admission import Limits
from pdmesh.engine.backend import KVGroupSpec, ModelInfo
from pdmesh.errors import ConfigError

log = logging.getLogger(__name__)

# The pool is host memory: a machine that serves has other uses for it, and 2 GiB hold 90,000 tokens of the demo model.
MAX_AUTOMATIC_POOL_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The resolved numbers."""

    num_blocks: int
    max_model_len: int


def resolve_sizes(config: EngineConfig, info: ModelInfo, available_bytes: int) -> Sizes:
    """Fit pool and context to each other. `available_bytes` is what the backend grants when nothing is configured.

    Raises ConfigError, with the numbers, when a configured context does not fit or exceeds the model's.
    """
    group = _only_group(info)
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max-model-len {config.max_model_len} is more than the {info.max_model_len} tokens that the model was made for"
        )
    wanted = config.max_model_len or info.max_model_len
    pool_bytes = config.kv_cache_memory_bytes or min(available_bytes, MAX_AUTOMATIC_POOL_BYTES)
    num_blocks = pool_bytes // group.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv-cache-memory-bytes {pool_bytes} holds no block: one of {group.block_size} tokens takes {group.block_bytes}"
        )
    fits = num_blocks * group.block_size
    if fits < wanted and config.max_model_len:
        needed = -(-wanted // group.block_size) * group.block_bytes
        raise ConfigError(
            f"max-model-len {wanted} needs {needed} bytes of KV, but there are {pool_bytes}, enough for {fits} tokens: "
            f"lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    if fits < wanted:
        log.warning("the context is %d tokens, not the model's %d: the KV pool holds no more", fits, wanted)
    sizes = Sizes(num_blocks=num_blocks, max_model_len=min(fits, wanted))
    log.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB; context %d tokens",
        num_blocks,
        group.block_size,
        num_blocks * group.block_bytes / 2**20,
        sizes.max_model_len,
    )
    return sizes


def resolve_limits(config: EngineConfig, info: ModelInfo, sizes: Sizes) -> Limits:
    """Return what the scheduler must keep to."""
    return Limits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=sizes.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark_blocks=int(config.watermark * sizes.num_blocks),
        max_num_queued_reqs=config.max_num_queued_reqs,
    )


def _only_group(info: ModelInfo) -> KVGroupSpec:
    if len(info.groups) != 1:
        raise ConfigError(f"this model has {len(info.groups)} KV groups; models with one are supported")
    return info.groups[0]
