"""Pool and context fitted to each other over all KV groups, and the errors that say with which numbers they do not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.backend import KVGroupSpec, ModelInfo
from pdmesh.engine.batch_defaults import DeviceInfo, batch_defaults, check_batch, resolve_batch
from pdmesh.engine.kv_groups import blocks_at_once
from pdmesh.engine.sizing import (
    MAX_AUTOMATIC_POOL_BYTES,
    kv_groups,
    measure_pool_bytes,
    most_tokens,
    resolve_limits,
    resolve_sizes,
)
from pdmesh.errors import ConfigError

GIB = 1 << 30
FULL = KVGroupSpec(kind="full", layers=(0,), block_size=16, block_bytes=1000, fingerprint="f")
SLIDING = KVGroupSpec(kind="sliding", layers=(1,), block_size=16, block_bytes=1000, window=32, fingerprint="s")


def info(*groups: KVGroupSpec, max_model_len: int = 160) -> ModelInfo:
    return ModelInfo(
        fingerprint="m",
        groups=groups or (FULL,),
        max_model_len=max_model_len,
        vocab_size=10,
        eos_token_ids=(1,),
        dtype="float32",
    )


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**({"max_num_seqs": 4, "max_num_batched_tokens": 16} | settings))


class Memory:
    """A backend's two answers about memory; each sequence and each token of a step may take some more."""

    def __init__(self, available_bytes: int, peak_bytes: int, seq_bytes: int = 0, token_bytes: int = 0) -> None:
        self.available_bytes, self.peak_bytes = available_bytes, peak_bytes
        self.seq_bytes, self.token_bytes = seq_bytes, token_bytes
        self.profiled: list[tuple[int, int]] = []

    def profile(self, max_num_tokens: int, max_num_seqs: int) -> int:
        self.profiled.append((max_num_tokens, max_num_seqs))
        return self.peak_bytes + self.seq_bytes * max_num_seqs + self.token_bytes * max_num_tokens

    def available_kv_bytes(self, fraction: float) -> int:
        return int(self.available_bytes * fraction)


def pool_bytes(memory: Memory, **settings: Any) -> int:
    return measure_pool_bytes(config(**settings), memory)  # type: ignore[arg-type]


def test_a_configured_pool_is_taken_as_it_is_and_needs_no_profile(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory = Memory(1, 1)
    assert pool_bytes(memory, kv_cache_memory_bytes=20_500) == 20_500
    assert not memory.profiled
    assert "gpu-memory-utilization" not in caplog.text
    assert pool_bytes(memory, kv_cache_memory_bytes=20_500, gpu_memory_utilization=0.5) == 20_500
    assert "gpu-memory-utilization 0.5 is not used" in caplog.text


def test_the_automatic_pool_is_what_a_step_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory = Memory(100 << 20, 10 << 20)
    assert pool_bytes(memory, gpu_memory_utilization=0.5) == 40 << 20
    assert memory.profiled == [(16, 4)]
    assert "50 MiB are available" in caplog.text
    assert "a step needs 10 MiB, KV gets 40 MiB" in caplog.text
    assert pool_bytes(Memory(1 << 40, 1 << 20)) == MAX_AUTOMATIC_POOL_BYTES


def test_no_memory_for_kv_is_said_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"of 90 bytes that gpu-memory-utilization 0.9 allows, a step of 4 sequences \(max-num-seqs\) and 16 tokens "
        r"\(max-num-batched-tokens\) needs 95",
    ):
        pool_bytes(Memory(100, 95), gpu_memory_utilization=0.9)


@pytest.mark.parametrize(
    ("memory", "settings", "cure"),
    [
        (Memory(100, 0, token_bytes=10), {}, "--max-num-batched-tokens"),
        (Memory(100, 0, seq_bytes=30), {}, "--max-num-seqs"),
        (Memory(100, 0, token_bytes=30), {"max_num_batched_tokens": 4}, "--max-num-seqs"),
        (Memory(100, 0, token_bytes=30), {}, "--max-num-seqs"),
    ],
)
def test_the_setting_that_can_be_lowered_is_the_one_named(memory: Memory, settings: dict[str, int], cure: str) -> None:
    """With a budget of one token for each sequence, lowering it was a contradiction."""
    with pytest.raises(ConfigError, match=f": lower {cure} or raise --gpu-memory-utilization"):
        pool_bytes(memory, **settings)


