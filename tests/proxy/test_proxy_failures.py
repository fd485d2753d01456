"""Engines die, stall, drain and come back: clients see time pass, never a seam; without an engine, an error in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pdmesh import breaker
from pdmesh.errors import (
    DamagedKV,
    DeadlineExceeded,
    Draining,
    EngineFault,
    HandshakeRefused,
    MeshError,
    Overloaded,
    PeerUnavailable,
    TransferFailed,
)
from pdmesh_proxy.endpoint import NUM_FAILURES_TO_REST
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, fake_mesh, finish_reasons, proxy_over, token_request, tokens_of

WANTED = expected_tokens(PROMPT, 40)


@pytest.mark.parametrize("die_after", [0, 2, 20])
@pytest.mark.parametrize("n", [1, 3])
def test_decode_dies_and_another_goes_on_without_a_seam(die_after: int, n: int) -> None:
    async def scenario() -> None:
        prefill = FakeEngine("prefill")
        dying = FakeEngine("decode", behaviour=Behaviour(step_s=0.002, die_after=die_after))
        async with fake_mesh(prefill, dying) as mesh_of_dying, FakeEngine("decode") as living:
            del mesh_of_dying
            async with proxy_over(prefill=[prefill.address], decode=[dying.address, living.address]) as mesh:
                await until(lambda: len(mesh.cluster.view().engines) == 3)
                # Make the dying one the one that rested longest.
                living_view = mesh.cluster.view().by_peer(living.peer_id)
                assert living_view is not None
                mesh.cluster.session(living_view)
                request = token_request(max_tokens=40, n=n)
                deltas = await mesh.collect(request)
                for choice in range(n):
                    assert tokens_of(deltas, choice) == expected_tokens(PROMPT, 40, choice)
                assert finish_reasons(deltas) == {choice: ["length"] for choice in range(n)}
                assert dying.requests
                assert living.requests
                assert request.trace.decode == living.engine_id
                assert request.trace.fallbacks[0] == "decode:PeerUnavailable"
                assert mesh.metric("pdmesh_proxy_retries_total", error="PeerUnavailable") == 1
                # The offer is kept for a while after decode has fetched it.
                assert living.requests[0].ticket
                await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


def test_prefill_dies_before_the_first_token_and_another_prefill_takes_over() -> None:
    async def scenario() -> None:
        dying = FakeEngine("prefill", behaviour=Behaviour(die_after=0))
        other, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(dying, other, decode) as mesh:
            requests = [token_request(max_tokens=40) for _ in range(2)]
            for request in requests:
                assert tokens_of(await mesh.collect(request)) == WANTED
            assert dying.requests
            assert all(request.trace.prefill == other.engine_id for request in requests)
            assert all(request.trace.reason == "disaggregated" for request in requests)

    asyncio.run(scenario())


def test_the_only_prefill_dies_and_decode_serves_alone_counted_as_degraded() -> None:
    async def scenario() -> None:
        dying = FakeEngine("prefill", behaviour=Behaviour(die_after=0))
        decode = FakeEngine("decode")
        async with fake_mesh(dying, decode) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert request.trace.reason == "no_prefill"
            assert request.trace.fallbacks == ["prefill:PeerUnavailable", "no_prefill"]
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="no_prefill") == 1

    asyncio.run(scenario())


def test_prefill_dies_with_the_offer_and_decode_computes_it_anew() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(max_tokens=40)
            stream = mesh.generator.generate(request)
            deltas = [await anext(stream)]
            await prefill.kill()
            await until(lambda: len(mesh.cluster.view().engines) == 1)
            deltas += [delta async for delta in stream]
            assert tokens_of(deltas) == WANTED
            assert not decode.requests[0].ticket
            assert request.trace.fallbacks == ["no_ticket"]

    asyncio.run(scenario())


def test_no_decode_alive_so_prefill_serves_whole() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            await decode.kill()
            await until(lambda: len(mesh.cluster.view().engines) == 1)
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert (request.trace.decode, request.trace.reason) == (prefill.engine_id, "no_decode")
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="no_decode") == 1

    asyncio.run(scenario())


def test_decode_dies_after_prefill_and_prefill_goes_on_itself() -> None:
    async def scenario() -> None:
        prefill = FakeEngine("prefill")
        async with fake_mesh(prefill, FakeEngine("decode", behaviour=Behaviour(die_after=10))) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert request.trace.decode == prefill.engine_id

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "error", [TransferFailed("stale"), TransferFailed("the owner cannot be reached"), HandshakeRefused("no memory")]
)
def test_a_failed_fetch_is_computed_on_that_decode_and_counted(error: MeshError) -> None:
    """The decode is well: it is not excluded for a KV owner that is not, even with no other decode to go to."""

    async def scenario() -> None:
        prefill = FakeEngine("prefill")
        decode = FakeEngine("decode", behaviour=Behaviour(refuse_fetch=error))
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert request.trace.fallbacks == [f"decode:{error.code}", "leg_failed"]
            assert request.trace.decode == decode.engine_id
            assert [bool(leg.ticket) for leg in decode.requests] == [True, False]
            assert len(prefill.requests) == 1
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="leg_failed") == 1
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="decode_excluded") == 0
            await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_tokens_of_a_prefill_whose_kv_is_corrupt_are_drawn_again_before_anybody_goes_on(n: int, is_wrong: bool) -> None:
    """Under the policy `fail` the next engine went on behind them, wrong or not."""

    async def scenario() -> None:
        prefill = FakeEngine("prefill", behaviour=Behaviour(wrong_prefill=is_wrong))
        error = TransferFailed("the KV of this request could not be fetched: corrupt")
        decode = FakeEngine("decode", behaviour=Behaviour(refuse_fetch=error, tokens_per_step=3))
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(max_tokens=40, n=n, logprobs=0)
            if is_wrong:
                with pytest.raises(DamagedKV, match="drawn anew"):
                    await mesh.collect(request)
            else:
                deltas = await mesh.collect(request)
                for choice in range(n):
                    assert tokens_of(deltas, choice) == expected_tokens(PROMPT, 40, choice)
                assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
            assert [leg.emitted for leg in decode.requests][1:] == [[]]
            await until(lambda: not prefill.offers.open and not decode.running)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_prefill_drew_is_drawn_again_where_decode_died_before_it_had_its_kv_and_nobody_fetches_that(
    is_wrong: bool,
) -> None:
    """Decode may have found it damaged, and died while it computed anew: another went on behind a wrong token."""

    async def scenario() -> None:
        prefill = FakeEngine("prefill", behaviour=Behaviour(wrong_prefill=is_wrong))
        hold, died = asyncio.Event(), PeerUnavailable("the engine core died, and came back")
        decodes = [FakeEngine("decode", behaviour=Behaviour(hold=hold, fail_after_hold=died)) for _ in range(2)]
        async with fake_mesh(prefill, *decodes) as mesh:
            collected = asyncio.create_task(mesh.collect(token_request(max_tokens=40)))
            await until(lambda: any(engine.requests for engine in decodes))
            [other] = [engine for engine in decodes if not engine.requests]
            other.behaviour = Behaviour()
            await prefill.kill()
            await until(lambda: len(mesh.cluster.view().engines) == 2)
            hold.set()
            if is_wrong:
                with pytest.raises(DamagedKV, match="drawn anew"):
                    await collected
            else:
                assert tokens_of(await collected) == WANTED
            assert [leg.emitted for leg in other.requests] == [[]]

    asyncio.run(scenario())


def test_a_decode_that_is_itself_unavailable_is_left_and_the_offer_goes_to_another() -> None:
    async def scenario() -> None:
        prefill, other = FakeEngine("prefill"), FakeEngine("decode")
        broken = FakeEngine("decode", behaviour=Behaviour(refuse=PeerUnavailable("the engine core died")))
        async with fake_mesh(prefill, broken, other) as mesh:
            requests = [token_request(max_tokens=40) for _ in range(2)]
            for request in requests:
                assert tokens_of(await mesh.collect(request)) == WANTED
                assert request.trace.decode == other.engine_id
            assert requests[0].trace.fallbacks or requests[1].trace.fallbacks
            assert all(leg.ticket for leg in (*broken.requests, *other.requests)), "the offer outlives the failed leg"
            await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


def test_the_only_decode_is_unavailable_so_prefill_goes_on_and_the_mesh_is_not_said_to_lack_decodes() -> None:
    async def scenario() -> None:
        prefill = FakeEngine("prefill")
        broken = FakeEngine("decode", behaviour=Behaviour(refuse=PeerUnavailable("the engine core died")))
        async with fake_mesh(prefill, broken) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert len(broken.requests) == 1
            assert request.trace.fallbacks == ["decode:PeerUnavailable", "decode_excluded"]
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="no_decode") == 0

    asyncio.run(scenario())


def test_an_engine_that_fails_again_and_again_rests_until_a_probe_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request tried it, as long as it was the one that had rested longest."""
    monkeypatch.setattr(breaker, "FIRST_BACKOFF_S", 60.0)
    monkeypatch.setattr(breaker, "LAST_BACKOFF_S", 60.0)
    prompt = PROMPT[:40]  # Short: nobody is preferred for having it.
    wanted = expected_tokens(prompt, 8)

    async def scenario() -> None:
        broken = FakeEngine("decode", behaviour=Behaviour(refuse=PeerUnavailable("the engine core died")))
        async with fake_mesh(broken, FakeEngine("decode")) as mesh:
            for _ in range(8):
                assert tokens_of(await mesh.collect(token_request(prompt))) == wanted
            assert len(broken.requests) == NUM_FAILURES_TO_REST
            endpoint = mesh.cluster._endpoints[broken.address]
            assert endpoint.resting
            assert mesh.metric("pdmesh_proxy_engines_resting") == mesh.metric("pdmesh_proxy_engine_rests_total") == 1
            endpoint._breaker._not_before_s = 0.0
            assert tokens_of(await mesh.collect(token_request(prompt))) == wanted
            assert len(broken.requests) == NUM_FAILURES_TO_REST + 1
            assert endpoint.resting, "the probe failed"
            endpoint._breaker._not_before_s = 0.0
            broken.behaviour.refuse = None
            broken.behaviour.hold = asyncio.Event()
            probe = asyncio.create_task(mesh.collect(token_request(prompt)))
            await until(lambda: len(broken.requests) == NUM_FAILURES_TO_REST + 2)
            assert endpoint.resting, "one probe is enough"
            broken.behaviour.hold.set()
            assert tokens_of(await probe) == wanted
            assert not endpoint.resting
            assert mesh.metric("pdmesh_proxy_engines_resting") == 0
            assert mesh.metric("pdmesh_proxy_engine_rests_total") == 1

    asyncio.run(scenario())


