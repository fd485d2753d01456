"""Pool and context fitted to each other, and the errors that say with which numbers they do not."""

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.backend import KVGroupSpec, ModelInfo
from pdmesh.engine.sizing import MAX_AUTOMATIC_POOL_BYTES, resolve_limits, resolve_sizes
from pdmesh.errors import ConfigError

GROUP = KVGroupSpec(kind="full", layers=(0,), block_size=16, block_bytes=1000, fingerprint="f")
INFO = ModelInfo(
    fingerprint="m", groups=(GROUP,), max_model_len=160, vocab_size=10, eos_token_ids=(1,), dtype="float32"
)


def test_a_configured_pool_is_taken_as_it_is() -> None:
    sizes = resolve_sizes(EngineConfig(kv_cache_memory_bytes=20_500), INFO, available_bytes=1)
    assert (sizes.num_blocks, sizes.max_model_len) == (20, 160)


def test_the_automatic_pool_is_bounded() -> None:
    assert resolve_sizes(EngineConfig(), INFO, 1 << 40).num_blocks == MAX_AUTOMATIC_POOL_BYTES // 1000
    assert resolve_sizes(EngineConfig(), INFO, 50_000).num_blocks == 50


def test_an_automatic_context_shrinks_to_the_pool() -> None:
    assert resolve_sizes(EngineConfig(kv_cache_memory_bytes=3_999), INFO, 0).max_model_len == 48


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 161}, "max-model-len 161 is more than the 160"),
        ({"max_model_len": 100, "kv_cache_memory_bytes": 6_999}, "needs 7000 bytes of KV, but there are 6999"),
        ({"kv_cache_memory_bytes": 999}, "kv-cache-memory-bytes 999 holds no block"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_sizes(EngineConfig(**settings), INFO, 1 << 30)  # type: ignore[arg-type]


def test_limits_follow_the_configuration() -> None:
    config = EngineConfig(kv_cache_memory_bytes=100_000, watermark=0.05, max_num_seqs=7, max_num_batched_tokens=9)
    limits = resolve_limits(config, INFO, resolve_sizes(config, INFO, 0))
    assert (limits.watermark_blocks, limits.max_num_seqs, limits.max_num_batched_tokens) == (5, 7, 9)
