"""Engines with contexts of different lengths: a request goes to those that hold all of it, and to no other when one dies."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdmesh.errors import PeerUnavailable
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, fake_mesh, finish_reasons, proxy_over, token_request, tokens_of

NUM_TOKENS = 40
LONG, SHORT = len(PROMPT) + NUM_TOKENS, len(PROMPT) + NUM_TOKENS - 1
WANTED = expected_tokens(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("short_prefill", [False, True])
def test_a_request_whose_decode_dies_waits_for_one_that_holds_it(short_prefill: bool) -> None:
    """It went on at a decode with a smaller context, which ended it there with "length", or with a 400 in mid-stream."""

    async def scenario() -> None:
        dying = FakeEngine("decode", max_model_len=LONG, behaviour=Behaviour(die_after=20))
        small = FakeEngine("decode", max_model_len=SHORT)
        # One that holds the prompt only, or all: then it goes on with it rather than nobody.
        prefill = FakeEngine("prefill", max_model_len=len(PROMPT) + 2 if short_prefill else LONG)
        extra = {"engine_wait_timeout_s": 10.0}
        async with fake_mesh(prefill, dying, small, extra=extra) as mesh:
            assert (await mesh.generator.card()).max_model_len == LONG
            request = token_request(max_tokens=NUM_TOKENS)
            running = asyncio.create_task(mesh.collect(request))
            if short_prefill:
                await until(lambda: len(mesh.cluster.view().engines) == 2)
                async with FakeEngine("decode", max_model_len=LONG, port=dying.port):
                    deltas = await running
            else:
                deltas = await running
            assert tokens_of(deltas) == WANTED
            assert finish_reasons(deltas) == {0: ["length"]}
            assert not small.requests
            assert ("decode_context" in request.trace.fallbacks) == (not short_prefill)

    asyncio.run(scenario())


@pytest.mark.parametrize("die_after", [0, 20])
def test_a_request_that_nobody_holds_any_more_is_a_503_that_says_so(die_after: int) -> None:
    async def scenario() -> None:
        dying = FakeEngine("decode", max_model_len=LONG, behaviour=Behaviour(die_after=die_after))
        small = FakeEngine("decode", max_model_len=SHORT)
        async with fake_mesh(dying, small) as mesh:
            with pytest.raises(PeerUnavailable, match=f"{LONG} tokens, the longest context .* is {SHORT}"):
                await mesh.collect(token_request(max_tokens=NUM_TOKENS))
            assert not small.requests
            # The mesh says what it takes now.
            assert (await mesh.generator.card()).max_model_len == SHORT
            shorter = token_request(max_tokens=NUM_TOKENS - 1)
            assert tokens_of(await mesh.collect(shorter)) == WANTED[:-1]

    asyncio.run(scenario())


def test_a_prompt_too_long_for_prefill_is_computed_by_decode() -> None:
    async def scenario() -> None:
        prefill = FakeEngine("prefill", max_model_len=len(PROMPT) + 1)
        decode = FakeEngine("decode", max_model_len=LONG)
        async with fake_mesh(prefill, decode) as mesh:
            assert (await mesh.generator.card()).max_model_len == LONG
            request = token_request(max_tokens=NUM_TOKENS)
            assert tokens_of(await mesh.collect(request)) == WANTED
            assert (request.trace.reason, request.trace.decode) == ("prefill_context", decode.engine_id)
            assert mesh.metric("pdmesh_proxy_fallbacks_total", reason="prefill_context") == 1
            assert not prefill.requests

    asyncio.run(scenario())


def test_contexts_that_differ_are_told_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill", max_model_len=LONG), FakeEngine("decode", max_model_len=SHORT)
        async with fake_mesh(prefill, decode) as mesh:
            for engine, length in ((prefill, LONG), (decode, SHORT)):
                labels = {"engine": engine.engine_id, "address": engine.address}
                assert mesh.metric("pdmesh_proxy_engine_context_tokens", **labels) == length
            decode.use(0.5)
            await until(lambda: any(engine.kv_usage for engine in mesh.cluster.view().engines))
            (said,) = [record.getMessage() for record in caplog.records if "different lengths" in record.getMessage()]
            assert f"{prefill.engine_id} {LONG}" in said
            assert f"{decode.engine_id} {SHORT}" in said
            assert f"up to {SHORT} tokens" in said

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())


def test_contexts_that_are_the_same_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engines = [FakeEngine(role) for role in ("prefill", "decode")]
        async with fake_mesh(*engines), proxy_over(prefill=[engines[0].address], decode=[engines[1].address]):
            pass

    asyncio.run(scenario())
    assert "different lengths" not in caplog.text