def test_an_engine_that_rests_serves_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_BACKOFF_S", 60.0)
    monkeypatch.setattr(breaker, "LAST_BACKOFF_S", 60.0)

    async def scenario() -> None:
        broken = FakeEngine("decode", behaviour=Behaviour(refuse=PeerUnavailable("the engine core died")))
        async with fake_mesh(broken, extra={"engine_wait_timeout_s": 0.0}) as mesh:
            for _ in range(5):
                with pytest.raises(PeerUnavailable, match="core died"):
                    await mesh.collect(token_request())
            assert len(broken.requests) == 5
            broken.behaviour.refuse = None
            assert tokens_of(await mesh.collect(token_request(max_tokens=40))) == WANTED
            assert not mesh.cluster._endpoints[broken.address].resting

    asyncio.run(scenario())


def test_requests_that_one_death_fails_together_are_one_failure() -> None:
    async def scenario() -> None:
        dying = FakeEngine("decode", behaviour=Behaviour(hold=asyncio.Event()))
        async with fake_mesh(dying, FakeEngine("decode")) as mesh:
            requests = [token_request(deadline_s=60.0) for _ in range(10)]
            collecting = [asyncio.create_task(mesh.collect(request)) for request in requests]
            await until(lambda: len(dying.requests) >= NUM_FAILURES_TO_REST, timeout_s=30.0)
            await dying.kill()
            for deltas in await asyncio.gather(*collecting):
                assert tokens_of(deltas) == WANTED[:8]
            assert sum(bool(request.trace.fallbacks) for request in requests) >= NUM_FAILURES_TO_REST
            assert not mesh.cluster._endpoints[dying.address].resting

    asyncio.run(scenario())


