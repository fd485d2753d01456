"""What a proxy does for requests that lose their KV, or whose engine shuts down: kept offers, another prefill, an early move."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.offers import HeldOffer, HeldOffers
from pdmesh_proxy.running import RunningRequest
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, FakeMesh, fake_mesh, token_request, tokens_of

WANTED = expected_tokens(PROMPT, 40)


async def started(mesh: FakeMesh, decode: FakeEngine, num_tokens: int = 3) -> asyncio.Task[list[int]]:
    """A request that decode works on."""
    request = token_request(max_tokens=40, deadline_s=60.0)
    num_shown = 0

    async def collect() -> list[int]:
        nonlocal num_shown
        tokens: list[int] = []
        async for delta in mesh.generator.generate(request):
            tokens += delta.token_ids
            num_shown = len(tokens)
        return tokens

    task = asyncio.create_task(collect())
    await until(lambda: bool(decode.requests) and num_shown >= num_tokens)
    return task


SLOW = {"step_s": 0.02}


@pytest.mark.parametrize("why", ["pressure", "drain", "time", "off"])
def test_an_offer_is_kept_until_the_request_ends_or_its_prefill_needs_the_room(why: str) -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode", behaviour=Behaviour(**SLOW))
        seconds = {"time": 0.05, "off": 0.0}.get(why, 60.0)
        async with fake_mesh(prefill, decode, extra={"keep_offers_s": seconds}) as mesh:
            task = await started(mesh, decode)
            if why in ("pressure", "drain"):
                assert prefill.offers.open, "it was not kept"
                prefill.use(0.6) if why == "pressure" else prefill.drain()
            await until(lambda: not prefill.offers.open)
            assert not task.done()
            assert await task == WANTED
            assert len(prefill.offers.released) == 1

    asyncio.run(scenario())


def test_a_kept_offer_goes_with_its_request() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode, extra={"keep_offers_s": 60.0}) as mesh:
            assert tokens_of(await mesh.collect(token_request(max_tokens=40))) == WANTED
            await until(lambda: not prefill.offers.open)
            assert len(prefill.offers.released) == 1

    asyncio.run(scenario())


def test_a_request_that_decode_hands_back_goes_on_from_a_prefill() -> None:
    """It was computed again where there was no room for it, in front of those that ran."""

    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode", behaviour=Behaviour(hand_back_at=9))
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert [leg.emitted for leg in prefill.requests] == [[], [WANTED[:9]]]
            assert [bool(leg.ticket) for leg in decode.requests] == [True, True]
            assert decode.requests[1].emitted == [WANTED[:10]]
            assert request.trace.preempted == ["prefill"]
            assert request.trace.fallbacks == []
            assert mesh.metric("pdmesh_proxy_preempted_total", source="prefill") == 1
            assert not mesh.cluster._endpoints[decode.address].resting
            await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


def test_nothing_is_handed_back_where_no_prefill_could_help() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            await mesh.collect(token_request())
            prefill.use(0.9)
            await until(lambda: any(engine.kv_usage > 0.8 for engine in mesh.cluster.view().engines))
            await mesh.collect(token_request())
            await mesh.collect(token_request(n=2))
            assert [leg.hand_back for leg in decode.requests] == [True, False, False]

    asyncio.run(scenario())


def test_a_draining_engine_s_requests_move_in_time_when_another_engine_lives() -> None:
    """They ran into the end of the drain, and their engine's KV went with it."""

    async def scenario() -> None:
        prefill = FakeEngine("prefill")
        decodes = [FakeEngine("decode", behaviour=Behaviour(step_s=0.1)) for _ in range(2)]
        async with fake_mesh(prefill, *decodes, extra={"max_retries": 0}) as mesh:
            task = asyncio.create_task(mesh.collect(token_request(max_tokens=40, deadline_s=60.0)))
            await until(lambda: any(engine.requests for engine in decodes))
            [leaving] = [engine for engine in decodes if engine.requests]
            [other] = [engine for engine in decodes if engine is not leaving]
            other.behaviour.step_s = 0.0
            leaving.drain(within_ms=1000)
            assert tokens_of(await task) == WANTED
            assert other.requests[0].ticket, "the prefill's KV was not used"
            assert len(other.requests[0].emitted[0]) < 12

    asyncio.run(scenario())


@pytest.mark.parametrize(("step_s", "within_ms"), [(0.002, 60_000), (0.02, 300)])
def test_what_ends_in_time_or_has_nowhere_to_go_runs_to_its_end(step_s: float, within_ms: int) -> None:
    async def scenario() -> None:
        engines = [
            FakeEngine("decode", behaviour=Behaviour(step_s=step_s)) for _ in range(2 if within_ms > 1000 else 1)
        ]
        async with fake_mesh(*engines) as mesh:
            task = asyncio.create_task(mesh.collect(token_request(max_tokens=40, deadline_s=60.0)))
            await until(lambda: any(engine.requests for engine in engines))
            [busy] = [engine for engine in engines if engine.requests]
            await asyncio.sleep(5 * step_s)
            busy.drain(within_ms=within_ms)
            assert tokens_of(await task) == WANTED
            assert [len(engine.requests) for engine in engines if engine is not busy] == [0] * (len(engines) - 1)
            assert busy.aborts == []

    asyncio.run(scenario())


def test_a_kept_offer_that_is_wanted_again_is_not_given_back_meanwhile() -> None:
    """Its time went on while the next decode was on its way to it, so that this one found it released."""
    offers, offer = HeldOffers(), HeldOffer(offer_id="o", ticket=b"", peer_id="p@1")
    offers.hold(offer)
    offers.keep(offer, 0.0)
    offers.need(offer)
    assert not offers.release_kept()
    assert offer.live
    offers.keep(offer, 0.0)
    assert offers.release_kept(overdue_only=True)
    assert not offer.live


def test_engines_cannot_make_series_of_their_own_out_of_where_kv_came_from() -> None:
    metrics = ProxyMetrics(CollectorRegistry())
    run = SimpleNamespace(_metrics=metrics, trace=SimpleNamespace(preempted=[]))
    for source in ("tier", "who-knows-1", "who-knows-2"):
        RunningRequest.note_return(run, source)  # type: ignore[arg-type]
    assert run.trace.preempted == ["tier", "other", "other"]
