"""A streamed answer: waits for the first token, then sends events until the end, an error, or the client's leaving."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pdmesh.errors import DeadlineExceeded, InternalError, MeshError
from pdmesh.http_protocol import WRITE_EXTENSION
from pdmesh.openai.http.disconnect import ClientGone, unless_disconnected
from pdmesh.openai.http.errors import error_event, error_response
from pdmesh.openai.http.route_header import ROUTE_HEADER, describe_route
from pdmesh.openai.job import CANCELLED, CLIENT_GONE, Job

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# For a client that has stopped reading when its request ends; other waits have the request's deadline.
LAST_SEND_TIMEOUT_S = 10.0


class EventStream(Response):
    """Server-sent events of one job.

    A failure before the first event is an ordinary error answer; after it, an error event and the terminator.
    Each event waits until the client's socket takes it, so a slow client holds back only its own request.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, *, keep_alive_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job = job
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._run(scope, receive, send))
        except ClientGone:
            self._job.ended(outcome=CLIENT_GONE)
        except TimeoutError:
            # The job is over and noted; its client does not read. Returning closes the connection.
            log.warning("a client did not take the end of its stream")
        finally:
            self._job.ended(outcome=CANCELLED)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, started = None, False
        write: Callable[[bytes], bool] = scope.get("extensions", {}).get(WRITE_EXTENSION, _write_nothing)
        try:
            async with asyncio.timeout_at(self._job.deadline), aclosing(self._events()) as events:
                async for chunk in events:
                    if not started:
                        self.headers[ROUTE_HEADER] = describe_route(self._job.traces)
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        started = True
                    if not write(chunk):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except MeshError as exc:
            error = exc
        except TimeoutError:
            error = DeadlineExceeded("the request took longer than it may")
        except Exception:
            log.exception("a stream failed")
            error = InternalError("the server failed on this request; its log says why")
        self._job.ended(error)
        if error is not None and not started:
            await error_response(error, {ROUTE_HEADER: describe_route(self._job.traces)})(scope, receive, send)
            return
        tail = error_event(error) if error is not None else b""
        tail += b": pdmesh " + describe_route(self._job.traces).encode() + b"\n\n" + DONE
        async with asyncio.timeout(LAST_SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _events(self) -> AsyncGenerator[bytes, None]:
        events = self._job.events()
        return _with_keep_alive(events, self._keep_alive_s) if self._keep_alive_s else events


def _write_nothing(piece: bytes) -> bool:
    return False


async def _with_keep_alive(events: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """Yield a comment whenever nothing came for `interval_s`; middle boxes cut silent connections."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            await asyncio.wait({waiting}, timeout=interval_s)
            if not waiting.done():
                yield KEEP_ALIVE
                continue
            done, waiting = waiting, None
            try:
                yield done.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await events.aclose()