def test_requests_that_fail_side_by_side_while_the_engine_answers_are_one_failure() -> None:
    """A core's death ends all requests, over a session that stands: it counted as many failures, so that one was a rest."""

    async def scenario() -> None:
        hold = asyncio.Event()
        dying = FakeEngine("decode", behaviour=Behaviour(hold=hold, fail_after_hold=PeerUnavailable("the core died")))
        async with fake_mesh(dying, FakeEngine("decode")) as mesh:
            requests = [token_request(deadline_s=60.0) for _ in range(10)]
            collecting = [asyncio.create_task(mesh.collect(request)) for request in requests]
            await until(lambda: len(dying.requests) >= NUM_FAILURES_TO_REST, timeout_s=30.0)
            hold.set()
            for deltas in await asyncio.gather(*collecting):
                assert tokens_of(deltas) == WANTED[:8]
            assert sum(bool(request.trace.fallbacks) for request in requests) >= NUM_FAILURES_TO_REST
            assert not mesh.cluster._endpoints[dying.address].resting

    asyncio.run(scenario())


def test_an_engine_whose_requests_run_out_of_time_without_a_token_from_it_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen core answers pings through its server, and its requests' ends are no word of its own."""
    monkeypatch.setattr(breaker, "FIRST_BACKOFF_S", 60.0)

    async def scenario() -> None:
        frozen = FakeEngine("decode", behaviour=Behaviour(hold=asyncio.Event()))
        async with fake_mesh(frozen, extra={"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 0.2}) as mesh:
            endpoint = mesh.cluster._endpoints[frozen.address]
            for _ in range(NUM_FAILURES_TO_REST + 1):
                # Too little time to say anything of the engine.
                with pytest.raises(DeadlineExceeded):
                    await mesh.collect(token_request(deadline_s=0.05))
            assert not endpoint.resting
            for _ in range(NUM_FAILURES_TO_REST):
                with pytest.raises(DeadlineExceeded):
                    await mesh.collect(token_request(deadline_s=0.3))
            assert endpoint.resting

    asyncio.run(scenario())


def test_a_full_prefill_is_not_counted_as_a_mesh_without_prefill() -> None:
    async def scenario() -> None:
        full, decode = FakeEngine("prefill", behaviour=Behaviour(refuse=Overloaded("full"))), FakeEngine("decode")
        async with fake_mesh(full, decode) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert request.trace.reason == "prefill_excluded"
            assert request.trace.fallbacks == ["prefill:Overloaded", "prefill_excluded"]
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="prefill_excluded") == 1
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="no_prefill") == 0

    asyncio.run(scenario())


