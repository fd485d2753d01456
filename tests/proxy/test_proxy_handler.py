"""A request's straight line through real gRPC streams: tokens at once, each once, offers renewed and let go."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from pdmesh.errors import InvalidRequest, Overloaded, PeerUnavailable, TooLarge
from pdmesh.openai.generator import TokenRequest
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.messages import GenerateRequest, SamplingParams
from pdmesh_proxy import handler
from pdmesh_proxy.endpoint import Endpoint
from support.awaiting import until
from support.fake_engine import CACHED_TOKENS, KV_BYTES, Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, fake_mesh, finish_reasons, proxy_over, token_request, tokens_of


def test_first_token_comes_before_decode_is_asked_and_the_trace_tells_who_served() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(logprobs=0)
            stream = mesh.generator.generate(request)
            first = await anext(stream)
            assert tokens_of([first]) == expected_tokens(PROMPT, 1)
            await asyncio.sleep(0.05)
            assert not decode.requests
            deltas = [first, *[delta async for delta in stream]]

            assert tokens_of(deltas) == expected_tokens(PROMPT, 8)
            assert finish_reasons(deltas) == {0: ["length"]}
            assert sum(len(delta.logprobs) for delta in deltas) == 8
            assert {delta.request_id for delta in deltas} == {request.request_id}
            assert not any(delta.ticket for delta in deltas), "a ticket never goes towards clients"
            [asked] = decode.requests
            assert asked.ticket
            assert asked.emitted == [expected_tokens(PROMPT, 1)]
            trace = request.trace
            assert (trace.prefill, trace.decode) == (prefill.engine_id, decode.engine_id)
            assert (trace.reason, trace.kv_source, trace.kv_bytes) == ("disaggregated", "shm", KV_BYTES)
            assert (trace.cached_tokens, trace.fallbacks) == (CACHED_TOKENS, [])
            await until(lambda: prefill.offers.released)
            assert not prefill.offers.open
            assert not prefill.aborts
            assert not decode.aborts
            assert mesh.metric("pdmesh_proxy_requests_total", status="200", reason="disaggregated") == 1
            assert mesh.metric("pdmesh_proxy_requests_in_flight") == 0
            assert mesh.metric("pdmesh_proxy_output_tokens_total") == 8

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("behaviour", "max_tokens", "reason"), [(Behaviour(eos_after=1), 8, "stop"), (None, 1, "length")]
)
def test_a_request_that_its_first_token_ends_never_touches_decode(
    behaviour: Behaviour | None, max_tokens: int, reason: str
) -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill", behaviour=behaviour), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(max_tokens=max_tokens)
            deltas = await mesh.collect(request)
            assert tokens_of(deltas) == expected_tokens(PROMPT, 1)
            assert finish_reasons(deltas) == {0: [reason]}
            assert not decode.requests
            assert request.trace.decode == ""
            assert not prefill.offers.open

    asyncio.run(scenario())


def test_three_choices_share_one_prefill_leg_and_one_decode_leg() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            deltas = await mesh.collect(token_request(n=3))
            for choice in range(3):
                assert tokens_of(deltas, choice) == expected_tokens(PROMPT, 8, choice)
            assert finish_reasons(deltas) == {0: ["length"], 1: ["length"], 2: ["length"]}
            assert (len(prefill.requests), len(decode.requests)) == (1, 1)
            assert decode.requests[0].choices == [0, 1, 2]

    asyncio.run(scenario())


def test_a_choice_stopped_after_its_first_token_is_not_sent_to_decode() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(n=2)
            deltas = []
            async for delta in mesh.generator.generate(request):
                deltas.append(delta)
                if delta.choice == 0 and len(deltas) == 1:
                    await mesh.generator.abort_choice(request.request_id, 0)
            assert tokens_of(deltas, 0) == expected_tokens(PROMPT, 1, 0)
            assert tokens_of(deltas, 1) == expected_tokens(PROMPT, 8, 1)
            assert decode.requests[0].choices == [1]

    asyncio.run(scenario())


def test_stopping_every_choice_ends_the_request_and_frees_the_engine() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", behaviour=Behaviour(step_s=0.01))
        async with fake_mesh(decode) as mesh:
            request = token_request(n=2, max_tokens=500)
            num_seen = 0
            async for _ in mesh.generator.generate(request):
                num_seen += 1
                if num_seen == 5:
                    await mesh.generator.abort_choice(request.request_id, 0)
                    await mesh.generator.abort_choice(request.request_id, 1)
            assert num_seen == 5
            await until(lambda: not decode.running)
            assert mesh.metric("pdmesh_proxy_disconnects_total") == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("num_seen", [0, 1, 4])
def test_a_client_that_leaves_stops_the_engine_and_releases_the_offer(num_seen: int) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(step_s=0.02)
        prefill, decode = FakeEngine("prefill", behaviour=behaviour), FakeEngine("decode", behaviour=behaviour)
        async with fake_mesh(prefill, decode) as mesh:
            stream = mesh.generator.generate(token_request(max_tokens=500))
            for _ in range(num_seen):
                await anext(stream)
            if num_seen == 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            else:
                await stream.aclose()
            await until(lambda: not prefill.running and not decode.running and not prefill.offers.open)
            assert mesh.metric("pdmesh_proxy_requests_in_flight") == 0
            assert mesh.metric("pdmesh_proxy_disconnects_total") == 1
            expected = {0: prefill.aborts, 1: prefill.offers.released, 4: decode.aborts}[num_seen]
            await until(lambda: expected)

    asyncio.run(scenario())


def test_a_ticket_that_comes_after_its_client_left_is_given_back() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        prefill = FakeEngine("prefill", behaviour=Behaviour(hold=hold, heed_aborts=False))
        async with fake_mesh(prefill, FakeEngine("decode")) as mesh:
            waiting = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: prefill.requests)
            waiting.cancel()
            await until(lambda: prefill.aborts)
            hold.set()
            await until(lambda: prefill.offers.released)
            assert not prefill.offers.open

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["client leaves", "deadline"])
def test_an_offer_whose_ticket_nobody_has_read_is_renewed_and_given_back_with_its_request(ends: str) -> None:
    """It lay in the buffer of a client that did not read, unknown to all: a slow client lost its KV with the lease, and one that
    left kept prefill's blocks, and its drain, until then."""

    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            stream = mesh.generator.generate(token_request(n=2, deadline_s=0.5 if ends == "deadline" else 10.0))
            await anext(stream)
            await until(lambda: len(prefill.offers.renewed) >= 2)
            assert not decode.requests
            if ends == "client leaves":
                await stream.aclose()
            await until(lambda: prefill.offers.released)
            assert not prefill.offers.open
            await stream.aclose()

    asyncio.run(scenario())


