"""A proxy that belongs to the mesh and is out of its mind: its frames are refused one by one, and others get their tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmesh.protocol import mesh_pb2 as pb
from support.engines import ProxySession, proxy_session, request, tokens_of

numbers = st.one_of(st.integers(0, 9), st.sampled_from([299, 300, 1 << 31, (1 << 32) - 1]))
signed = st.one_of(st.integers(-2, 9), st.sampled_from([-(1 << 31), (1 << 31) - 1]))
long_numbers = st.one_of(st.integers(0, 9), st.sampled_from([30_000, (1 << 63) - 1, (1 << 64) - 1]))
floats = st.one_of(st.floats(0, 2), st.sampled_from([float("nan"), float("inf"), -1.0, 1e308]))
ids = st.lists(numbers, max_size=12)
texts = st.one_of(
    st.sampled_from(["", "r-1", "r-2", "é" * 5000, "x" * 257]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
)
blobs = st.one_of(st.binary(max_size=90), st.just(b"\x01" + b"z" * (1 << 16)))
token_lists = st.builds(pb.TokenIds, ids=ids)
samplings = st.builds(
    pb.Sampling,
    n=numbers,
    temperature=floats,
    top_p=floats,
    top_k=signed,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    max_tokens=numbers,
    min_tokens=numbers,
    ignore_eos=st.booleans(),
    stop_token_ids=ids,
    logprobs=st.one_of(st.none(), signed),
    prompt_logprobs=st.one_of(st.none(), signed),
    logit_bias=st.dictionaries(numbers, floats, max_size=3),
    allowed_token_ids=st.one_of(st.none(), token_lists),
    bad_words=st.lists(token_lists, max_size=3),
    repetition_detection=st.one_of(
        st.none(),
        st.builds(pb.RepetitionDetection, max_pattern_size=numbers, min_pattern_size=numbers, min_count=numbers),
    ),
    thinking=st.one_of(st.none(), st.builds(pb.ThinkingBudget, budget=numbers, start_token_ids=ids, end_token_ids=ids)),
    extra_args=blobs,
)
submissions = st.builds(
    pb.GenerateRequest,
    request_id=texts,
    token_ids=ids,
    sampling=samplings,
    choices=ids,
    emitted=st.lists(token_lists, max_size=3),
    prefill_only=st.booleans(),
    ticket=st.one_of(st.just(b""), blobs),
    cache_salt=texts,
    priority=st.integers(-(1 << 63), (1 << 63) - 1),
    remaining_ms=long_numbers,
)
controls = st.builds(
    pb.ControlUp,
    aborts=st.lists(st.builds(pb.AbortChoice, request_id=texts, choice=signed), max_size=3),
    renew_offers=st.lists(texts, max_size=3),
    release_offers=st.lists(texts, max_size=3),
    ping=long_numbers,
)
frames = st.one_of(st.builds(pb.SubmitFrame, requests=st.lists(submissions, max_size=4)), controls)


async def took(session: ProxySession, frame: pb.SubmitFrame | pb.ControlUp) -> bool:
    """Whether the session lived on; the engine may end a mad one, with a reason."""
    try:
        await (session.data if isinstance(frame, pb.SubmitFrame) else session.control).write(frame)
    except grpc.aio.AioRpcError as exc:
        code = exc.code()
    else:
        return True
    assert code in (grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT)
    return False


@pytest.mark.timeout(240)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(frames, min_size=1, max_size=6))
def test_any_frames_cost_others_nothing(pair: Any, frames: list[pb.SubmitFrame | pb.ControlUp]) -> None:
    async def scenario() -> None:
        async with proxy_session(pair.prefill.grpc, "sane") as sane, proxy_session(pair.prefill.grpc, "mad") as mad:
            for frame in frames:
                if not await took(mad, frame):
                    break
            tokens = tokens_of(await sane.run(request("sane-1", num_prompt=20, max_tokens=2)))
            assert len(tokens) == 2

    pair.loop.run(scenario())


def test_after_all_that_nothing_is_held_and_nothing_was_unforeseen(pair: Any) -> None:
    async def scenario() -> None:
        async with proxy_session(pair.prefill.grpc, "last") as session:
            await session.load(until=lambda load: not load.num_running + load.num_waiting + load.num_offers)
        async with httpx.AsyncClient(base_url=pair.prefill.http, timeout=10) as client:
            metrics = (await client.get("/metrics")).text
        assert "pdmesh_unexpected_errors_total{" not in metrics, metrics

    pair.loop.run(scenario())


def errors_of(frame: pb.StepFrame) -> list[tuple[str, str]]:
    return [(delta.error.code, delta.error.param) for delta in frame.deltas if delta.HasField("error")]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"request_id": "x" * (1 << 20)}, "request_id"),
        ({"choices": list(range(1 << 17))}, "n"),
        ({"choices": [0, 0]}, "n"),
        ({"token_ids": [(1 << 32) - 1]}, "prompt"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [5] * (1 << 20)}, "prompt"),
        ({"ticket": b"forged"}, ""),
        ({"cache_salt": "s" * (1 << 20)}, "cache_salt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_a_frame_that_is_out_of_bounds_has_an_answer_of_its_own(pair: Any, change: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        good = {"request_id": "r", "token_ids": [5, 6], "choices": [0], "remaining_ms": 5000}
        message = pb.GenerateRequest(
            **(good | change), sampling=pb.Sampling(n=1, max_tokens=1, top_p=1, repetition_penalty=1)
        )
        async with proxy_session(pair.prefill.grpc, "bounds") as session:
            await session.data.write(pb.SubmitFrame(requests=[message]))
            frame = await asyncio.wait_for(session.data.read(), 20)
            assert frame is not grpc.aio.EOF
            (error, *_) = errors_of(frame)
            assert error[1] == param, error
            # No answer is larger than what it is for.
            assert frame.ByteSize() < message.ByteSize() + 1024

    pair.loop.run(scenario())