def test_what_is_remembered_of_refused_engines_goes_with_their_addresses(tmp_path: Any) -> None:
    async def scenario() -> None:
        listing = tmp_path / "decode"
        async with FakeEngine("decode") as engine:
            listing.write_text(f"{engine.address}\n")
            async with proxy_over(prefill=[], decode=[f"file:{listing}"]) as mesh:
                await until(lambda: mesh.cluster.serving)
                for _ in range(3):
                    async with FakeEngine("decode", model_fingerprint="model-2") as stranger:
                        listing.write_text(f"{engine.address}\n{stranger.address}\n")
                        await until(lambda: mesh.metric("pdmesh_proxy_engines_refused"))
                        assert len(mesh.cluster._model._refused) == 1
                    listing.write_text(f"{engine.address}\n")
                    await until(lambda: len(mesh.cluster._endpoints) == 1)
                assert not mesh.cluster._model._refused

    asyncio.run(scenario())


def test_without_retries_the_failure_reaches_the_client() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", behaviour=Behaviour(refuse_fetch=TransferFailed("stale")))
        async with fake_mesh(FakeEngine("prefill"), decode, extra={"max_retries": 0}) as mesh:
            with pytest.raises(TransferFailed, match="stale"):
                await mesh.collect(token_request())

    asyncio.run(scenario())


def test_a_recompute_on_decode_shows_in_trace_and_metric() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", behaviour=Behaviour(recompute_fetch=True))
        async with fake_mesh(FakeEngine("prefill"), decode) as mesh:
            request = token_request()
            await mesh.collect(request)
            assert request.trace.kv_source == "recompute:peer_lost"
            assert request.trace.fallbacks == ["recompute:peer_lost"]
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="recompute") == 1

    asyncio.run(scenario())


