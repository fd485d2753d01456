"""Settings as they come out in a real core: defaults by use, a pool by profile run, groups in one pool, refusals in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine import core_process
from pdmesh.engine.backend import KVGroupSpec, ModelInfo
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.messages import CoreReady, StepOutput
from pdmesh.engine.sizing import MAX_AUTOMATIC_POOL_BYTES, Sizes
from pdmesh.engine.torch_backend import TorchBackend
from pdmesh.errors import ConfigError
from pdmesh.protocol.messages import ChoiceDelta
from support.core_harness import make_add
from support.tiny_models import make_tiny

PROMPT = list(range(5, 75))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that see all, and layers with a window of 20 tokens."""
    return make_tiny("gemma3", tmp_path_factory.mktemp("models") / "gemma3")


def serve(model: Path, *, offline: bool = False, **settings: Any) -> tuple[CoreReady, list[ChoiceDelta]]:
    """Start a core, generate 8 tokens behind 70, end it."""
    fixed = {"model": str(model), "cpu_threads": 1, "connector": ["shm"], "block_size": 4}
    config = EngineConfig(**(fixed | settings))
    client = CoreClient(config, engine_id="test", epoch=7, on_progress=lambda stage, _: None, offline=offline)

    async def run() -> list[ChoiceDelta]:
        async with asyncio.timeout(60), client:
            client.send(make_add(PROMPT, max_tokens=8))
            deltas: list[ChoiceDelta] = []
            async for message in client.outputs():
                assert isinstance(message, StepOutput)
                deltas += message.deltas
                if deltas and deltas[-1].finish_reason:
                    break
            return deltas

    deltas = asyncio.run(run())
    return client.ready, deltas


def tokens_of(deltas: list[ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_defaults_by_use_and_what_they_change(gemma: Path) -> None:
    server, deltas = serve(gemma)
    assert (server.max_num_seqs, server.max_num_batched_tokens) == (128, 2048)
    assert len(server.layout_fingerprints) > 1, "layers with a window are a group of their own"
    # A profile run leaves as much as one pool may take by itself.
    assert 0 < server.num_blocks * server.block_bytes <= MAX_AUTOMATIC_POOL_BYTES
    # Small steps, one planned after the other, a pool that holds little more than one sequence, several tokens a message.
    small, in_threes = serve(
        gemma,
        offline=True,
        max_num_batched_tokens=16,
        async_scheduling=False,
        kv_cache_memory_bytes=70 * server.block_bytes,
        max_model_len=80,
        stream_interval=3,
    )
    assert (small.max_num_seqs, small.max_num_batched_tokens, small.num_blocks) == (16, 16, 70)
    assert tokens_of(in_threes) == tokens_of(deltas)
    assert [len(delta.token_ids) for delta in deltas] == [1] * 8
    assert [len(delta.token_ids) for delta in in_threes] == [1, 3, 3, 1]
    assert [delta.finish_reason for delta in in_threes] == ["", "", "", "length"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_active_seqs": 129}, "max-num-active-seqs 129 is more than max-num-seqs 128"),
        ({"logits_processors": ["json:NoSuchClass"]}, "logits-processors: 'json:NoSuchClass' cannot be imported"),
    ],
)
def test_what_only_the_core_can_know_is_refused_in_one_line(gemma: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        serve(gemma, **settings)
    assert "\n" not in caught.value.message


def test_a_pool_that_cannot_be_had_is_told_with_what_there_is(gemma: Path) -> None:
    """It was a traceback, and an OSError that named nothing."""
    told = r"kv-cache-memory-bytes: a pool of \d{15,} bytes cannot be had \(.+\); \d+ bytes of memory are available"
    with pytest.raises(ConfigError, match=told) as caught:
        serve(gemma, kv_cache_memory_bytes=999 << 40)
    assert "\n" not in caught.value.message


def test_rows_that_cannot_be_had_are_told_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: object, **settings: object) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(core_process, "Runner", none_left)
    info = ModelInfo(
        fingerprint="m",
        groups=(KVGroupSpec(kind="full", layers=(0,), block_size=16, block_bytes=1000, fingerprint="f"),),
        max_model_len=64,
        vocab_size=10,
        eos_token_ids=(1,),
        dtype="float32",
    )
    config = EngineConfig(max_num_seqs=60000)
    told = (
        r"max-num-seqs 60000: .* rows of 64 tokens \(max-model-len\): Unable to allocate 9 GiB; \d+ bytes are available"
    )
    with pytest.raises(ConfigError, match=told):
        core_process._executor(config, TorchBackend(1), info, Sizes(num_blocks=4, max_model_len=64), [])
