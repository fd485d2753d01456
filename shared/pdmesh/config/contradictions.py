"""Settings of an engine that are sound one by one and not together: each is one line that names both, before anything starts."""

import re
from typing import TYPE_CHECKING

from pdmesh.config.cores import parse_cores
from pdmesh_kernels.cpu.limits import TOKEN_TILE

if TYPE_CHECKING:
    from pdmesh.config.engine import EngineConfig

DEFAULT_HASH_ALGO = "sha256"
QUANTISERS = {"quantization": "none", "kv_cache_dtype": "auto"}
"""Settings that ask for fewer bits, and their defaults."""
CPU_LIBRARY_ONLY = {"cpu_isa": "auto", **QUANTISERS}
"""Settings that PyTorch does not have, and their defaults."""


def check_engine(config: "EngineConfig") -> None:
    """Raise ValueError for what cannot be meant. Numbers that are 0 stand for "by device" and contradict nothing yet."""
    _check_batch(config)
    _check_scheduling(config)
    _check_kv(config)
    _check_backend(config)
    _check_cores(config)
    for name in config.logits_processors:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
            raise ValueError(f"logits-processors: {name!r} is not of the form module:Class")


def _check_batch(config: "EngineConfig") -> None:
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if num_seqs and num_tokens and num_tokens < num_seqs:
        raise ValueError(
            f"max-num-batched-tokens {num_tokens} is less than max-num-seqs {num_seqs}: every running sequence needs a token "
            f"per step, so it must be in {num_seqs}…{1 << 20}"
        )
    if not config.enable_chunked_prefill:
        raise ValueError(
            "no-enable-chunked-prefill: there is no engine without chunks; against long prompts that hold up others set "
            "long-prefill-token-threshold or max-num-batched-tokens"
        )
    if config.block_size and config.block_size & (config.block_size - 1):
        raise ValueError(f"block-size {config.block_size} does not divide 1024: it must be a power of two in 1…1024")


def _check_scheduling(config: "EngineConfig") -> None:
    for name in ("max_num_active_seqs", "max_num_partial_prefills"):
        value = getattr(config, name)
        if config.max_num_seqs and value > config.max_num_seqs:
            raise ValueError(
                f"{name.replace('_', '-')} {value} is more than max-num-seqs {config.max_num_seqs}: there is one row for each "
                f"sequence, so it must be in 1…{config.max_num_seqs}, or 0 for as many"
            )
    threshold, longest = config.long_prefill_token_threshold, config.max_model_len
    if longest and threshold > longest and not config.long_prefill_token_threshold_fits:
        raise ValueError(
            f"long-prefill-token-threshold {threshold} is more than max-model-len {longest}: no prompt is that long, so it "
            f"must be in 1…{longest}, or 0 for none"
        )
    if config.long_prefill_token_threshold_adaptive and not threshold:
        raise ValueError(
            "long-prefill-token-threshold-adaptive needs a long-prefill-token-threshold above 0, which it raises"
        )
    if config.priority_aging_s and config.scheduling_policy != "priority":
        raise ValueError(
            f"priority-aging-s {config.priority_aging_s:g} needs scheduling-policy priority; with "
            f"{config.scheduling_policy} nothing ages"
        )


def _check_kv(config: "EngineConfig") -> None:
    if "file" in config.connector and not config.engine_id:
        raise ValueError(
            "connector file needs an engine-id that stays the same: what a start of this engine leaves behind when it is killed "
            "is removed by its next start"
        )
    if config.kv_transfer_mode == "push" and "nixl" not in config.connector:
        raise ValueError(
            f"kv-transfer-mode push needs connector nixl; connector is {','.join(config.connector)}: name nixl there, or "
            "pull"
        )
    if config.kv_transfer_mode == "push" and not config.enable_prefix_caching:
        raise ValueError(
            "kv-transfer-mode push goes into the prefix cache: it has no use with no-enable-prefix-caching"
        )
    if config.enable_prefix_caching:
        return
    if config.prefix_caching_hash_algo != DEFAULT_HASH_ALGO:
        raise ValueError(
            f"prefix-caching-hash-algo {config.prefix_caching_hash_algo} has no use with no-enable-prefix-caching"
        )
    if config.prefix_caching_hash_seed:
        raise ValueError(
            f"prefix-caching-hash-seed {config.prefix_caching_hash_seed!r} has no use with no-enable-prefix-caching"
        )


def _check_backend(config: "EngineConfig") -> None:
    needing = needs_cpu_library(config)
    if needing and config.backend == "torch":
        raise ValueError(f"{needing} needs backend cpu; it is torch")
    for name, default in QUANTISERS.items():
        value = getattr(config, name)
        if value != default and config.dtype not in ("auto", "bfloat16"):
            raise ValueError(f"{name.replace('_', '-')} {value} needs dtype bfloat16; it is {config.dtype}")
    if needing and config.dtype == "float16":
        raise ValueError(f"{needing} needs dtype bfloat16 or float32; it is float16")
    if needing and config.block_size % TOKEN_TILE:
        raise ValueError(
            f"{needing} needs a block-size that is a multiple of {TOKEN_TILE}, or 0; it is {config.block_size}"
        )


def needs_cpu_library(config: "EngineConfig") -> str:
    """Return the setting, with its value, for which only the CPU library will do; empty: PyTorch may compute."""
    for name, default in CPU_LIBRARY_ONLY.items():
        value = getattr(config, name)
        if value != default:
            return f"{name.replace('_', '-')} {value}"
    return "backend cpu" if config.backend == "cpu" else ""


def _check_cores(config: "EngineConfig") -> None:
    try:
        num_cores = len(parse_cores(config.cpu_cores))
    except ValueError as exc:
        raise ValueError(f"cpu-cores {config.cpu_cores}: {exc}") from None
    if num_cores and config.cpu_threads > num_cores:
        raise ValueError(
            f"cpu-threads {config.cpu_threads} is more than the cores of cpu-cores {config.cpu_cores}: each thread has one of "
            f"its own, so it must be in 1…{num_cores}, or 0 for as many"
        )