def test_all_dead_is_an_explicit_error_in_time() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode", behaviour=Behaviour(step_s=0.01))
        async with fake_mesh(prefill, decode) as mesh:
            stream = mesh.generator.generate(token_request(max_tokens=400))
            deltas = [await anext(stream) for _ in range(5)]
            started = time.monotonic()
            await prefill.kill()
            await decode.kill()

            async def drain() -> None:
                async for delta in stream:
                    deltas.append(delta)

            with pytest.raises(PeerUnavailable):
                await drain()
            assert time.monotonic() - started < 1.5
            assert tokens_of(deltas) == expected_tokens(PROMPT, len(tokens_of(deltas)))
            with pytest.raises(PeerUnavailable) as caught:
                await mesh.collect(token_request())
            assert caught.value.retry_after_s
            assert not await mesh.generator.healthy()

    asyncio.run(scenario())


def test_a_client_that_leaves_while_its_request_waits_for_an_engine_is_forgotten() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode")
        async with fake_mesh(decode, extra={"engine_wait_timeout_s": 30.0}) as mesh:
            await decode.kill()
            await until(lambda: not mesh.cluster.view().engines)
            waiting = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: mesh.metric("pdmesh_proxy_requests_in_flight"))
            waiting.cancel()
            await asyncio.wait({waiting})
            assert mesh.metric("pdmesh_proxy_requests_in_flight") == 0
            assert mesh.metric("pdmesh_proxy_disconnects_total") == 1
            # Its deadline holds there as everywhere.
            with pytest.raises(DeadlineExceeded):
                await mesh.collect(token_request(deadline_s=0.1))

    asyncio.run(scenario())


def test_the_only_engine_comes_back_and_the_request_goes_on_there() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", behaviour=Behaviour(step_s=0.01))
        async with fake_mesh(decode, extra={"engine_wait_timeout_s": 5.0}) as mesh:
            stream = mesh.generator.generate(token_request(max_tokens=40))
            deltas = [await anext(stream) for _ in range(5)]
            await decode.kill()
            async with FakeEngine("decode", port=decode.port) as again:
                deltas += [delta async for delta in stream]
                assert tokens_of(deltas) == WANTED
                assert again.requests

    asyncio.run(scenario())


def test_a_silent_engine_is_taken_for_dead() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        silent = FakeEngine("decode", behaviour=Behaviour(hold=hold))
        async with fake_mesh(silent) as mesh, FakeEngine("decode") as other:
            addresses = [silent.address, other.address]
            async with proxy_over(prefill=[], decode=addresses, extra={"heartbeat_timeout_s": 0.5}) as both:
                await until(lambda: len(both.cluster.view().engines) == 2)
                running = [asyncio.create_task(both.collect(token_request(max_tokens=40))) for _ in range(2)]
                await until(lambda: silent.requests)
                silent.behaviour.answer_pings = False
                for deltas in await asyncio.gather(*running):
                    assert tokens_of(deltas) == WANTED
                assert both.metric("pdmesh_proxy_stream_breaks_total") >= 1
                # It answers again and is used again: no failure sticks.
                silent.behaviour.answer_pings = True
                hold.set()
                await until(lambda: len(both.cluster.view().engines) == 2)
            del mesh

    asyncio.run(scenario())


def test_a_draining_engine_gets_nothing_new_and_ends_what_it_has() -> None:
    async def scenario() -> None:
        first, second = (FakeEngine("decode", behaviour=Behaviour(step_s=0.01)) for _ in range(2))
        async with fake_mesh(first, second) as mesh:
            running = [asyncio.create_task(mesh.collect(token_request(max_tokens=40))) for _ in range(2)]
            await until(lambda: first.requests and second.requests)
            first.drain()
            await until(lambda: any(engine.draining for engine in mesh.cluster.view().engines))
            for _ in range(3):
                await mesh.collect(token_request(max_tokens=4))
            for deltas in await asyncio.gather(*running):
                assert tokens_of(deltas) == WANTED
            assert len(first.requests) == 1
            second.drain()
            await until(lambda: not mesh.cluster.serving)
            assert not await mesh.generator.healthy()

    asyncio.run(scenario())


def test_an_engine_that_refuses_because_it_drains_is_left_for_another() -> None:
    async def scenario() -> None:
        leaving = FakeEngine("decode", behaviour=Behaviour(refuse=Draining("shutting down")))
        async with fake_mesh(leaving, FakeEngine("decode")) as mesh:
            for _ in range(3):
                assert tokens_of(await mesh.collect(token_request(max_tokens=40))) == WANTED

    asyncio.run(scenario())


