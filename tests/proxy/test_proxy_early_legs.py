"""Decode is told together with prefill, goes on by prefill's own word, and is asked anew whenever anything stands in the way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from pdmesh.errors import DamagedKV, PeerUnavailable, TransferFailed
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, FakeMesh, fake_mesh, token_request, tokens_of


def awaiting(role: str, **options: Any) -> FakeEngine:
    return FakeEngine(role, awaits=True, **options)


def ends(mesh: FakeMesh) -> dict[str, float]:
    outcomes = ("used", "unneeded", "failed")
    found = {each: mesh.metric("pdmesh_proxy_early_legs_total", outcome=each) for each in outcomes}
    return {outcome: count for outcome, count in found.items() if count}


def test_decode_waits_while_prefill_computes_and_is_asked_once() -> None:
    async def scenario() -> None:
        prefill = awaiting("prefill", behaviour=Behaviour(hold=(hold := asyncio.Event())))
        decodes = [awaiting("decode"), awaiting("decode")]
        async with fake_mesh(prefill, *decodes) as mesh:
            serving = asyncio.create_task(mesh.collect(request := token_request()))
            await until(lambda: prefill.requests and any(each.requests for each in decodes))
            [told] = [each for each in decodes if each.requests]
            awaits = told.requests[0].awaits
            assert awaits is not None
            assert awaits.offer_id == prefill.requests[0].offer_id
            assert (awaits.owner_id, awaits.owner_address) == (prefill.peer_id, prefill.address)
            assert (told.requests[0].ticket, told.requests[0].emitted) == (b"", [])
            [view] = [each for each in mesh.cluster.view().engines if each.engine_id == told.engine_id]
            # It computes nothing of the prompt, and has a sequence more.
            assert (view.waiting_tokens, view.num_sequences) == (0, 1)
            hold.set()
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [len(each.requests) for each in decodes if each is told] == [1]
            assert (request.trace.decode, request.trace.kv_source) == (told.engine_id, "shm")
            assert (ends(mesh), mesh.metric("pdmesh_proxy_legs_total", kind="decode")) == ({"used": 1}, 1)
            await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prefill", "decode", "extra", "sampling"),
    [
        (awaiting, FakeEngine, {}, {}),
        (FakeEngine, awaiting, {}, {}),
        (awaiting, awaiting, {"early_decode": False}, {}),
        (awaiting, awaiting, {}, {"n": 2}),
    ],
)
def test_decode_is_asked_with_the_ticket_where_it_cannot_wait(
    prefill: Any, decode: Any, extra: dict[str, Any], sampling: dict[str, Any]
) -> None:
    async def scenario() -> None:
        engines = prefill("prefill"), decode("decode")
        async with fake_mesh(*engines, extra=extra) as mesh:
            assert tokens_of(await mesh.collect(token_request(**sampling))) == expected_tokens(PROMPT, 8)
            [asked] = engines[1].requests
            assert asked.ticket
            assert asked.awaits is None
            assert ends(mesh) == {}

    asyncio.run(scenario())


def test_a_request_that_its_first_token_ends_is_taken_back() -> None:
    async def scenario() -> None:
        prefill, decode = awaiting("prefill", behaviour=Behaviour(eos_after=1)), awaiting("decode")
        async with fake_mesh(prefill, decode) as mesh:
            request = token_request()
            assert tokens_of(await mesh.collect(request)) == expected_tokens(PROMPT, 1)
            await until(lambda: [each for each, _ in decode.aborts] == [decode.requests[0].request_id])
            assert (request.trace.decode, ends(mesh)) == ("", {"unneeded": 1})

    asyncio.run(scenario())


def test_a_client_that_leaves_takes_both_legs_back() -> None:
    async def scenario() -> None:
        prefill, decode = awaiting("prefill", behaviour=Behaviour(hold=asyncio.Event())), awaiting("decode")
        async with fake_mesh(prefill, decode) as mesh:
            serving = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: prefill.requests and decode.requests)
            serving.cancel()
            await until(lambda: prefill.aborts and decode.aborts)
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            assert ends(mesh) == {"unneeded": 1}

    asyncio.run(scenario())


def test_a_decode_that_cannot_wait_gets_the_ticket_and_nothing_counts_as_a_failure() -> None:
    async def scenario() -> None:
        decode = awaiting("decode", behaviour=Behaviour(refuse_fetch=TransferFailed("unknown: no such offer")))
        prefill = awaiting("prefill", behaviour=Behaviour(hold=(hold := asyncio.Event())))
        async with fake_mesh(prefill, decode, extra={"max_retries": 0}) as mesh:
            serving = asyncio.create_task(mesh.collect(request := token_request()))
            await until(lambda: decode.requests)
            await asyncio.sleep(0.02)
            decode.behaviour.refuse_fetch = None
            hold.set()
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [bool(each.ticket) for each in decode.requests] == [False, True]
            assert (ends(mesh), request.trace.fallbacks) == ({"failed": 1}, [])

    asyncio.run(scenario())


def test_a_leg_that_is_used_and_then_cannot_fetch_is_asked_anew_with_the_ticket() -> None:
    """The proxy may go on with it before decode has said that it waits in vain."""

    async def scenario() -> None:
        hold, gone = asyncio.Event(), TransferFailed("expired: offer o")
        decode = awaiting("decode", behaviour=Behaviour(hold=hold, fail_after_hold=gone))
        async with fake_mesh(awaiting("prefill"), decode, extra={"max_retries": 0}) as mesh:
            serving = asyncio.create_task(mesh.collect(request := token_request()))
            await until(lambda: ends(mesh) == {"used": 1})
            hold.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            decode.behaviour.fail_after_hold = None
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [bool(each.ticket) for each in decode.requests] == [False, True]
            assert (ends(mesh), request.trace.fallbacks) == ({"used": 1, "failed": 1}, [])

    asyncio.run(scenario())


def test_why_a_used_leg_could_not_fetch_is_told_where_there_is_no_ticket_any_more() -> None:
    async def scenario() -> None:
        hold, gone = asyncio.Event(), TransferFailed("expired: offer o")
        prefill, decode = awaiting("prefill"), awaiting("decode", behaviour=Behaviour(hold=hold, fail_after_hold=gone))
        async with fake_mesh(prefill, decode) as mesh:
            serving = asyncio.create_task(mesh.collect(request := token_request()))
            await until(lambda: ends(mesh) == {"used": 1})
            prefill.offers.open.clear()
            num_pings = prefill.num_pings
            await until(lambda: prefill.num_pings > num_pings + 2)
            hold.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            decode.behaviour.fail_after_hold = None
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [bool(each.ticket or each.awaits) for each in decode.requests] == [True, False]
            assert request.trace.fallbacks == ["decode:expired", "no_ticket"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_used_leg_that_finds_the_kv_damaged_has_its_token_drawn_again(is_wrong: bool) -> None:
    """It passed for one that had waited in vain, and the next leg went on behind the token, wrong or not."""

    async def scenario() -> None:
        hold, corrupt = asyncio.Event(), TransferFailed("the KV of this request could not be fetched: corrupt")
        prefill = awaiting("prefill", behaviour=Behaviour(wrong_prefill=is_wrong))
        decode = awaiting("decode", behaviour=Behaviour(hold=hold, fail_after_hold=corrupt))
        async with fake_mesh(prefill, decode) as mesh:
            serving = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: ends(mesh) == {"used": 1})
            hold.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            decode.behaviour.fail_after_hold = None
            if is_wrong:
                with pytest.raises(DamagedKV):
                    await serving
            else:
                assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [bool(each.ticket or each.awaits or each.emitted) for each in decode.requests] == [True, False]
            await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["dies", "drains"])
def test_another_decode_goes_on_where_the_one_that_waits_leaves(how: str) -> None:
    async def scenario() -> None:
        prefill = awaiting("prefill", behaviour=Behaviour(hold=(hold := asyncio.Event())))
        decodes = [awaiting("decode"), awaiting("decode")]
        async with fake_mesh(prefill, *decodes, extra={"max_retries": 0}) as mesh:
            serving = asyncio.create_task(mesh.collect(request := token_request()))
            await until(lambda: prefill.requests and any(each.requests for each in decodes))
            [told] = [each for each in decodes if each.requests]
            [other] = [each for each in decodes if each is not told]
            if how == "dies":
                await told.kill()
                await until(lambda: len(mesh.cluster.view().engines) == 2)
            else:
                told.drain(within_ms=60_000)
                await until(lambda: told.aborts)
            hold.set()
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [bool(each.ticket) for each in other.requests] == [True]
            assert (request.trace.decode, ends(mesh)) == (other.engine_id, {"failed": 1})

    asyncio.run(scenario())


def test_a_prefill_that_fails_takes_the_leg_with_it_and_the_next_one_has_its_own() -> None:
    async def scenario() -> None:
        prefills = [awaiting("prefill", behaviour=Behaviour(refuse=PeerUnavailable("gone"))), awaiting("prefill")]
        async with fake_mesh(*prefills, decode := awaiting("decode")) as mesh:
            for number in range(2):
                prompt = [number, *PROMPT]
                assert tokens_of(await mesh.collect(token_request(prompt))) == expected_tokens(prompt, 8)
            told = [each.awaits.offer_id for each in decode.requests if each.awaits]
            assert len(set(told)) == len(told) == sum(len(each.requests) for each in prefills) >= 3
            unused = [
                each.request_id
                for each in decode.requests
                if each.awaits and each.awaits.owner_id == prefills[0].peer_id
            ]
            await until(lambda: {each for each, _ in decode.aborts} == set(unused))
            assert ends(mesh) == {"used": 2, "unneeded": len(unused)}

    asyncio.run(scenario())


def test_a_decode_that_dies_while_it_goes_on_is_followed_by_another_with_the_ticket() -> None:
    async def scenario() -> None:
        prefill = awaiting("prefill")
        decodes = [
            awaiting("decode", behaviour=Behaviour(die_after=4)),
            awaiting("decode", behaviour=Behaviour(die_after=4)),
        ]
        async with fake_mesh(prefill, *decodes) as mesh:
            # The second one shall live once the first has died.
            serving = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: any(each.requests for each in decodes))
            [other] = [each for each in decodes if not each.requests]
            other.behaviour.die_after = None
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert [bool(each.ticket) for each in other.requests] == [True]

    asyncio.run(scenario())
