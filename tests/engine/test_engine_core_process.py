"""A real core process over ZMQ with a tiny model: start, serve, sleep, fail and die."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq

from pdmesh.config import EngineConfig
from pdmesh.engine.backend import ProgressCallback
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.cpu_backend import CpuBackend
from pdmesh.engine.messages import StepOutput
from pdmesh.errors import ConfigError
from pdmesh.models.kv_cache_dtype import KVCacheDtype
from pdmesh.protocol.messages import ChoiceDelta
from support.core_harness import make_add
from support.tiny_models import make_tiny

PROMPT = list(range(5, 75))
GARBAGE = [b"", b"\x00" * 64, b"\xff" * 50, b"\x81\xa4type\xa5Bogus", b"\xa2\xff\xfe", b"\x91" * 100_000]
SEVERAL = {"n": 3, "temperature": 0.8, "seed": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("models") / "llama")


def config_of(model: Path, **settings: object) -> EngineConfig:
    fixed = {"model": str(model), "cpu_threads": 1, "connector": ["shm"], "kv_cache_memory_bytes": 4 << 20}
    return EngineConfig(**(fixed | settings))  # type: ignore[arg-type]


@asynccontextmanager
async def started(config: EngineConfig) -> AsyncIterator[CoreClient]:
    stages: list[str] = []
    client = CoreClient(config, engine_id="test", epoch=7, on_progress=lambda stage, _: stages.append(stage))
    async with asyncio.timeout(60), client:
        assert stages
        yield client


async def generate(client: CoreClient, num_choices: int = 1, **options: object) -> list[ChoiceDelta]:
    client.send(make_add(PROMPT, **options))
    deltas: list[ChoiceDelta] = []
    async for message in client.outputs():
        assert isinstance(message, StepOutput)
        deltas += message.deltas
        if sum(bool(delta.finish_reason) for delta in deltas) == num_choices:
            break
    return deltas


def tokens_of(deltas: list[ChoiceDelta]) -> dict[int, list[int]]:
    return {
        choice: [token for delta in deltas if delta.choice == choice for token in delta.token_ids]
        for choice in {delta.choice for delta in deltas}
    }


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await test()

    asyncio.run(bounded())


def test_a_core_serves_sleeps_ends_and_its_death_is_noticed(model: Path) -> None:
    async def test() -> None:
        async with started(config_of(model)) as client:
            deltas = await generate(client)
            assert [len(delta.token_ids) for delta in deltas] == [1] * 8
            assert (client.ready.block_size, client.ready.num_blocks) == (32, 256)
            assert "shm" in client.ready.connectors
            # The server maps the same pool, and it holds the prompt's KV.
            pool = client.pool()
            assert pool.blocks.any()
            pool.close()
            process = psutil.Process(client.pid)
            await asyncio.sleep(0.2)
            before = process.cpu_times()
            await asyncio.sleep(0.8)
            after = process.cpu_times()
            assert (after.user + after.system) - (before.user + before.system) < 0.03
            # A terminal's Ctrl-C reaches the core too; only its server ends it.
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            several = tokens_of(await generate(client, num_choices=3, **SEVERAL))
            assert {len(tokens) for tokens in several.values()} == {8}
            began = time.monotonic()
        assert await client.died() == "exit code 0"
        assert time.monotonic() - began < 5

        # A second core computes the same in chunks of 16, and is killed.
        async with started(config_of(model, max_num_batched_tokens=16, enable_prefix_caching=False)) as client:
            assert tokens_of(await generate(client, num_choices=3, **SEVERAL)) == several
            os.kill(client.pid, signal.SIGKILL)
            began = time.monotonic()
            assert await client.died() == "killed by signal 9"
            assert not client.alive
            # At most the gauges that the core sends when it comes to rest, if they were still on their way.
            assert not [m async for m in client.outputs() if not isinstance(m, StepOutput) or m.deltas]
            assert time.monotonic() - began < 2
            client.send(make_add(PROMPT))

    run(test)


def test_settings_reach_what_computes(model: Path) -> None:
    """Between the command line and the library a setting could be dropped, and everything would still be computed."""
    cores = sorted(os.sched_getaffinity(0))[-2:]
    numbers = {"quantization": "int8", "kv_cache_dtype": "int8_per_token_head"}
    places = {"cpu_threads": 0, "cpu_cores": ",".join(map(str, cores)), "cpu_nice": 2}
    with contextlib.closing(CpuBackend(1, "avx2", "int8", KVCacheDtype.INT8_PER_TOKEN_HEAD)) as backend:
        info = backend.load(str(model), "auto", None, ProgressCallback())

    async def test() -> None:
        async with started(config_of(model, cpu_isa="avx2", **numbers, **places)) as client:
            ready = client.ready
            assert (ready.backend, ready.instruction_set, ready.backend_fallback) == ("cpu", "avx2", "")
            assert (ready.dtype, ready.quantization, ready.kv_dtype) == ("bfloat16", "int8", "int8")
            assert (ready.model_fingerprint, ready.block_bytes) == (info.fingerprint, info.groups[0].block_bytes)
            # The thread that makes steps is placed before its first.
            await generate(client)
            niceness = os.getpriority(os.PRIO_PROCESS, client.pid)
            threads = [thread.id for thread in psutil.Process(client.pid).threads()]
            placed = [
                os.sched_getaffinity(thread)
                for thread in threads
                if os.getpriority(os.PRIO_PROCESS, thread) == niceness + 2
            ]
            assert sorted(map(sorted, placed)) == [[core] for core in cores]

    run(test)


def test_what_cannot_start_is_a_config_error() -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="/no/such/model"):
            async with CoreClient(
                config_of(Path("/no/such/model")), engine_id="test", epoch=7, on_progress=lambda *_: None
            ):
                pass

    run(test)


def test_a_core_dies_with_the_process_that_started_it(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pdmesh.config import EngineConfig\n"
        "from pdmesh.engine.core_client import CoreClient\n"
        "async def main():\n"
        "    config = EngineConfig.model_validate_json(sys.argv[1])\n"
        "    async with CoreClient(config, engine_id='t', epoch=1, on_progress=lambda *_: None) as client:\n"
        "        print(client.pid, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )

    async def test() -> None:
        server = await asyncio.create_subprocess_exec(
            sys.executable, str(script), config_of(model).model_dump_json(), stdout=asyncio.subprocess.PIPE
        )
        assert server.stdout is not None
        async with asyncio.timeout(60):
            core = psutil.Process(int(await server.stdout.readline()))
        server.kill()
        await server.wait()
        _, alive = psutil.wait_procs([core], timeout=5)
        assert not alive

    run(test)


def test_the_client_imports_no_torch() -> None:
    code = "import sys, pdmesh.engine.core_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_garbage_on_either_socket_is_dropped_and_counted(model: Path) -> None:
    """Once, a message that could not be decoded ended the engine."""

    def spoil(address: str, kind: int) -> None:
        with zmq.Context() as context, context.socket(kind) as other:
            other.connect(address)
            for data in GARBAGE:
                other.send(data)

    async def test() -> None:
        async with started(config_of(model)) as client:
            # As the server would send it, through its own socket: a second one on the core's end cannot be had.
            for data in GARBAGE:
                client._channel._to_core.send(data)
            await asyncio.to_thread(spoil, client._channel.from_core_address, zmq.PUSH)
            assert [len(delta.token_ids) for delta in await generate(client)] == [1] * 8
            client.send(make_add(PROMPT, "counted", max_tokens=1))
            async with asyncio.timeout(10):
                async for message in client.outputs():
                    assert isinstance(message, StepOutput)
                    if message.stats is not None and message.stats.undecodable_messages == 2 * len(GARBAGE):
                        break
            assert client.alive

    run(test)
