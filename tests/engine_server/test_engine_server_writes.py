"""Writes on a stream whose writers are cancelled at any time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from pdmesh.engine.server.orderly_writes import OrderlyWrites
from pdmesh.engine.server.requests import RequestTable
from pdmesh.engine.server.servicer import EngineServicer, _write_frames
from pdmesh.engine.server.sessions import Broken, Session, Sessions
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.messages import ChoiceDelta
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.engines import SECRET as ENGINES_SECRET

SECRET = MeshSecret("a mesh secret for tests only")


class Cancelling(mesh_pb2_grpc.EngineServicer):
    """Cancels writers in the middle of the first write, writes on, and ends."""

    async def Control(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        writes = OrderlyWrites(context)
        first = asyncio.create_task(writes.write(pb.ControlDown(pong=1)))
        for _ in range(2):
            await asyncio.sleep(0)
        first.cancel()
        if (await context.read()).ping:
            await writes.write(pb.ControlDown(pong=2))
        await writes.settle()


@pytest.mark.parametrize("ping", [0, 1])
def test_writer_cancelled_in_a_write_harms_no_other_and_not_the_end(
    ping: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever followed failed with TOO_MANY_OPERATIONS and a traceback in the engine's log."""

    def register(server: grpc.aio.Server) -> list[str]:
        mesh_pb2_grpc.add_EngineServicer_to_server(Cancelling(), server)
        return []

    async def go() -> list[int]:
        async with (
            grpc_server("127.0.0.1", 0, SECRET, register) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stream = mesh_pb2_grpc.EngineStub(channel).Control(metadata=SECRET.call_metadata(), timeout=5)
            await stream.write(pb.ControlUp(ping=ping))
            return [message.pong async for message in stream]

    assert asyncio.run(go()) == [1, 2][: 1 + ping]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Breaking:
    """A stream whose connection is slow, and breaks in the middle of a write."""

    def __init__(self, *, fails: bool = True) -> None:
        self.begun, self.broken = asyncio.Event(), asyncio.Event()
        self._fails = fails

    async def write(self, message: object) -> None:
        self.begun.set()
        await self.broken.wait()
        if self._fails:
            raise ConnectionError("the connection broke")


def test_write_that_fails_after_its_writer_was_cancelled_is_not_logged_as_one_that_nobody_saw() -> None:
    """A session whose connection broke left a traceback in the engine's log."""
    logged: list[dict[str, Any]] = []

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        stream = Breaking()
        writer = asyncio.create_task(OrderlyWrites(stream).write(pb.ControlDown(pong=1)))  # type: ignore[arg-type]
        for _ in range(2):
            await asyncio.sleep(0)
        writer.cancel()
        await asyncio.wait([writer])
        stream.broken.set()
        for _ in range(3):
            await asyncio.sleep(0)
        del writer
        gc.collect()

    asyncio.run(go())
    assert not logged


@pytest.mark.parametrize("breaks", ["written", "broken", "cancelled"])
def test_offers_of_a_frame_that_could_not_be_written_are_released_with_its_session(breaks: str) -> None:
    """What was taken out to be written was no session's any more, and held prefill's blocks until its lease was over."""
    released: list[bytes] = []

    async def go() -> None:
        unused: Any = None
        handoff: Any = SimpleNamespace(release_ticket=released.append)
        expectations: Any = SimpleNamespace(session_closed=lambda session: None)
        table = RequestTable()
        sessions = Sessions(table=table, endings=unused, handoff=handoff, expectations=expectations, metrics=unused)
        session, stream = sessions.open("session"), Breaking(fails=breaks == "broken")
        writes = OrderlyWrites(stream)  # type: ignore[arg-type]
        writer = asyncio.create_task(_write_frames(session, writes))
        session.put(ChoiceDelta(request_id="r", choice=0, token_ids=[1], ticket=b"first"))
        await asyncio.wait_for(stream.begun.wait(), 5)
        session.put(ChoiceDelta(request_id="r", choice=0, token_ids=[1], ticket=b"second"))
        if breaks == "cancelled":
            writer.cancel()
        else:
            session.finish()
            stream.broken.set()
        await asyncio.wait([writer], timeout=5)
        sessions.close("session", session)
        stream.broken.set()
        await writes.settle()

    asyncio.run(go())
    assert released == ([] if breaks == "written" else [b"first", b"second"])


@pytest.mark.parametrize("name", ["Generate", "Control"])
def test_garbage_on_a_session_ends_it_as_the_callers_fault(
    pair: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(pair.decode.grpc) as channel:
            metadata = (("pdmesh-session", "garbage"), *MeshSecret(ENGINES_SECRET).call_metadata())
            stream = channel.stream_stream(f"/pdmesh.v1.Engine/{name}")(metadata=metadata, timeout=5)
            await stream.write(b"\xff" * 40)
            # The status comes after the load reports before it.
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in stream:
                    pass
            return await stream.code()

    assert pair.loop.run(go()) is grpc.StatusCode.INVALID_ARGUMENT
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(loud) == 1
    assert loud[0].exc_info is None


def test_data_stream_that_is_first_read_after_the_server_stopped_ends_its_session_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A session that a proxy opened while an engine shut down was logged as unexpected, and counted as a defect of ours."""
    reached = asyncio.Event()
    contexts: list[Any] = []

    class Late(mesh_pb2_grpc.EngineServicer):
        async def Generate(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            contexts.append(context)
            reached.set()
            await asyncio.sleep(60)

    async def go() -> Session:
        server = grpc.aio.server()
        mesh_pb2_grpc.add_EngineServicer_to_server(Late(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = mesh_pb2_grpc.EngineStub(channel).Generate(timeout=5)
            await stream.write(pb.SubmitFrame())
            await asyncio.wait_for(reached.wait(), 5)
            await server.stop(grace=0)
            session = Session(RequestTable())
            unused: Any = None
            servicer = EngineServicer(
                info=pb.EngineInfo(),
                submission=unused,
                sessions=unused,
                handoff=unused,
                expectations=unused,
                board=unused,
                metrics=unused,
            )
            await servicer._read_requests(session, contexts[0])
            return session

    session = asyncio.run(go())
    assert session.broken.result() is Broken.STREAM
    # gRPC itself tells of the call that it cancelled.
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING and each.name.startswith("pdmesh")]
