"""What an engine says last on its data stream, when its control stream has ended meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdmesh.errors import PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest, SamplingParams
from pdmesh.protocol.wire import delta_to_pb
from pdmesh_proxy import engine_session
from pdmesh_proxy.engine_session import EngineSession, SessionSettings
from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.offers import HeldOffers
from support.fake_engine import SECRET

REQUEST = GenerateRequest(request_id="r", token_ids=[1, 2], sampling=SamplingParams(max_tokens=2), choices=[0])


class Stream:
    """One stream as the proxy's end sees it: what the engine says, and then that it has ended, unless `ends` is unset."""

    def __init__(self, said: list[Any], *, pause_s: float = 0.0, ends: bool = True) -> None:
        self._said, self._pause_s, self._ends = said, pause_s, ends

    async def __aiter__(self) -> AsyncIterator[Any]:
        for message in self._said:
            await asyncio.sleep(self._pause_s)
            yield message
        if not self._ends:
            await asyncio.Event().wait()

    async def write(self, message: object) -> None:
        await asyncio.sleep(0)


def session_over(data: Stream) -> EngineSession:
    metrics = ProxyMetrics(CollectorRegistry())
    return EngineSession(
        "127.0.0.1:1",
        "s",
        pb.EngineInfo(engine_id="decode-0", epoch=1, vocab_size=100),
        data,  # type: ignore[arg-type]
        Stream([]),  # type: ignore[arg-type]
        settings=SessionSettings(
            connect_timeout_s=1, heartbeat_interval_s=5, heartbeat_timeout_s=20, buffer_tokens=100
        ),
        offers=HeldOffers(),
        secret=SECRET,
        metrics=metrics,
        on_change=lambda: None,
    )


def frame(token_id: int, finish_reason: str = "") -> pb.StepFrame:
    delta = ChoiceDelta(request_id="r", choice=0, token_ids=[token_id], finish_reason=finish_reason)
    return pb.StepFrame(deltas=[delta_to_pb(delta)])


async def tokens_over(data: Stream) -> list[int]:
    session, tokens = session_over(data), list[int]()
    with session.submit(REQUEST) as leg:
        running = asyncio.create_task(session.run())
        try:
            async for deltas in leg:
                tokens += [each for delta in deltas for each in delta.token_ids]
        finally:
            with pytest.raises(PeerUnavailable):
                await asyncio.wait_for(running, 10)
    return tokens


def test_what_lies_in_the_data_stream_is_read_when_the_control_stream_has_ended() -> None:
    data = Stream([frame(5), frame(6, "length")], pause_s=0.02)
    assert asyncio.run(tokens_over(data)) == [5, 6]


def test_a_data_stream_that_does_not_end_behind_it_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "LAST_FRAMES_S", 0.1)
    with pytest.raises(PeerUnavailable, match="ended its control stream"):
        asyncio.run(tokens_over(Stream([frame(5)], ends=False)))