def test_an_automatic_context_shrinks_to_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    sizes = resolve_sizes(config(), info(), 3_999)
    assert (sizes.num_blocks, sizes.max_model_len) == (3, 48)
    assert "the context is 48 tokens, not the model's 160" in caplog.text


def test_groups_share_one_pool() -> None:
    """A window's group takes its few blocks from the same pool, so less is left for the context."""
    full = resolve_sizes(config(), info(max_model_len=1600), 60_000).max_model_len
    both = resolve_sizes(config(), info(FULL, SLIDING, max_model_len=1600), 60_000).max_model_len
    groups = kv_groups(info(FULL, SLIDING))
    assert full == 60 * 16
    assert both < full
    assert blocks_at_once(groups, both, 16) <= 60 < blocks_at_once(groups, both + 1, 16)


def test_maximum_concurrency_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolve_sizes(config(), info(FULL, SLIDING), 50_000)
    blocks = blocks_at_once(kv_groups(info(FULL, SLIDING)), 160, 16)
    assert f"maximum concurrency for 160 tokens per request: {50 / blocks:.2f}x" in caplog.text
    assert "50 blocks of 16 tokens" in caplog.text


@pytest.mark.parametrize(
    ("settings", "pool", "words"),
    [
        ({"max_model_len": 161}, 99_000, "max-model-len 161 is more than the 160"),
        (
            {"max_model_len": 100},
            6_999,
            "max-model-len 100 needs 7000 bytes of KV, but there are 6999, enough for 96 tokens",
        ),
        ({}, 999, "kv-cache-memory-bytes 999 holds no sequence: 1 blocks of 16 tokens and 1000 bytes"),
        ({"long_prefill_token_threshold": 49}, 3_999, "long-prefill-token-threshold 49 is more than the context of 48"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(settings: dict[str, int], pool: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_sizes(config(**settings), info(), pool)


def test_a_threshold_that_fits_becomes_the_context_of_a_small_pool() -> None:
    resolved = config(long_prefill_token_threshold=256, long_prefill_token_threshold_fits=True)
    sizes = resolve_sizes(resolved, info(), 3_999)
    assert resolve_limits(resolved, info(), sizes).long_prefill_token_threshold == sizes.max_model_len == 48


def test_unequal_blocks_cannot_share_a_pool() -> None:
    other = KVGroupSpec(kind="sliding", layers=(1,), block_size=16, block_bytes=2000, window=32, fingerprint="s")
    with pytest.raises(ConfigError, match="16 tokens in 1000 bytes, 16 tokens in 2000 bytes; they must be equal"):
        resolve_sizes(config(), info(FULL, other), 99_000)


@pytest.mark.parametrize(("most", "largest"), [(0, 0), (1, 1), (7, 7), (100, 41)])
def test_bisection_finds_the_largest(most: int, largest: int) -> None:
    assert most_tokens(lambda tokens: tokens <= 41, most) == largest
    assert most_tokens(lambda tokens: False, most) == 0


def test_limits_follow_the_configuration() -> None:
    settings: dict[str, Any] = {
        "watermark": 0.05,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 9,
        "max_num_active_seqs": 6,
        "max_num_partial_prefills": 5,
        "long_prefill_token_threshold": 4,
        "long_prefill_token_threshold_adaptive": True,
        "scheduling_policy": "priority",
        "priority_aging_s": 3.0,
        "max_num_queued_reqs": 8,
        "max_num_queued_tokens": 2,
        "stream_interval": 11,
    }
    resolved = config(**settings)
    limits = resolve_limits(resolved, info(), resolve_sizes(resolved, info(), 100_000))
    assert (limits.watermark_blocks, limits.max_num_seqs, limits.max_num_batched_tokens) == (5, 7, 9)
    assert (limits.max_num_active_seqs, limits.max_num_partial_prefills) == (6, 5)
    assert (limits.long_prefill_token_threshold, limits.is_threshold_adaptive) == (4, True)
    assert (limits.by_priority, limits.priority_aging_s) == (True, 3.0)
    assert (limits.max_num_queued_reqs, limits.max_num_queued_tokens, limits.stream_interval) == (8, 2, 11)


H100 = DeviceInfo(kind="gpu", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB)
A100 = DeviceInfo(kind="gpu", name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB)
B200 = DeviceInfo(kind="gpu", name="NVIDIA B200", memory_bytes=180 * GIB)
L4 = DeviceInfo(kind="gpu", name="NVIDIA L4", memory_bytes=24 * GIB)


@pytest.mark.parametrize(
    ("device", "server", "offline"),
    [
        (DeviceInfo(), (128, 2048), (256, 4096)),
        (H100, (1024, 8192), (1024, 16384)),
        (A100, (256, 2048), (256, 8192)),
        (B200, (1024, 16384), (1024, 16384)),
        (L4, (256, 2048), (256, 8192)),
        (DeviceInfo(kind="gpu"), (256, 2048), (256, 8192)),
    ],
)
def test_defaults_by_device_are_vllms(device: DeviceInfo, server: tuple[int, int], offline: tuple[int, int]) -> None:
    for is_offline, expected in ((False, server), (True, offline)):
        defaults = batch_defaults(device, offline=is_offline)
        assert (defaults.max_num_seqs, defaults.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (128, 2048)),
        ({"performance_mode": "throughput"}, (256, 4096)),
        ({"performance_mode": "throughput", "max_num_seqs": 8}, (8, 4096)),
        ({"performance_mode": "throughput", "max_num_batched_tokens": 512}, (256, 512)),
        ({"performance_mode": "interactivity"}, (128, 512)),
        ({"performance_mode": "interactivity", "max_num_batched_tokens": 777}, (128, 777)),
        ({"max_num_batched_tokens": 16}, (16, 16)),
        ({"max_num_seqs": 4000}, (4000, 4000)),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 5}, (3, 5)),
    ],
)
def test_what_is_not_set_follows_device_mode_and_what_is(settings: dict[str, Any], expected: tuple[int, int]) -> None:
    given = EngineConfig(**settings)
    resolved = resolve_batch(given, DeviceInfo(), offline=False, max_model_len=1 << 20)
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == expected
    assert given.max_num_seqs == settings.get("max_num_seqs", 0), "a new configuration, not the same changed"


def test_a_default_budget_is_no_larger_than_all_rows_can_use() -> None:
    resolved = resolve_batch(EngineConfig(max_num_seqs=2), DeviceInfo(), offline=False, max_model_len=100)
    assert resolved.max_num_batched_tokens == 200


def test_resolved_numbers_are_checked_like_configured_ones(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="max-num-active-seqs 129 is more than max-num-seqs 128"):
        resolve_batch(EngineConfig(max_num_active_seqs=129), DeviceInfo(), offline=False, max_model_len=1 << 20)
    caplog.set_level(logging.INFO)
    check_batch(EngineConfig(max_num_seqs=8), H100, offline=True, max_model_len=1 << 20)
    assert not caplog.records
    both = EngineConfig(performance_mode="throughput", max_num_seqs=8, max_num_batched_tokens=9)
    resolve_batch(both, H100, offline=True, max_model_len=1 << 20)
    assert "performance-mode throughput is not used" in caplog.text
    caplog.clear()
    resolve_batch(EngineConfig(max_num_seqs=8), H100, offline=True, max_model_len=1 << 20)
    assert "steps of up to 8 sequences (max-num-seqs) and 16384 tokens (max-num-batched-tokens, default)" in caplog.text
    assert len(caplog.records) == 1