def test_a_full_engine_is_left_for_another_and_a_full_mesh_is_said_at_once() -> None:
    async def scenario() -> None:
        full = [FakeEngine("decode", behaviour=Behaviour(refuse=Overloaded("queue full"))) for _ in range(2)]
        async with fake_mesh(*full, extra={"engine_wait_timeout_s": 5.0}) as mesh:
            started = time.monotonic()
            with pytest.raises(Overloaded, match="queue full") as caught:
                await mesh.collect(token_request())
            assert caught.value.retry_after_s
            assert time.monotonic() - started < 1
            full[1].behaviour.refuse = None
            assert tokens_of(await mesh.collect(token_request(max_tokens=40))) == WANTED

    asyncio.run(scenario())


def test_what_an_engine_fails_at_another_computes_and_where_none_can_it_is_said_at_once() -> None:
    """It was a 500: one engine's bad memory cost its requests their answer though others lived."""

    async def scenario() -> None:
        fault = Behaviour(refuse=EngineFault("logits that are not numbers"))
        bad, good = FakeEngine("prefill", behaviour=fault), FakeEngine("prefill")
        decode = FakeEngine("decode", behaviour=Behaviour())
        async with fake_mesh(bad, good, decode, extra={"engine_wait_timeout_s": 5.0}) as mesh:
            for _ in range(2):
                assert tokens_of(await mesh.collect(token_request(max_tokens=40))) == WANTED
            assert bad.requests
            decode.behaviour.refuse = good.behaviour.refuse = fault.refuse
            started = time.monotonic()
            with pytest.raises(EngineFault, match="not numbers") as caught:
                await mesh.collect(token_request())
            assert caught.value.status == 502
            assert time.monotonic() - started < 4

    asyncio.run(scenario())


def test_a_request_that_engines_fail_at_goes_round_no_more_than_its_retries() -> None:
    async def scenario() -> None:
        engines = [FakeEngine("decode", behaviour=Behaviour(refuse=EngineFault("on fire"))) for _ in range(5)]
        async with fake_mesh(*engines, extra={"max_retries": 2}) as mesh:
            with pytest.raises(EngineFault, match="on fire"):
                await mesh.collect(token_request())
            assert sum(len(engine.requests) for engine in engines) == 3

    asyncio.run(scenario())


def test_nobody_goes_on_behind_tokens_that_may_be_wrong() -> None:
    async def scenario() -> None:
        damaged = Behaviour(refuse_fetch=DamagedKV("the first token is not what this engine draws"))
        engines = [FakeEngine("decode", behaviour=damaged) for _ in range(2)]
        async with fake_mesh(FakeEngine("prefill"), *engines) as mesh:
            with pytest.raises(DamagedKV):
                await mesh.collect(token_request())
            assert sum(len(engine.requests) for engine in engines) == 1

    asyncio.run(scenario())