def test_a_slow_client_that_reads_on_gets_all_from_the_offer_that_waited_for_it() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(n=2)
            stream = mesh.generator.generate(request)
            deltas = [await anext(stream)]
            await until(lambda: len(prefill.offers.renewed) >= 2)
            deltas += [delta async for delta in stream]
            assert [tokens_of(deltas, choice) for choice in (0, 1)] == [
                expected_tokens(PROMPT, 8, choice) for choice in (0, 1)
            ]
            assert request.trace.kv_source == "shm"
            await until(lambda: prefill.offers.released)
            assert len(prefill.offers.released) == 1

    asyncio.run(scenario())


def test_a_ticket_for_a_leg_that_was_given_up_is_given_back_although_the_client_has_not_read_of_it() -> None:
    goes_on = asyncio.Event()

    class TicketLater(FakeEngine):
        """Its second choice's token, and the ticket with it, come when they may, whatever is aborted."""

        async def _steps(self, request: GenerateRequest, frames: asyncio.Queue[pb.StepFrame], facts: Any) -> None:
            tokens: dict[int, list[int]] = {0: [], 1: []}
            deltas = [
                self._delta(request, choice, *self._advance(request, choice, tokens[choice]), {}) for choice in (0, 1)
            ]
            frames.put_nowait(self._frame(request, deltas[0]))
            await goes_on.wait()
            frames.put_nowait(self._frame(request, self._with_ticket(request, deltas[1], tokens)))

    async def scenario() -> None:
        prefill = TicketLater("prefill", behaviour=Behaviour(heed_aborts=False))
        async with fake_mesh(prefill, FakeEngine("decode")) as mesh:
            stream = mesh.generator.generate(token_request(n=2, deadline_s=0.3))
            await anext(stream)
            await until(lambda: prefill.aborts)
            goes_on.set()
            await until(lambda: prefill.offers.released)
            assert not prefill.offers.open
            await stream.aclose()

    asyncio.run(scenario())


def test_an_abort_that_overtook_its_request_is_said_again() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", behaviour=Behaviour(step_s=0.02, heed_aborts=False))
        async with fake_mesh(decode) as mesh:
            stream = mesh.generator.generate(token_request(max_tokens=500))
            await anext(stream)
            await stream.aclose()
            await until(lambda: decode.aborts)
            assert decode.running
            decode.behaviour.heed_aborts = True
            await until(lambda: not decode.running)

    asyncio.run(scenario())


def test_held_offers_are_renewed_while_decode_is_not_done_with_them() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode", behaviour=Behaviour(hold=hold))
        async with fake_mesh(prefill, decode) as mesh:
            collecting = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: len(prefill.offers.renewed) >= 3)
            assert not prefill.offers.released
            hold.set()
            await collecting
            await until(lambda: prefill.offers.released)
            num_renewed = len(prefill.offers.renewed)
            await asyncio.sleep(0.15)
            assert len(prefill.offers.renewed) == num_renewed

    asyncio.run(scenario())


