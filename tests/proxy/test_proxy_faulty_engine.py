"""An engine that belongs to the mesh and is out of its mind: its proxy goes on elsewhere, or says an error, and stays sane."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from pdmesh.errors import MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh_proxy.nonsense import MAX_WORD_CHARS
from support.awaiting import until
from support.fake_engine import FakeEngine, expected_tokens
from support.fake_mesh import fake_mesh, token_request, tokens_of

OWN = "<own>"
VOCAB_SIZE = 512


class MadEngine(FakeEngine):
    """Answers each request with given frames, in which OWN stands for its id, and says given things besides."""

    def __init__(self, frames: list[pb.StepFrame], downs: list[pb.ControlDown], **facts: Any) -> None:
        super().__init__("decode")
        self.info.MergeFrom(pb.EngineInfo(**facts))
        self._frames, self._downs = frames, downs

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.StepFrame]:  # type: ignore[override]
        async for submit in request_iterator:
            for request in submit.requests:
                for frame in self._frames:
                    sent = pb.StepFrame()
                    sent.CopyFrom(frame)
                    for delta in sent.deltas:
                        delta.request_id = request.request_id if delta.request_id == OWN else delta.request_id
                    yield sent

    async def Control(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ControlDown]:  # type: ignore[override]
        for down in self._downs:
            yield down
        async for up in request_iterator:
            yield pb.ControlDown(pong=up.ping)


numbers = st.one_of(st.integers(0, 3), st.sampled_from([511, 512, (1 << 32) - 1]))
floats = st.sampled_from([0.0, -1.5, float("nan"), float("inf"), 1e30])
texts = st.one_of(
    st.sampled_from(["", "stop", "length", "error", "x" * 5000, "shm", "Overloaded"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
logprobs = st.builds(
    pb.Logprobs,
    token_ids=st.lists(numbers, max_size=3),
    logprobs=st.lists(floats, max_size=3),
    rank=numbers,
)
deltas = st.builds(
    pb.ChoiceDelta,
    request_id=st.sampled_from([OWN, OWN, OWN, "", "another", "x" * 300]),
    choice=numbers,
    token_ids=st.lists(numbers, max_size=4),
    logprobs=st.lists(logprobs, max_size=2),
    prompt_logprobs=st.one_of(st.none(), st.builds(pb.PromptLogprobs, positions=st.lists(logprobs, max_size=3))),
    finish_reason=texts,
    stop_token_id=st.one_of(st.none(), numbers),
    ticket=st.one_of(st.just(b""), st.binary(max_size=80)),
    cached_tokens=numbers,
    kv_bytes=st.integers(0, (1 << 64) - 1),
    kv_source=texts,
    kv_committed=st.booleans(),
    error=st.one_of(st.none(), st.builds(pb.ErrorInfo, code=texts, message=texts, param=texts)),
    queued_s=floats,
)
frames = st.builds(pb.StepFrame, deltas=st.lists(deltas, max_size=4))
loads = st.builds(
    pb.LoadReport,
    num_running=numbers,
    num_waiting=numbers,
    num_waiting_tokens=numbers,
    kv_usage=floats,
    draining=st.booleans(),
    epoch=numbers,
    num_offers=numbers,
)
downs = st.builds(pb.ControlDown, load=loads, pong=numbers, ended_offers=st.lists(texts, max_size=3))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.lists(frames, max_size=4), st.lists(downs, min_size=1, max_size=2))
def test_any_frames_of_one_engine_leave_the_proxy_and_the_others_well(
    caplog: pytest.LogCaptureFixture, sent: list[pb.StepFrame], said: list[pb.ControlDown]
) -> None:
    async def body() -> None:
        mad, sane = MadEngine(sent, said), FakeEngine("decode")
        async with fake_mesh(sane) as mesh, mad:
            assert len(tokens_of(await mesh.collect(token_request()))) == 8
            mesh.cluster._add(mad.address).want(frozenset())
            with contextlib.suppress(AssertionError):
                await until(lambda: len(mesh.cluster.view().engines) == 2, 0.3)
            # Neither knows the prompt, so that the one used longest ago is asked first.
            with contextlib.suppress(MeshError):
                deltas = await mesh.collect(token_request(range(100, 140), deadline_s=0.5))
                assert all(0 <= token < VOCAB_SIZE for token in tokens_of(deltas))
                assert all(len(delta.finish_reason) <= MAX_WORD_CHARS for delta in deltas)
            assert mesh.metric("pdmesh_proxy_requests_in_flight") == 0
            shown = generate_latest(mesh.registry).decode()
            assert max(map(len, shown.splitlines())) < 1024, "a label of any length is kept for ever"
            await mad.kill()
            assert len(tokens_of(await mesh.collect(token_request()))) == 8

    caplog.clear()
    asyncio.run(body())
    faults = [
        record for record in caplog.records if record.name.startswith("pdmesh") and record.levelno >= logging.ERROR
    ]
    assert not [record.getMessage() for record in faults]


@pytest.mark.parametrize(
    "said",
    [
        {"token_ids": [5, VOCAB_SIZE]},
        {"token_ids": [5], "kv_source": "x" * 200},
        {"token_ids": [5], "kv_source": "line\nbreak"},
        {"finish_reason": "bogus" * 100},
        {"token_ids": [5], "logprobs": [pb.Logprobs(token_ids=[VOCAB_SIZE], logprobs=[0.0], rank=1)]},
        {"finish_reason": "stop", "stop_token_id": 1 << 31},
    ],
    ids=lambda said: "+".join(said),
)
def test_what_makes_no_sense_reaches_no_client(said: dict[str, Any]) -> None:
    """Its tokens were given to the client, and its words became labels of metrics."""

    async def body() -> None:
        delta = pb.ChoiceDelta(request_id=OWN, choice=0, kv_bytes=1, **said)
        mad, sane = (
            MadEngine([pb.StepFrame(deltas=[delta])], [pb.ControlDown(load=pb.LoadReport())]),
            FakeEngine("decode"),
        )
        async with fake_mesh(sane) as mesh, mad:
            await mesh.collect(token_request())
            mesh.cluster._add(mad.address).want(frozenset())
            await until(lambda: len(mesh.cluster.view().engines) == 2)
            prompt = range(100, 140)
            assert tokens_of(await mesh.collect(token_request(prompt))) == expected_tokens(prompt, 8)
            assert mesh.metric("pdmesh_proxy_retries_total", error="PeerUnavailable") == 1

    asyncio.run(body())
