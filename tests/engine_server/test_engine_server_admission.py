"""A full engine says so: 503, when to come back, and a count by the limit that was hit."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import msgspec
import pytest

from pdmesh.engine.server.assembly import Engine
from pdmesh.engine.stats import Stats
from pdmesh.errors import Overloaded
from pdmesh.protocol.messages import ChoiceDelta, SamplingParams
from support.engines import loop_thread, request, start_engines
from support.held_engine import HeldCore, Inbox, counted, play

REJECTIONS = "vllm:admission_rejections_total"


def test_what_the_core_refuses_is_counted_once_by_limit_and_blames_no_field() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = Inbox()
        engine.servicer._submission.submit(request("a", choices=[0, 1]), inbox)
        refusals = [
            ChoiceDelta(
                request_id=core.added().request.request_id,
                choice=choice,
                finish_reason="error",
                error_code="Overloaded",
                error_message="full",
                error_param="max_num_queued_tokens",
            )
            for choice in (0, 1)
        ]
        assert counted(engine, REJECTIONS, reason="max_num_queued_tokens") == 0
        await core.say(deltas=refusals)
        assert [(delta.error_code, delta.error_param) for delta in inbox.deltas] == [("Overloaded", "")] * 2
        assert counted(engine, REJECTIONS, reason="max_num_queued_tokens") == 1
        assert counted(engine, REJECTIONS, reason="max_num_queued_reqs") == 0
        assert counted(engine, "vllm:request_success_total", finished_reason="error") == 1

    play(scene)


@pytest.mark.parametrize(
    ("num_prompt", "num_emitted", "max_tokens", "prefill_only", "is_taken"),
    [
        (1000, 0, 24, False, True),
        (1000, 0, 25, False, False),
        (1000, 10, 25, False, False),
        (1100, 10, 25, False, False),
        (1000, 0, 500, True, True),
        (1022, 0, 500, True, True),
        (1023, 0, 500, True, False),
        (1023, 0, 1, True, True),
        (1000, 22, 500, True, True),
        (1000, 23, 500, True, False),
    ],
)
def test_a_leg_that_the_context_would_end_early_goes_elsewhere(
    num_prompt: int, num_emitted: int, max_tokens: int, prefill_only: bool, is_taken: bool
) -> None:
    """An engine with a smaller context than the one before ended a resumed request there, with "length" as if it were done."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        asked = msgspec.structs.replace(
            request("a", token_ids=[1] * num_prompt, prefill_only=prefill_only),
            sampling=SamplingParams(max_tokens=max_tokens),
            emitted=[[1] * num_emitted] if num_emitted else [],
        )
        if is_taken:
            engine.servicer._submission.submit(asked, Inbox())
            assert core.added().request.request_id
        else:
            with pytest.raises(Overloaded, match="do not fit the context of 1024 tokens") as caught:
                engine.servicer._submission.submit(asked, Inbox())
            assert caught.value.retryable

    play(scene)


def test_waiting_requests_are_shown_by_reason() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        await core.say(stats=Stats(num_waiting=3, num_waiting_remote=2, illegal_events=1))
        assert counted(engine, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
        assert counted(engine, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
        assert counted(engine, "pdmesh_illegal_state_events_total") == 1

    play(scene)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"max_num_queued_tokens": 100}, "max_num_queued_tokens"), ({"max_num_queued_reqs": 1}, "max_num_queued_reqs")],
)
def test_over_http_one_more_than_may_wait_is_a_503(tiny_model: str, settings: dict[str, int], reason: str) -> None:
    async def body(engine: Any) -> None:
        async with httpx.AsyncClient(base_url=engine.http, timeout=30) as client:

            async def complete(num_prompt: int, **fields: Any) -> httpx.Response:
                prompt = [4 + (7 * index + num_prompt) % 300 for index in range(num_prompt)]
                asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True} | fields
                return await client.post("/v1/completions", json=asked)

            async def value(name: str) -> float:
                text = (await client.get("/metrics")).text
                return sum(
                    float(found) for found in re.findall(rf"^{re.escape(name)}.* ([0-9.e+]+)$", text, re.MULTILINE)
                )

            async def until(name: str, wanted: float) -> None:
                async with asyncio.timeout(20):
                    while await value(name) != wanted:
                        await asyncio.sleep(0.005)

            # One runs, with the only row; another waits.
            running = asyncio.create_task(complete(8, max_tokens=900))
            await until("vllm:num_requests_running{", 1)
            waiting = asyncio.create_task(complete(80))
            await until("vllm:num_requests_waiting{", 1)
            for stream in (False, True):
                refused = await complete(60, stream=stream)
                assert refused.status_code == 503, refused.text
                assert refused.headers["retry-after"] == "1"
                error = refused.json()["error"]
                assert (error["type"], error["param"], error["code"]) == ("Service Unavailable", None, 503)
                assert reason.replace("_", "-") in error["message"]
            assert await value(f"{REJECTIONS}{{" + f'engine="0",model_name="tiny",reason="{reason}"}}') == 2
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            await until("vllm:num_requests_running{", 0)
            assert (await complete(60)).status_code == 200, "there is room again"

    with loop_thread() as loop:
        limits = {"max_num_seqs": 1, "served_model_name": "tiny"} | settings
        [engine] = loop.run(start_engines(tiny_model, "decode", **limits))
        try:
            loop.run(body(engine))
        finally:
            loop.run(engine.stop())
