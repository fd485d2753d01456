"""A first token that ends its request ends it at prefill, whose offer goes at once; what is known of the text outlives legs."""

from __future__ import annotations

import asyncio
from functools import cache

import httpx
import pytest

from pdmesh.models.source import DEMO_MODEL
from pdmesh.openai.text import TextModel, load_text_model
from support.api_server import make_app
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine, expected_tokens
from support.fake_mesh import PROMPT, fake_mesh, finish_reasons, token_request, tokens_of

WANTED = expected_tokens(PROMPT, 40)


@cache
def text_model() -> TextModel:
    return load_text_model(DEMO_MODEL)


@pytest.mark.parametrize(("behaviour", "max_tokens", "reason"), [({"eos_after": 1}, 40, "stop"), ({}, 1, "length")])
def test_a_first_token_that_ends_the_request_never_reaches_decode(
    behaviour: dict[str, int], max_tokens: int, reason: str
) -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill", behaviour=Behaviour(**behaviour)), FakeEngine("decode")
        async with fake_mesh(prefill, decode) as mesh:
            deltas = await mesh.collect(token_request(max_tokens=max_tokens))
            assert tokens_of(deltas) == WANTED[:1]
            assert finish_reasons(deltas) == {0: [reason]}
            assert not decode.requests
            await until(lambda: not prefill.offers.open)

    asyncio.run(scenario())


def test_a_stop_string_in_the_first_token_releases_the_offer_at_once() -> None:
    async def scenario() -> None:
        prefill, decode = FakeEngine("prefill"), FakeEngine("decode", behaviour=Behaviour(hold=asyncio.Event()))
        async with fake_mesh(prefill, decode) as mesh:
            app = make_app(text_model(), mesh.generator, role="proxy", config=None)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy") as client:
                stop = text_model().decode(WANTED[:1], False)
                body = {"prompt": PROMPT, "max_tokens": 40, "stop": [stop], "ignore_eos": True}
                answer = (await client.post("/v1/completions", json=body)).json()
            [choice] = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("", "stop")
            # No lease was waited for: nobody renewed it, and it is gone.
            await until(lambda: not prefill.offers.open)
            assert len(prefill.offers.released) == 1
            assert not decode.running

    asyncio.run(scenario())


def test_a_stop_string_may_begin_on_one_decode_and_end_on_the_next() -> None:
    async def scenario() -> None:
        decodes = [FakeEngine("decode", behaviour=Behaviour(step_s=0.002, die_after=12)) for _ in range(2)]
        async with fake_mesh(FakeEngine("prefill"), *decodes) as mesh:
            app = make_app(text_model(), mesh.generator, role="proxy", config=None)
            text = text_model().decode(WANTED[:20], False)
            # Across the token that the first decode died behind.
            at = len(text_model().decode(WANTED[:12], False))
            stop = text[at - 3 : at + 3]
            first = text.index(stop)
            assert first == at - 3, "the tokens have it elsewhere too"

            async def live_on() -> None:
                await until(lambda: any(engine.requests for engine in decodes))
                [other] = [engine for engine in decodes if not engine.requests]
                other.behaviour.die_after = None

            living = asyncio.create_task(live_on())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://proxy") as client:
                body = {"prompt": PROMPT, "max_tokens": 40, "stop": [stop], "ignore_eos": True}
                answer = (await client.post("/v1/completions", json=body, timeout=30)).json()
            await living
            [choice] = answer["choices"]
            assert (choice["text"], choice["finish_reason"]) == (text[:first], "stop")
            assert all(engine.requests for engine in decodes), "the first did not die"

    asyncio.run(scenario())
