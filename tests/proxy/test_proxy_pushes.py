"""Which prompts the proxy has pushed, to whom, and that it takes every expectation back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdmesh.errors import PeerUnavailable
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, fake_mesh, token_request, tokens_of


def pushing(role: str, **options: Any) -> FakeEngine:
    return FakeEngine(role, pushes=True, **options)


def test_decode_is_told_while_prefill_computes_and_gets_the_request() -> None:
    """PROMPT has 100 tokens, and a fake's steps at most 32."""

    async def scenario() -> None:
        prefill = pushing("prefill", behaviour=Behaviour(hold=(hold := asyncio.Event())))
        decodes = [pushing("decode"), pushing("decode")]
        async with fake_mesh(prefill, *decodes) as mesh:
            serving = asyncio.create_task(mesh.collect(request := token_request()))
            await until(lambda: prefill.requests and any(each.expectations for each in decodes))
            [told] = [each for each in decodes if each.expectations]
            [expectation] = told.expectations
            assert expectation.offer_id == prefill.requests[0].offer_id
            assert (expectation.owner_id, expectation.owner_address) == (prefill.peer_id, prefill.address)
            assert list(expectation.token_ids) == PROMPT
            assert 0 < expectation.remaining_ms <= 10_000
            # Another has been used longest ago by now, and would be the choice.
            assert not told.withdrawn
            hold.set()
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            assert told.requests
            assert request.trace.decode == told.engine_id
            await until(lambda: told.withdrawn == [expectation.offer_id])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("prefill", "decode", "extra", "length"),
    [
        (pushing, FakeEngine, {}, 100),
        (FakeEngine, pushing, {}, 100),
        (pushing, pushing, {}, 32),
        (pushing, pushing, {"push_min_chunks": 5}, 100),
    ],
)
def test_what_does_not_pay_or_cannot_be_is_pulled(
    prefill: Any, decode: Any, extra: dict[str, Any], length: int
) -> None:
    async def scenario() -> None:
        engines = prefill("prefill"), decode("decode")
        async with fake_mesh(*engines, extra=extra) as mesh:
            prompt = PROMPT[:length]
            assert tokens_of(await mesh.collect(token_request(prompt))) == expected_tokens(prompt, 8)
            assert engines[0].requests[0].prefill_only
            assert not engines[0].requests[0].offer_id
            assert not engines[1].expectations

    asyncio.run(scenario())


def test_what_prefill_has_already_is_no_chunk() -> None:
    async def scenario() -> None:
        prefill, decode = pushing("prefill"), pushing("decode")
        async with fake_mesh(prefill, decode, extra={"pd_min_prompt_tokens": 0}) as mesh:
            for _ in range(2):
                # The second time both hold 64 tokens of it, which is a chunk of the prefix index.
                await mesh.collect(token_request(PROMPT[:90]))
            assert [len(each.token_ids) for each in decode.expectations] == [90]

    asyncio.run(scenario())


def test_an_expectation_is_taken_back_when_prefill_fails_and_another_takes_its_place() -> None:
    async def scenario() -> None:
        failing = pushing("prefill", behaviour=Behaviour(refuse=PeerUnavailable("gone")))
        decode = pushing("decode")
        async with fake_mesh(failing, decode) as mesh:
            assert tokens_of(await mesh.collect(token_request())) == expected_tokens(PROMPT, 8)
            await until(lambda: decode.withdrawn == [each.offer_id for each in decode.expectations] != [])
        prefills = [pushing("prefill", behaviour=Behaviour(refuse=PeerUnavailable("gone"))), pushing("prefill")]
        async with fake_mesh(*prefills, decode := pushing("decode")) as mesh:
            for number in range(2):
                prompt = [number, *PROMPT]
                assert tokens_of(await mesh.collect(token_request(prompt))) == expected_tokens(prompt, 8)
            told = [each.offer_id for each in decode.expectations]
            assert len(set(told)) == len(told) == sum(len(each.requests) for each in prefills) >= 3
            await until(lambda: sorted(decode.withdrawn) == sorted(told))

    asyncio.run(scenario())


def test_an_expectation_is_taken_back_when_the_client_leaves() -> None:
    async def scenario() -> None:
        prefill, decode = pushing("prefill", behaviour=Behaviour(hold=asyncio.Event())), pushing("decode")
        async with fake_mesh(prefill, decode) as mesh:
            serving = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: decode.expectations)
            serving.cancel()
            await until(lambda: decode.withdrawn == [decode.expectations[0].offer_id])

    asyncio.run(scenario())


def test_a_request_that_its_first_token_ends_takes_its_expectation_back() -> None:
    async def scenario() -> None:
        prefill, decode = pushing("prefill", behaviour=Behaviour(eos_after=1)), pushing("decode")
        async with fake_mesh(prefill, decode) as mesh:
            await mesh.collect(token_request())
            await until(lambda: decode.withdrawn == [decode.expectations[0].offer_id])
            assert not decode.requests

    asyncio.run(scenario())


def test_the_decode_that_was_pushed_to_is_not_waited_for_when_it_has_gone() -> None:
    async def scenario() -> None:
        prefill = pushing("prefill", behaviour=Behaviour(hold=(hold := asyncio.Event())))
        decodes = [pushing("decode"), pushing("decode")]
        async with fake_mesh(prefill, *decodes) as mesh:
            serving = asyncio.create_task(mesh.collect(token_request()))
            await until(lambda: prefill.requests and any(each.expectations for each in decodes))
            [told] = [each for each in decodes if each.expectations]
            await told.kill()
            await until(lambda: len(mesh.cluster.view().engines) == 2)
            hold.set()
            assert tokens_of(await serving) == expected_tokens(PROMPT, 8)
            [other] = [each for each in decodes if each is not told]
            assert other.requests

    asyncio.run(scenario())
