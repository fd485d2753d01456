"""What a core loads when it starts: an engine on a CPU whose weights are packed already has no use for torch or gRPC."""

import asyncio
from pathlib import Path

from pdmesh.config import EngineConfig
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.messages import StepOutput
from support.core_harness import make_add
from support.tiny_models import make_tiny


async def libraries_of_a_core(config: EngineConfig) -> str:
    """Start a core, have it draw tokens and report them, and return what it has mapped."""
    async with CoreClient(config, engine_id="test", epoch=7, on_progress=lambda *_: None) as client:
        client.send(make_add(list(range(5, 45)), temperature=0.8, seed=3, logprobs=2))
        async for message in client.outputs():
            assert isinstance(message, StepOutput)
            if any(delta.finish_reason for delta in message.deltas):
                break
        return mapped_by(client.pid)


def mapped_by(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_core_with_packed_weights_runs_without_torch(tmp_path: Path) -> None:
    settings = {
        "model": str(make_tiny("llama", tmp_path / "llama")),
        "cpu_threads": 1,
        "kv_cache_memory_bytes": 4 << 20,
    }

    async def test() -> None:
        async with asyncio.timeout(100):
            # The first one packs the weights, for which tensors are read, unless an earlier run has.
            await libraries_of_a_core(EngineConfig(**settings, backend="cpu"))
            mapped = await libraries_of_a_core(EngineConfig(**settings, backend="cpu"))
            assert "libpdmesh_cpu" in mapped
            assert "libtorch" not in mapped
            assert "cygrpc" not in mapped
            assert "libtorch" in await libraries_of_a_core(EngineConfig(**settings, backend="torch"))

    asyncio.run(test())
