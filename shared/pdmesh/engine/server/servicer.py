"""The Engine service that proxies call: a data stream of requests and step frames, a control stream of aborts, leases, load."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from pdmesh.decoding import Undecodable
from pdmesh.engine.server.endings import error_delta
from pdmesh.engine.server.expectations import Expectations
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.orderly_writes import OrderlyWrites
from pdmesh.engine.server.sessions import Broken, Session, Sessions
from pdmesh.engine.server.submission import MAX_CHOICES, Submission
from pdmesh.errors import InternalError, MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.pushes import expectation_from_pb
from pdmesh.protocol.wire import delta_to_pb, request_from_pb

log = logging.getLogger(__name__)

SESSION_METADATA_KEY = "pdmesh-session"
# Fast enough to route by, slow enough to cost nothing.
MIN_REPORT_INTERVAL_S = 0.1

# What a stream's `read` returns at its end; the stubs do not know it.
EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]
Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(mesh_pb2_grpc.EngineServicer):
    """Serves proxies. The streams are coroutines that read and write themselves, so that their `finally` always runs."""

    def __init__(
        self,
        *,
        info: pb.EngineInfo,
        submission: Submission,
        sessions: Sessions,
        handoff: Handoff,
        expectations: Expectations,
        board: LoadBoard,
        metrics: EngineMetrics,
    ) -> None:
        self._info = info
        self._submission = submission
        self._sessions = sessions
        self._handoff = handoff
        self._expectations = expectations
        self._board = board
        self._metrics = metrics
        self._closing = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register with a server; returns the service's full name."""
        mesh_pb2_grpc.add_EngineServicer_to_server(self, server)
        return pb.DESCRIPTOR.services_by_name["Engine"].full_name

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.EngineInfo:
        """Tell who this engine is."""
        return self._info

    async def Generate(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        """Run one proxy session's data stream until either side ends it."""
        session_id = await _session_id(context)
        session = self._sessions.open(session_id)
        reader = asyncio.create_task(self._read_requests(session, context))
        writes = OrderlyWrites(context)
        writer = asyncio.create_task(_write_frames(session, writes))
        try:
            ends: set[asyncio.Future[Any]] = {writer, session.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            _raise_undecodable(reader)
            if not writer.done():
                why = session.broken.result()
                log.warning("session %s ended: %s", session_id, why)
                writer.cancel()
                await writes.settle()
                await context.abort(grpc.StatusCode.ABORTED, f"the engine ended the session: {why}")
        finally:
            self._sessions.close(session_id, session)
            await self._end(context, reader, writer)
            await writes.settle()

    async def Control(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        """Take aborts and leases of a session and report load, until the proxy ends the stream or the engine closes."""
        session_id = await _session_id(context)
        writes = OrderlyWrites(context)
        reader = asyncio.create_task(self._read_control(session_id, context, writes))
        reporter = asyncio.create_task(self._report_load(writes))
        closing = asyncio.create_task(self._closed(session_id))
        try:
            await asyncio.wait({reader, reporter, closing}, return_when=asyncio.FIRST_COMPLETED)
            _raise_undecodable(reader)
        finally:
            await self._end(context, reader, reporter, closing)
            await writes.settle()

    async def _closed(self, session_id: str) -> None:
        """Return when the engine closes and owes the session nothing: a proxy takes the end of either stream for that of both."""
        await self._closing.wait()
        await self._sessions.ended(session_id)

    def close(self) -> None:
        """Have all streams end once what is owed on them is sent."""
        self._sessions.finish()
        self._closing.set()

    async def _read_requests(self, session: Session, context: Context) -> None:
        try:
            async for frame in _messages(context):
                for message in frame.requests:
                    self._submit(session, message)
                for expectation in frame.expectations:
                    self._expectations.expect(expectation_from_pb(expectation), session)
            session.finish()
        except Undecodable:
            session.end(Broken.STREAM)
            raise
        except grpc.aio.BaseError as exc:
            # The stream went, or this server was stopped under it: what is owed on it has nowhere to go.
            log.info("a data stream cannot be read any more: %s", exc)
            session.end(Broken.STREAM)
        except Exception as exc:
            self._unexpected("data_stream", exc)
            session.end(Broken.STREAM)

    def _submit(self, session: Session, message: pb.GenerateRequest) -> None:
        try:
            self._submission.submit(request_from_pb(message), session)
        except Exception as exc:
            # A request's fault is its own: the session's others go on.
            error = exc if isinstance(exc, MeshError) else self._unexpected("submit", exc)
            # Of more choices than there can be one is told: no answer is larger than its request.
            for choice in (message.choices if len(message.choices) <= MAX_CHOICES else message.choices[:1]) or [0]:
                session.put(error_delta(message.request_id, choice, error))

    async def _read_control(self, session_id: str, context: Context, writes: OrderlyWrites) -> None:
        async for message in _messages(context):
            for abort in message.aborts:
                self._sessions.abort(session_id, abort.request_id, abort.choice)
            for offer_id in message.withdraw_expectations:
                self._sessions.withdraw(session_id, offer_id)
            for offer_id in message.release_offers:
                self._handoff.release(offer_id)
            ended = [offer_id for offer_id in message.renew_offers if not self._handoff.renew(offer_id)]
            if ended or message.ping:
                await writes.write(pb.ControlDown(pong=message.ping, ended_offers=ended, load=self._board.report()))

    async def _report_load(self, writes: OrderlyWrites) -> None:
        """Tell what changed; an engine at rest is silent but for its answers to pings."""
        while True:
            version = self._board.version
            await writes.write(pb.ControlDown(load=self._board.report()))
            await asyncio.sleep(MIN_REPORT_INTERVAL_S)
            await self._board.newer(version)

    async def _end(self, context: Context, *tasks: asyncio.Task[Any]) -> None:
        """End a stream's tasks and wait for them; what failed although the stream stands is told."""
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            # When the stream is gone, reads and writes fail as they must.
            expected = grpc.aio.BaseError, Undecodable
            if isinstance(result, Exception) and not context.done() and not isinstance(result, expected):
                self._unexpected("stream", result)

    def _unexpected(self, where: str, error: Exception) -> InternalError:
        """Log and count what no one foresaw."""
        log.error("unexpected in a session's %s", where, exc_info=error)
        self._metrics.unexpected_errors.inc(where)
        return InternalError(f"the engine could not handle this: {type(error).__name__}: {error}")


def _raise_undecodable(reader: asyncio.Task[None]) -> None:
    """Pass on that a stream's end was a message that is none."""
    if reader.done() and isinstance(error := reader.exception(), Undecodable):
        raise error


async def _write_frames(session: Session, writes: OrderlyWrites) -> None:
    while deltas := await session.take():
        await writes.write(pb.StepFrame(deltas=[delta_to_pb(delta) for delta in deltas]))
        session.written()


async def _messages(context: Context) -> AsyncIterator[Any]:
    while (message := await context.read()) is not EOF:
        yield message


async def _session_id(context: Context) -> str:
    metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
    session_id = metadata.get(SESSION_METADATA_KEY, "")
    if not session_id:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"metadata {SESSION_METADATA_KEY} must name the session")
    return session_id
