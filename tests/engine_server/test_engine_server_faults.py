"""An engine that is told to stop, or whose core or peer dies."""

import asyncio
import signal
from typing import Any

import httpx
import psutil
import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.server.service import serve_engine
from pdmesh.errors import ConfigError, Draining, InternalError, PeerUnavailable
from pdmesh.lifecycle import Life
from pdmesh.protocol.ticket import unseal
from pdmesh.security import MeshSecret
from support.engines import SECRET, RunningEngine, proxy_session, request, start_engines, tokens_of


def _core_of(before: set[int]) -> psutil.Process:
    cores = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
    assert len(cores) == 1
    return cores[0]


def test_recompute_policy_drain_and_core_death(pair: Any, tiny_model: str) -> None:
    """One extra engine serves three scenes, because each start costs seconds."""

    async def recomputes(engine: RunningEngine) -> None:
        made = request("again", num_prompt=48)
        async with proxy_session(pair.prefill.grpc) as prefill, proxy_session(engine.grpc) as decode:
            expected = tokens_of(await decode.run(request("base", num_prompt=48, cache_salt="elsewhere")))
            leg = request("again", token_ids=made.token_ids, prefill_only=True)
            deltas = await prefill.run(leg)
            await prefill.tell(release_offers=[_offer_of(deltas[-1].ticket)])
            await prefill.load(until=lambda load: load.num_offers == 0)
            answer = await decode.run(
                request("again", token_ids=made.token_ids, ticket=deltas[-1].ticket, emitted=[tokens_of(deltas)])
            )
            assert tokens_of(deltas) + tokens_of(answer) == expected
            assert next(delta for delta in answer if delta.token_ids).kv_source == "recompute:released"
            assert any(delta.kv_committed for delta in answer)

    async def core_dies(engine: RunningEngine, core: psutil.Process) -> None:
        async with proxy_session(engine.grpc) as session:
            made = request("cut", max_tokens=900)
            await session.submit(made)
            await session.next_delta("cut")
            core.send_signal(signal.SIGKILL)
            with pytest.raises(PeerUnavailable, match="core died"):
                await session.collect(made)
        await asyncio.wait_for(engine.task, 10)
        assert isinstance(engine.life.exit_error, InternalError)

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    engine = pair.loop.run(start_engines(tiny_model, "decode", kv_load_failure_policy="recompute"))[0]
    core = _core_of(before)
    pair.loop.run(recomputes(engine))
    pair.loop.run(core_dies(engine, core))
    assert not psutil.pid_exists(core.pid)


def test_drain_lets_requests_finish_and_refuses_new_ones(pair: Any, tiny_model: str) -> None:
    async def body() -> None:
        engine = (await start_engines(tiny_model, "decode", drain_timeout_s=20.0))[0]
        async with proxy_session(engine.grpc) as session, httpx.AsyncClient(base_url=engine.http) as client:
            running = request("running", max_tokens=300)
            await session.submit(running)
            await session.next_delta("running")
            engine.life.stop()
            assert (await session.load(until=lambda load: load.draining)).draining
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
            assert refused.status_code == 503
            with pytest.raises(Draining):
                await session.run(request("new"))
            answer = await session.collect(running)
            assert answer[-1].finish_reason == "length"
        await asyncio.wait_for(engine.task, 10)

    pair.loop.run(body())


def test_drain_ends_what_outlasts_it(pair: Any, tiny_model: str) -> None:
    async def body() -> None:
        engine = (await start_engines(tiny_model, "decode", drain_timeout_s=0.2))[0]
        async with proxy_session(engine.grpc) as session:
            running = request("endless", max_tokens=900)
            await session.submit(running)
            await session.next_delta("endless")
            engine.life.stop()
            with pytest.raises(Draining):
                await session.collect(running)
        await asyncio.wait_for(engine.task, 10)

    pair.loop.run(body())


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"model": ""}, "model"), ({"model": "/no/such/model"}, "/no/such/model"), ({"host": "0.0.0.0"}, "secret")],
)
def test_an_engine_that_cannot_start_says_why(settings: dict[str, Any], says: str) -> None:
    config = EngineConfig(**({"port": 0, "grpc_port": 0, "model": "/no/such/model"} | settings))
    with pytest.raises(ConfigError, match=says):
        asyncio.run(serve_engine(config, Life(), "decode"))


def test_a_stop_while_starting_ends_it(tiny_model: str) -> None:
    async def body() -> None:
        config = EngineConfig(model=tiny_model, port=0, grpc_port=0, cpu_threads=1)
        life = Life()
        serving = asyncio.create_task(serve_engine(config, life, "decode"))
        await asyncio.sleep(0.3)
        life.stop()
        await asyncio.wait_for(serving, 3)

    asyncio.run(body())


def _offer_of(ticket: bytes) -> str:
    return unseal(ticket, MeshSecret(SECRET)).offer_id