def test_a_stream_that_moves_on_outlives_more_failures_than_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries were counted over its whole life, and an engine that had failed it once was never asked again: the fourth failure
    of a long stream ended it, though both engines lived."""
    monkeypatch.setattr("pdmesh_proxy.running.FORGIVEN_TOKENS", 4)

    async def scenario() -> None:
        engines = [FakeEngine("decode", behaviour=Behaviour(fail_after=4)) for _ in range(2)]
        async with fake_mesh(*engines, extra={"max_retries": 2}) as mesh:
            request = token_request(max_tokens=40)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert mesh.metric("pdmesh_proxy_retries_total", error="PeerUnavailable") == 9

    asyncio.run(scenario())


def test_a_stream_that_ends_each_engine_it_comes_to_has_no_more_than_its_retries() -> None:
    """With a token at each, which a resume always yields, it went on from engine to engine until its deadline."""

    async def scenario() -> None:
        engines = [FakeEngine("decode", behaviour=Behaviour(fail_after=4)) for _ in range(5)]
        async with fake_mesh(*engines, extra={"max_retries": 2}) as mesh:
            tokens: list[int] = []

            async def read() -> None:
                async for delta in mesh.generator.generate(token_request(max_tokens=40)):
                    tokens.extend(delta.token_ids)

            with pytest.raises(PeerUnavailable):
                await read()
            assert tokens == WANTED[:12]
            assert sum(len(engine.requests) for engine in engines) == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("behaviour", [{"hold": True}, {"step_s": 0.05}])
def test_the_deadline_ends_a_request_wherever_it_is(behaviour: dict[str, Any]) -> None:
    async def scenario() -> None:
        settings = {name: asyncio.Event() if name == "hold" else value for name, value in behaviour.items()}
        decode = FakeEngine("decode", behaviour=Behaviour(**settings))
        async with fake_mesh(decode) as mesh:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded) as caught:
                await mesh.collect(token_request(max_tokens=500, deadline_s=0.2))
            assert 0.15 < time.monotonic() - started < 1
            assert caught.value.status == 504
            await until(lambda: not decode.running)

    asyncio.run(scenario())


def test_shutdown_lets_requests_end_and_tells_the_rest() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        decode = FakeEngine("decode", behaviour=Behaviour(step_s=0.005))
        async with fake_mesh(decode) as mesh:
            short = asyncio.create_task(mesh.collect(token_request(max_tokens=20)))
            await until(lambda: decode.requests)
            decode.behaviour = Behaviour(hold=hold)
            endless = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: len(decode.requests) == 2)
            draining = asyncio.create_task(mesh.generator.drain(0.5))
            await asyncio.sleep(0)
            assert not await mesh.generator.healthy()
            with pytest.raises(Draining):
                await mesh.collect(token_request())
            assert len(tokens_of(await short)) == 20
            with pytest.raises(Draining, match="shut down"):
                await endless
            await asyncio.wait_for(draining, 1)
            await until(lambda: not decode.running)

    asyncio.run(scenario())


def test_replicas_join_get_traffic_and_leave_without_losing_a_request(tmp_path: Any) -> None:
    async def scenario() -> None:
        listing = tmp_path / "decode"
        async with FakeEngine("decode", behaviour=Behaviour(step_s=0.005)) as first, FakeEngine("decode") as second:
            listing.write_text(f"{first.address}\n")
            async with proxy_over(prefill=[], decode=[f"file:{listing}"]) as mesh:
                await until(lambda: mesh.cluster.serving)
                running = asyncio.create_task(mesh.collect(token_request(max_tokens=40)))
                await until(lambda: first.requests)
                listing.write_text(f"{second.address}\n")
                await until(
                    lambda: [e.address for e in mesh.cluster.view().engines if not e.draining] == [second.address]
                )
                await mesh.collect(token_request())
                assert second.requests
                assert tokens_of(await running) == WANTED
                assert len(first.requests) == 1
                await until(lambda: len(mesh.cluster.view().engines) == 1)
                assert mesh.metric("pdmesh_proxy_stream_breaks_total") == 0

    asyncio.run(scenario())


def test_a_mesh_at_rest_finds_new_replicas_with_the_next_request_and_replaces_dead_ones_at_once(tmp_path: Any) -> None:
    async def scenario() -> None:
        listing = tmp_path / "decode"
        at_rest = {"resolve_rest_interval_s": 3600, "engine_wait_timeout_s": 5.0}
        async with FakeEngine("decode") as first, FakeEngine("decode") as second, FakeEngine("decode") as third:
            listing.write_text(f"{first.address}\n")
            async with proxy_over(prefill=[], decode=[f"file:{listing}"], extra=at_rest) as mesh:
                await until(lambda: mesh.cluster.serving)
                # The looks that follow a change are over.
                await asyncio.sleep(0.3)
                listing.write_text(f"{first.address}\n{second.address}\n")
                assert tokens_of(await mesh.collect(token_request())) == WANTED[:8]
                await until(lambda: len(mesh.cluster.view().engines) == 2)
                await asyncio.sleep(0.3)
                listing.write_text(f"{third.address}\n")
                await first.kill()
                await until(lambda: [e.address for e in mesh.cluster.view().engines] == [third.address])

    asyncio.run(scenario())


def test_an_idle_proxy_only_pings() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode")
        async with fake_mesh(decode, extra={"heartbeat_interval_s": 0.1}):
            before = decode.num_pings
            # At rest the interval is five times the configured one.
            await asyncio.sleep(1.6)
            assert 2 <= decode.num_pings - before <= 4

    asyncio.run(scenario())