def test_a_short_prompt_goes_to_decode_alone() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request(PROMPT[:5])
            assert tokens_of(await mesh.collect(request)) == expected_tokens(PROMPT[:5], 8)
            assert not prefill.requests
            assert (request.trace.prefill, request.trace.reason) == ("", "short_prompt")

    asyncio.run(scenario())


def test_a_second_turn_whose_beginning_decode_holds_stays_there() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            first = PROMPT * 3
            answer = tokens_of(await mesh.collect(token_request(first, max_tokens=20)))
            second = token_request([*first, *answer, 7, 8, 9])
            await mesh.collect(second)
            assert second.trace.reason == "cached_on_decode"
            unrelated = token_request([5, *first])
            await mesh.collect(unrelated)
            assert unrelated.trace.reason == "disaggregated"

    asyncio.run(scenario())


def test_prompt_logprobs_come_once_from_prefill() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            deltas = await mesh.collect(token_request(prompt_logprobs=0))
            given = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
            assert [len(entries) for entries in given] == [len(PROMPT)]
            assert prefill.requests[0].sampling.prompt_logprobs == 0
            assert decode.requests[0].sampling.prompt_logprobs is None

    asyncio.run(scenario())


def test_client_errors_pass_through_and_are_not_retried() -> None:
    async def scenario() -> None:
        refusing = FakeEngine("prefill", behaviour=Behaviour(refuse=TooLarge("too long", param="prompt")))
        other, decode = FakeEngine("prefill"), FakeEngine("decode")
        async with fake_mesh(refusing, other, decode) as mesh:
            # Of two requests, one goes to each prefill.
            first = asyncio.create_task(mesh.collect(token_request()))
            with pytest.raises(TooLarge, match="too long") as caught:
                await asyncio.gather(first, mesh.collect(token_request()))
            assert (caught.value.status, caught.value.param) == (413, "prompt")
            assert mesh.metric("pdmesh_proxy_requests_total", status="413", reason="disaggregated") == 1
            assert len(refusing.requests) == 1

    asyncio.run(scenario())


def test_clients_cannot_bring_transfer_params() -> None:
    async def scenario() -> None:
        async with fake_mesh(FakeEngine("decode")) as mesh:
            request = TokenRequest(
                request_id="x", token_ids=[1], sampling=SamplingParams(), kv_transfer_params={"do_remote_prefill": True}
            )
            with pytest.raises(InvalidRequest, match="kv_transfer_params"):
                await mesh.collect(request)

    asyncio.run(scenario())


def test_one_slow_reader_overflows_and_aborts_only_itself() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", behaviour=Behaviour(step_s=0.001, tokens_per_step=4))
        async with fake_mesh(decode, extra={"request_buffer_tokens": 64}) as mesh:
            slow = mesh.generator.generate(token_request(max_tokens=2000))
            await anext(slow)
            other = await mesh.collect(token_request(max_tokens=400))
            assert tokens_of(other) == expected_tokens(PROMPT, 400)
            await until(lambda: not decode.running)
            with pytest.raises(Overloaded, match="too slowly"):
                async for _ in slow:
                    pass
            assert mesh.metric("pdmesh_proxy_buffer_overflows_total") == 1
            assert mesh.metric("pdmesh_proxy_retries_total", error="Overloaded") == 0

    asyncio.run(scenario())


def test_many_choices_do_not_overflow_a_buffer_made_for_one() -> None:
    """One step of an engine gives every choice a token at once; with n over the buffer nobody had to be slow."""

    async def scenario() -> None:
        async with fake_mesh(FakeEngine("decode"), extra={"request_buffer_tokens": 16}) as mesh:
            deltas = await mesh.collect(token_request(n=100, max_tokens=4))
            assert sum(len(delta.token_ids) for delta in deltas) == 400
            assert mesh.metric("pdmesh_proxy_buffer_overflows_total") == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sampling", [{"allowed_token_ids": range(1 << 20)}, {"logit_bias": dict.fromkeys(range(1 << 20), 1.0)}]
)
def test_what_is_long_beside_the_prompt_counts_for_the_frame_too(sampling: dict[str, Any]) -> None:
    """A frame over gRPC's limit breaks the session, and with it everybody's requests."""

    async def scenario() -> None:
        async with fake_mesh(FakeEngine("decode")) as mesh, contextlib.AsyncExitStack() as legs:
            _, session = mesh.cluster.session(mesh.cluster.view().engines[0])
            for number in range(3):
                asked = GenerateRequest(
                    request_id=f"r{number}", token_ids=[1] * 600_000, sampling=SamplingParams(**sampling)
                )
                legs.enter_context(session.submit(asked))
            assert [len(session._take_submits()) for _ in range(3)] == [1, 1, 1]

    asyncio.run(scenario())


