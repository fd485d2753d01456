"""An engine that is told to stop, while it starts, while it runs, or before it can start at all."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.server.preflight import check_engine
from pdmesh.engine.server.service import serve_engine
from pdmesh.errors import ConfigError, Draining
from pdmesh.lifecycle import Life, unless_stopped_early
from support.engines import SECRET, loop_thread, proxy_session, request, start_engines


def test_drain_lets_requests_finish_refuses_new_ones_and_ends_the_rest(tiny_model: str) -> None:
    async def body() -> None:
        (engine,) = await start_engines(tiny_model, "decode", drain_timeout_s=2.0)
        async with proxy_session(engine.grpc) as session, httpx.AsyncClient(base_url=engine.http) as client:
            short = request("short", max_tokens=50)
            # Sixteen choices make it last several times as long as the drain.
            many = {"n": 16, "temperature": 1.0, "seed": 5, "max_tokens": 980}
            endless = request("endless", choices=list(range(16)), sampling=many)
            await session.submit(short)
            await session.submit(endless)
            await session.next_delta("endless")
            engine.life.stop()
            assert (await session.load(until=lambda load: load.draining)).draining
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
            assert refused.status_code == 503
            with pytest.raises(Draining):
                await session.run(request("new"))
            assert (await session.collect(short))[-1].finish_reason == "length"
            with pytest.raises(Draining, match="before the request ended"):
                await session.collect(endless)
        await asyncio.wait_for(engine.task, 10)

    with loop_thread() as loop:
        loop.run(body())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": ""}, "model"),
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"host": "0.0.0.0"}, "secret"),
        ({"max_num_active_seqs": 60000}, "max-num-active-seqs 60000 is more than max-num-seqs 128"),
        ({"logits_processors": ["nowhere.at_all:X"]}, "'nowhere', which is not installed"),
    ],
)
def test_an_engine_that_cannot_start_says_why(settings: dict[str, Any], says: str) -> None:
    config = EngineConfig(**({"port": 0, "grpc_port": 0, "model": "/no/such/model"} | settings))
    with pytest.raises(ConfigError, match=says):
        asyncio.run(check_engine(config))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"kv_cache_memory_bytes": 999 << 40},
            r"kv-cache-memory-bytes \d+ is more than all the memory there is, \d+ bytes",
        ),
        ({"long_prefill_token_threshold": 1 << 20}, "long-prefill-token-threshold 1048576 is more than"),
        ({"logits_processors": ["os:path"]}, "'os:path' is not a subclass"),
        ({"logits_processors": ["json:Nope"]}, "'json:Nope' cannot be imported: AttributeError"),
    ],
)
def test_a_check_finds_what_a_start_would(tiny_model: str, settings: dict[str, Any], says: str) -> None:
    config = EngineConfig(port=0, grpc_port=0, model=tiny_model, check_config=True, **settings)
    with pytest.raises(ConfigError, match=says) as caught:
        asyncio.run(check_engine(config))
    assert "\n" not in caught.value.message


def _held() -> set[str]:
    """What an engine could leave behind: child processes and descriptors of shared memory."""
    folder = Path("/proc/self/fd")
    links = {f"{each.name}: {os.readlink(each)}" for each in folder.iterdir() if each.exists() or each.is_symlink()}
    children = {f"process {child.pid}" for child in psutil.Process().children(recursive=True)}
    return {link for link in links if "memfd:pdmesh" in link} | children


def test_a_stop_while_starting_ends_it_and_leaves_nothing(tiny_model: str) -> None:
    """At whatever point of its start: before the core process, when there is one, and when it has its pool."""

    async def body(has_come: Callable[[], bool]) -> None:
        config = EngineConfig(model=tiny_model, port=0, grpc_port=0, cpu_threads=1, secret=SECRET)
        life = Life()
        serving = asyncio.create_task(unless_stopped_early(serve_engine(config, life, "decode"), life))
        async with asyncio.timeout(20):
            while not has_come():
                assert not life.is_ready, "it was too late to stop a start"
                await asyncio.sleep(0.005)
        life.stop()
        await asyncio.wait_for(serving, 5)

    before = _held()
    for has_come in (
        lambda: True,
        lambda: any("memfd" in each for each in _held() - before),
        lambda: any("process" in each for each in _held() - before),
    ):
        asyncio.run(body(has_come))
        assert _held() - before == set()


def test_a_taken_port_is_told_before_the_model_is_loaded(tiny_model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = EngineConfig(model=tiny_model, port=0, grpc_port=port)
        before = time.monotonic()
        with pytest.raises(ConfigError, match=f"port {port}"):
            asyncio.run(check_engine(config))
        assert time.monotonic() - before < 1.0
