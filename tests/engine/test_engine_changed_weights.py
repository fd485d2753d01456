"""A real core whose weights file somebody changes: it ends and says so, gives no wrong token, and its successor serves."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.messages import CoreFailed, StepOutput
from support.core_harness import make_add
from support.tiny_models import make_tiny

PROMPT = list(range(5, 75))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_tiny("llama", tmp_path / "llama")


def started(model: Path) -> CoreClient:
    config = EngineConfig(
        model=str(model), backend="cpu", cpu_threads=2, connector=["shm"], kv_cache_memory_bytes=4 << 20
    )
    return CoreClient(config, engine_id="test", epoch=1, on_progress=lambda _stage, _fraction: None)


async def served(client: CoreClient, name: str) -> tuple[list[int], str]:
    """The tokens of one request, and what the core said at its end if it ended."""
    client.send(make_add(PROMPT, name))
    tokens: list[int] = []
    async for message in client.outputs():
        if isinstance(message, CoreFailed):
            return tokens, message.message
        assert isinstance(message, StepOutput)
        for delta in message.deltas:
            assert not delta.error_message
            tokens += delta.token_ids
            if delta.finish_reason:
                return tokens, ""
    return tokens, ""


def overwrite(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2)
        file.write(b"\x41" * 4096)


def cut(weights: Path) -> None:
    os.truncate(weights, 4096)


@pytest.mark.parametrize(("change", "how"), [(overwrite, "exit code 1"), (cut, "killed by signal 7")])
def test_a_core_whose_weights_change_ends_with_a_word(
    model: Path, tmp_path: Path, change: Callable[[Path], None], how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It computed on with whatever lay there, or ended without saying why."""

    async def test() -> None:
        async with asyncio.timeout(120):
            async with started(model) as client:
                right, _ = await served(client, "before")
                (weights,) = (tmp_path / "cache" / "pdmesh" / "weights").glob("*.weights")
                change(weights)
                tokens, words = await served(client, "after")
                assert tokens == []
                assert await client.died() == how
            assert str(weights) in words + capfd.readouterr().err
            async with started(model) as client:
                assert await served(client, "again") == (right, "")

    asyncio.run(test())