def test_a_defect_of_the_proxys_own_is_no_client_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was counted as one, so that no alert could see it."""

    def route(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    async def scenario() -> None:
        async with fake_mesh(FakeEngine("decode")) as mesh:
            monkeypatch.setattr(handler, "route", route)
            with pytest.raises(RuntimeError, match="a defect"):
                await mesh.collect(token_request())
            assert mesh.metric("pdmesh_proxy_requests_total", status="500", reason="none") == 1
            assert mesh.metric("pdmesh_proxy_disconnects_total") == 0

    asyncio.run(scenario())


def test_over_the_concurrency_bound_is_a_503_with_retry_after() -> None:
    async def scenario() -> None:
        hold = asyncio.Event()
        async with fake_mesh(
            FakeEngine("decode", behaviour=Behaviour(hold=hold)), extra={"max_concurrent_requests": 1}
        ) as mesh:
            running = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: mesh.metric("pdmesh_proxy_requests_in_flight"))
            with pytest.raises(Overloaded) as caught:
                await mesh.collect(token_request())
            assert caught.value.retry_after_s
            hold.set()
            assert len(tokens_of(await running)) == 8

    asyncio.run(scenario())


def test_the_card_is_the_engines_and_unknown_until_one_answers() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill", max_model_len=2048), FakeEngine("decode", max_model_len=1024)
        async with proxy_over(prefill=["127.0.0.1:1"], decode=[]) as mesh:
            with pytest.raises(PeerUnavailable) as caught:
                await mesh.generator.card()
            assert caught.value.status == 503
            assert not await mesh.generator.healthy()
        async with fake_mesh(prefill, decode) as mesh:
            card = await mesh.generator.card()
            assert (card.name, card.max_model_len, card.vocab_size) == ("fake", 1024, 512)
            assert await mesh.generator.healthy()

    asyncio.run(scenario())


def test_the_first_request_after_a_start_waits_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a proxy's restart each request was refused until the first engine had answered."""
    connect = Endpoint._connect_once

    async def connect_late(endpoint: Endpoint) -> None:
        await may_connect.wait()
        await connect(endpoint)

    may_connect = asyncio.Event()
    monkeypatch.setattr(Endpoint, "_connect_once", connect_late)

    async def scenario() -> None:
        waits = {"engine_wait_timeout_s": 10.0}
        engine = FakeEngine("decode", max_model_len=1024)
        async with engine, proxy_over(prefill=[], decode=[engine.address], extra=waits) as mesh:
            asking = asyncio.create_task(mesh.generator.card())
            await asyncio.sleep(0.05)
            assert not asking.done()
            may_connect.set()
            assert (await asking).max_model_len == 1024

    asyncio.run(scenario())


def test_the_first_engine_to_answer_does_not_choose_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that was started anew served whatever the engine that it met first had, and refused all others."""
    connect = Endpoint._connect_once

    async def connect_late(endpoint: Endpoint) -> None:
        if endpoint.address != odd.address:
            await asyncio.sleep(0.2)
        await connect(endpoint)

    odd = FakeEngine("decode", model_fingerprint="model-2")

    async def scenario() -> None:
        async with FakeEngine("decode") as first, FakeEngine("decode") as second, odd:
            monkeypatch.setattr(Endpoint, "_connect_once", connect_late)
            addresses = [odd.address, first.address, second.address, "127.0.0.1:1"]
            async with proxy_over(prefill=[], decode=addresses, extra={"engine_wait_timeout_s": 10.0}) as mesh:
                await mesh.collect(token_request())
                await until(lambda: mesh.metric("pdmesh_proxy_engines", role="decode") == 2)
                assert mesh.metric("pdmesh_proxy_engines_refused") == 1
                assert not odd.requests

    asyncio.run(scenario())


def test_an_engine_with_another_model_is_not_used() -> None:
    async def scenario() -> None:
        first, second = FakeEngine("decode"), FakeEngine("decode")
        async with fake_mesh(first, second) as mesh, FakeEngine("decode", model_fingerprint="model-2") as stranger:
            async with proxy_over(prefill=[], decode=[first.address, second.address, stranger.address]) as other:
                await until(lambda: other.metric("pdmesh_proxy_engines_refused"))
                for _ in range(6):
                    await other.collect(token_request())
                assert not stranger.requests or not (first.requests or second.requests)
                assert other.metric("pdmesh_proxy_engines", role="decode") in (1, 2)
            assert mesh.metric("pdmesh_proxy_engines_refused") == 0

    asyncio.run(scenario())
