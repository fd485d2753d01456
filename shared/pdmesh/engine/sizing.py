"""How large the KV pool and the context become: configuration, model and memory resolved into numbers, logged once.

All KV groups of a model share one pool of equal blocks, so a sequence takes from it what its groups take together.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.config import EngineConfig
from pdmesh.engine.backend import Backend, KVGroupSpec, ModelInfo
from pdmesh.engine.kv_groups import KVGroup, blocks_at_once
from pdmesh.engine.limits import Limits
from pdmesh.errors import ConfigError

log = logging.getLogger(__name__)

# The pool is host memory: a machine that serves has other uses for it, and 2 GiB hold 90,000 tokens of the demo model.
MAX_AUTOMATIC_POOL_BYTES = 2 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The resolved numbers."""

    num_blocks: int
    max_model_len: int


def kv_groups(info: ModelInfo) -> list[KVGroup]:
    """Return the rules of a model's groups, in their order. Raises ConfigError for blocks that cannot share a pool."""
    if len({(spec.block_size, spec.block_bytes) for spec in info.groups}) > 1:
        shown = ", ".join(f"{spec.block_size} tokens in {spec.block_bytes} bytes" for spec in info.groups)
        raise ConfigError(f"the model's KV groups have blocks of {shown}; they must be equal to share one pool")
    return [
        KVGroup(block_size=spec.block_size, kind=spec.kind, window=spec.window, layout=spec.layout)
        for spec in info.groups
    ]


def measure_pool_bytes(config: EngineConfig, backend: Backend) -> int:
    """Return the bytes that KV may take: as configured, or what a profile run leaves of `gpu_memory_utilization`."""
    if config.kv_cache_memory_bytes:
        if config.gpu_memory_utilization != EngineConfig.model_fields["gpu_memory_utilization"].default:
            log.info(
                "gpu-memory-utilization %g is not used: kv-cache-memory-bytes %d says how large the KV pool is",
                config.gpu_memory_utilization,
                config.kv_cache_memory_bytes,
            )
        return config.kv_cache_memory_bytes
    peak_bytes = backend.profile(config.max_num_batched_tokens, config.max_num_seqs)
    available_bytes = backend.available_kv_bytes(config.gpu_memory_utilization)
    left_bytes = available_bytes - peak_bytes
    pool_bytes = min(left_bytes, MAX_AUTOMATIC_POOL_BYTES)
    log.info(
        "memory: %.0f MiB are available (gpu-memory-utilization %g, weights are loaded), a step needs %.0f MiB, KV gets %.0f MiB",
        available_bytes / MIB,
        config.gpu_memory_utilization,
        peak_bytes / MIB,
        max(0, pool_bytes) / MIB,
    )
    if left_bytes <= 0:
        # The budget has to leave each sequence a token, so below that it is for the sequences to become fewer.
        is_budget_enough = backend.profile(config.max_num_seqs, config.max_num_seqs) < available_bytes
        raise ConfigError(
            f"no memory is left for KV: of {available_bytes} bytes that gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g} allows, a step of {config.max_num_seqs} sequences (max-num-seqs) and "
            f"{config.max_num_batched_tokens} tokens (max-num-batched-tokens) needs {peak_bytes}: lower "
            f"{'--max-num-batched-tokens' if is_budget_enough else '--max-num-seqs'} or raise --gpu-memory-utilization"
        )
    return pool_bytes


def resolve_sizes(config: EngineConfig, info: ModelInfo, pool_bytes: int) -> Sizes:
    """Fit pool and context to each other; `config` has its token budget resolved.

    Raises ConfigError, with the numbers, when a configured context does not fit or exceeds the model's.
    """
    groups, spec = kv_groups(info), info.groups[0]
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max-model-len {config.max_model_len} is more than the {info.max_model_len} tokens that the model was made for"
        )
    wanted, chunk = config.max_model_len or info.max_model_len, config.max_num_batched_tokens
    num_blocks = pool_bytes // spec.block_bytes
    fits = most_tokens(lambda tokens: blocks_at_once(groups, tokens, chunk) <= num_blocks, wanted)
    if not fits:
        least = blocks_at_once(groups, 1, chunk)
        raise ConfigError(
            f"kv-cache-memory-bytes {pool_bytes} holds no sequence: {least} blocks of {spec.block_size} tokens and "
            f"{spec.block_bytes} bytes are the least"
        )
    if fits < wanted and config.max_model_len:
        needed = blocks_at_once(groups, wanted, chunk) * spec.block_bytes
        raise ConfigError(
            f"max-model-len {wanted} needs {needed} bytes of KV, but there are {pool_bytes}, enough for {fits} tokens: "
            f"lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    if fits < wanted:
        log.warning("the context is %d tokens, not the model's %d: the KV pool holds no more", fits, wanted)
    _check_threshold(config, fits)
    _log_pool(groups, spec, num_blocks, fits, chunk)
    return Sizes(num_blocks=num_blocks, max_model_len=fits)


def most_tokens(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, by bisection; 0 when not even 1 does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def resolve_limits(config: EngineConfig, info: ModelInfo, sizes: Sizes) -> Limits:
    """Return what the scheduler must keep to."""
    return Limits(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=sizes.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        max_num_active_seqs=config.max_num_active_seqs,
        long_prefill_token_threshold=min(config.long_prefill_token_threshold, sizes.max_model_len),
        is_threshold_adaptive=config.long_prefill_token_threshold_adaptive,
        max_num_partial_prefills=config.max_num_partial_prefills,
        by_priority=config.scheduling_policy == "priority",
        priority_aging_s=config.priority_aging_s,
        watermark_blocks=int(config.watermark * sizes.num_blocks),
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        stream_interval=config.stream_interval,
        refetch_min_tokens=config.preempted_fetch_min_tokens,
        preempted_chunk_tokens=config.preempted_chunk_tokens,
        spill_usage=config.kvcache_spill_usage,
    )


def _check_threshold(config: EngineConfig, max_model_len: int) -> None:
    """The same check as for a configured context, now that the context is known."""
    threshold = config.long_prefill_token_threshold
    if threshold > max_model_len and config.long_prefill_token_threshold_fits:
        log.info("long-prefill-token-threshold %d becomes the context, %d tokens", threshold, max_model_len)
    elif threshold > max_model_len:
        raise ConfigError(
            f"long-prefill-token-threshold {config.long_prefill_token_threshold} is more than the context of {max_model_len} "
            f"tokens: it must be in 1…{max_model_len}, or 0 for none"
        )


def _log_pool(groups: list[KVGroup], spec: KVGroupSpec, num_blocks: int, max_model_len: int, chunk: int) -> None:
    concurrency = num_blocks / blocks_at_once(groups, max_model_len, chunk)
    log.info(
        "KV pool: %d blocks of %d tokens, %.0f MiB for %s; maximum concurrency for %d tokens per request: %.2fx",
        num_blocks,
        spec.block_size,
        num_blocks * spec.block_bytes / MIB,
        " and ".join(group.kind for group in groups),
        max_model_len,
        concurrency,
    )
