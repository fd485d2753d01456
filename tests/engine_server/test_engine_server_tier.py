"""Engines with a tier, the recompute policy, and an end by SIGKILL: scenes on two engines, because each start costs seconds."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import httpx
import psutil
import pytest

from pdmesh.errors import InternalError, PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.mesh_pb2_grpc import KVCacheStub
from pdmesh.protocol.ticket import unseal
from pdmesh.security import MeshSecret
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.server import serve as serve_kvcache
from support.engines import (
    SECRET,
    RecordingLife,
    RunningEngine,
    loop_thread,
    proxy_session,
    request,
    start_engines,
    tokens_of,
)


@asynccontextmanager
async def _running_tier() -> AsyncIterator[str]:
    life = RecordingLife()
    config = KVCacheConfig(port=0, grpc_port=0, secret=SECRET, arena_bytes=8 << 20)
    task = asyncio.create_task(serve_kvcache(config, life))
    await asyncio.wait_for(life.is_ready.wait(), 20)
    try:
        yield f"127.0.0.1:{life.facts['grpc_port']}"
    finally:
        life.stop()
        await task


async def _metric(engine: RunningEngine, name: str, labels: str = "") -> float:
    async with httpx.AsyncClient(base_url=engine.http, timeout=10) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and labels in line)


async def _until_held(tier: str, num_blocks: int) -> None:
    """Wait until the tier has pulled what it was offered."""
    async with grpc.aio.insecure_channel(tier) as channel, asyncio.timeout(20):
        metadata = MeshSecret(SECRET).call_metadata()
        while (await KVCacheStub(channel).Stats(pb.StatsRequest(), metadata=metadata)).num_used < num_blocks:
            await asyncio.sleep(0.02)


async def _one_engines_blocks_serve_the_other(first: RunningEngine, second: RunningEngine, tier: str) -> None:
    made = request("stored", num_prompt=200)
    async with proxy_session(first.grpc) as session, proxy_session(second.grpc) as other:
        expected = tokens_of(await session.run(made))
        await _until_held(tier, 12)
        answer = await other.run(request("found", token_ids=made.token_ids))
        assert tokens_of(answer) == expected
        told = next(delta for delta in answer if delta.token_ids)
        assert (told.kv_source, told.cached_tokens) == ("tier", 192)
        await other.load(until=lambda load: load.kv_usage == 0)


async def _a_lost_tier_is_counted_and_waited_for_no_more(engine: RunningEngine) -> None:
    async with proxy_session(engine.grpc) as session:
        for number in range(3):
            answer = await session.run(request(f"without-{number}", num_prompt=180 + number))
            assert len(tokens_of(answer)) == 8
    assert await _metric(engine, "pdmesh_tier_lookups_total", 'outcome="failed"') >= 1
    assert await _metric(engine, "pdmesh_tier_lookups_total", 'outcome="unconnected"') >= 1


async def _an_ended_offer_is_recomputed(prefill: RunningEngine, engine: RunningEngine) -> None:
    made = request("again", num_prompt=48)
    async with proxy_session(prefill.grpc) as first, proxy_session(engine.grpc) as second:
        expected = tokens_of(await second.run(request("base", num_prompt=48, cache_salt="elsewhere")))
        deltas = await first.run(request("again", token_ids=made.token_ids, prefill_only=True))
        ticket = deltas[-1].ticket
        await first.tell(release_offers=[unseal(ticket, MeshSecret(SECRET)).offer_id])
        await first.load(until=lambda load: load.num_offers == 0)
        answer = await second.run(
            request("again", token_ids=made.token_ids, ticket=ticket, emitted=[tokens_of(deltas)])
        )
        assert tokens_of(deltas) + tokens_of(answer) == expected
        assert next(delta for delta in answer if delta.token_ids).kv_source == "recompute:released"
        assert any(delta.kv_committed for delta in answer)
    assert await _metric(engine, "pdmesh_fallbacks_total", 'reason="released"') == 1


async def _a_killed_core_fails_its_requests_and_the_service(engine: RunningEngine, core: psutil.Process) -> None:
    async with proxy_session(engine.grpc) as session:
        made = request("cut", max_tokens=900)
        await session.submit(made)
        await session.next_delta("cut")
        core.send_signal(signal.SIGKILL)
        with pytest.raises(PeerUnavailable, match="core died"):
            await session.collect(made)
    await asyncio.wait_for(engine.task, 10)
    assert isinstance(engine.life.exit_error, InternalError)


def test_tier_recompute_and_core_death(tiny_model: str) -> None:
    async def scenes() -> None:
        before = set(psutil.Process().children())
        async with _running_tier() as address:
            first, second = await start_engines(
                tiny_model, "prefill", "decode", kvcache=address, kv_load_failure_policy="recompute"
            )
            await _one_engines_blocks_serve_the_other(first, second, address)
        await _a_lost_tier_is_counted_and_waited_for_no_more(second)
        await _an_ended_offer_is_recomputed(first, second)
        await first.stop()
        (core,) = set(psutil.Process().children()) - before
        await _a_killed_core_fails_its_requests_and_the_service(second, core)

    with loop_thread() as loop:
        loop.run(scenes())
