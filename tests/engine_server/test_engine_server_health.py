"""What an engine says of its health: its connectors are proved, its core is heard, and neither is taken on trust."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc.aio
import httpx
import msgspec
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.engine.server import heart, kv_probe
from pdmesh.engine.server.assembly import Engine
from pdmesh.errors import PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.security import MeshSecret
from support.engines import SECRET, RunningEngine, loop_thread, proxy_session, request, start_engines, tokens_of
from support.held_engine import HeldCore, counted, play


async def offered(engine: RunningEngine) -> list[str]:
    async with proxy_session(engine.grpc) as session:
        info = await session.stub.Describe(pb.DescribeRequest(), metadata=session.metadata)
        return list(info.connectors)


async def grpc_health(engine: RunningEngine) -> int:
    async with grpc.aio.insecure_channel(engine.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        metadata = MeshSecret(SECRET).call_metadata()
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="pdmesh.v1.Engine"), metadata=metadata)
        return int(answer.status)


async def http_health(engine: RunningEngine) -> httpx.Response:
    async with httpx.AsyncClient(base_url=engine.http, timeout=20) as client:
        return await client.get("/health")


def shown(text: str, name: str) -> list[float]:
    """Values of a metric's samples."""
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{")]


def test_every_connector_there_is_pulls_a_block_of_its_own_engine(tiny_model: str) -> None:
    async def body() -> None:
        (engine,) = await start_engines(tiny_model, "both", connector=["nixl", "shm", "grpc"])
        try:
            async with asyncio.timeout(20), httpx.AsyncClient(base_url=engine.http) as client:
                while sum(proved := shown((await client.get("/metrics")).text, "pdmesh_connector_proved")) < 3:
                    assert len(proved) == 3
                    await asyncio.sleep(0.1)
                text = (await client.get("/metrics")).text
            assert shown(text, "pdmesh_connector_probe_failures_total") == [0, 0, 0]
            assert await offered(engine) == ["nixl", "shm", "grpc"]
            assert (await http_health(engine)).status_code == 200
            assert await grpc_health(engine) == health_pb2.HealthCheckResponse.SERVING
        finally:
            await engine.stop()

    with loop_thread() as loop:
        loop.run(body())


WITH_CONNECTORS = msgspec.structs.replace(HeldCore.ready, connectors={"shm": b"s", "nixl": b"n"})
CONNECTORS: dict[str, Any] = {"connector": ["nixl", "shm"]}


def handshake_offers(engine: Engine) -> set[str]:
    return set(engine.handoff.owner._connectors)


def test_a_connector_that_fails_is_not_offered_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldCore, "ready", WITH_CONNECTORS)
    monkeypatch.setattr(kv_probe, "FIRST_BACKOFF_S", 0.05)

    async def scene(core: HeldCore, engine: Engine) -> None:
        core.broken = {"nixl": "timeout"}
        await engine.probe.first()
        assert (list(engine.servicer._info.connectors), handshake_offers(engine)) == (["shm"], {"shm"})
        assert counted(engine, "pdmesh_connector_probe_failures_total", connector="nixl") == 1
        assert await engine.generator.healthy()
        proving = asyncio.create_task(engine.probe.run())
        # Its helper has been started anew, and it works.
        core.broken = {}
        engine.probe.changed("nixl", b"n2")
        async with asyncio.timeout(5):
            while list(engine.servicer._info.connectors) != ["nixl", "shm"]:
                await asyncio.sleep(0.01)
        assert engine.handoff.owner._connectors == {"shm": b"s", "nixl": b"n2"}
        proving.cancel()

    play(scene, **CONNECTORS)


def test_an_engine_none_of_whose_connectors_works_is_not_ready_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldCore, "ready", WITH_CONNECTORS)
    monkeypatch.setattr(kv_probe, "FIRST_BACKOFF_S", 0.05)

    async def scene(core: HeldCore, engine: Engine) -> None:
        core.broken = {"nixl": "timeout", "shm": "peer_lost"}
        await engine.probe.first()
        assert await engine.generator.problem() == "no KV connector works (nixl: timeout; shm: peer_lost)"
        proving = asyncio.create_task(engine.probe.run())
        core.broken = {"nixl": "timeout"}
        await asyncio.wait_for(engine.probe.works(), 5)
        assert await engine.generator.healthy()
        assert list(engine.servicer._info.connectors) == ["shm"]
        proving.cancel()

    play(scene, **CONNECTORS)


def test_a_connector_without_a_verdict_is_proved_again_and_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe to which the core gave no answer was taken for a proof, and never repeated."""
    monkeypatch.setattr(HeldCore, "ready", WITH_CONNECTORS)
    monkeypatch.setattr(kv_probe, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(kv_probe, "ANSWER_TIMEOUT_S", 0.05)

    async def scene(core: HeldCore, engine: Engine) -> None:
        core.mute, core.broken = {"nixl"}, {"shm": "peer_lost"}
        await engine.probe.first()
        assert await engine.generator.problem() == "no KV connector works (nixl: not proved yet; shm: peer_lost)"
        core.broken = {}
        proving = asyncio.create_task(engine.probe.run())
        await asyncio.wait_for(engine.probe.works(), 5)
        assert await engine.generator.healthy()
        # None has failed, and the one without a verdict is asked for all the same.
        core.mute, core.broken = set(), {"nixl": "corrupt"}
        async with asyncio.timeout(5):
            while list(engine.servicer._info.connectors) != ["shm"]:
                await asyncio.sleep(0.01)
        proving.cancel()

    play(scene, **CONNECTORS)


def cores_of_this_process() -> set[int]:
    """Process ids."""
    children = psutil.Process().children()
    return {child.pid for child in children if any("core_process" in word for word in child.cmdline())}


def test_a_stopped_core_is_told_by_health_and_ends_its_requests(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/health said 200 of it, requests waited for their deadline, and a proxy saw nothing wrong with the engine."""
    monkeypatch.setattr(heart, "BEAT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(heart, "FRESH_S", 0.0)

    async def body() -> None:
        others = cores_of_this_process()
        (engine,) = await start_engines(tiny_model, "decode", core_timeout_s=1.0)
        [core] = cores_of_this_process() - others
        try:
            async with proxy_session(engine.grpc) as session:
                wanted = tokens_of(await session.run(request("before")))
                os.kill(core, signal.SIGSTOP)
                answer = await http_health(engine)
                assert (answer.status_code, answer.text) == (503, "the engine core does not answer\n")
                assert await grpc_health(engine) == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(PeerUnavailable, match="has not answered for 1 s"):
                    await session.run(request("stuck"))
                # Who comes now need not wait for it.
                with pytest.raises(PeerUnavailable, match="has not answered for 1 s"):
                    await session.run(request("refused", deadline_s=600.0))
                os.kill(core, signal.SIGCONT)
                async with asyncio.timeout(10):
                    while (await http_health(engine)).status_code != 200:
                        await asyncio.sleep(0.05)
                assert tokens_of(await session.run(request("after"))) == wanted
        finally:
            os.kill(core, signal.SIGCONT)
            await engine.stop()

    with loop_thread() as loop:
        loop.run(body())
