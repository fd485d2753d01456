"""Bounds on what a client may do to the HTTP port before any application code sees its request.

uvicorn's fast parser takes heads of any size for any time. Here a head, trailers or chunk extensions that go on, a head
that never ends and one connection too many are refused and closed, on every service's port alike.
"""

import asyncio
import functools
import http
import logging
import resource
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 30.0
"""From the connection, or from the first byte after an answer, to the end of the next head."""
MAX_CONNECTIONS = 4096
RESERVED_DESCRIPTORS = 256
"""Left for gRPC, shared memory and files."""
# The bound on a head is checked between pieces, so this is what it is exceeded by at most.
PIECE_BYTES = 16 << 10
# A client that still sends when its connection is closed gets a reset instead of the answer.
LINGER_S = 1.0
MAX_REFUSED_OPEN = RESERVED_DESCRIPTORS // 2
LAST_REQUEST_S = 1
"""How long an open connection may bring one more request to a server that takes its leave: more than a client thinks before
its next request, and than its network takes."""

WRITE_EXTENSION = "pdmesh.write"
"""In an ASGI scope's extensions: see `_write_piece`."""

log = logging.getLogger(__name__)


def most_connections() -> int:
    """Most open HTTP connections: a constant, or what the limit on descriptors has room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft // 2, soft - RESERVED_DESCRIPTORS))


def _write_piece(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """Write a piece of a body that goes on, as an event that is sent would be, if that needs no waiting; False when it does.

    For streams of small pieces: an event goes through a coroutine of each middleware, which is most of what a token costs.
    """
    is_plain = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
    if not (is_plain and piece) or cycle.flow.write_paused or cycle.disconnected:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return True


class Leaving(ServerState):
    """What the connections of one server share: whether it takes its leave, and the signal that one has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = asyncio.Event()
        """Set whenever a connection has ended."""
        self.closes_idle = False

    def announce(self) -> None:
        """Have each answer that begins from now on be the last of its connection."""
        # In place: what is being answered knows this very list.
        self.default_headers.append((b"connection", b"close"))

    def close_idle(self) -> None:
        """Have each connection end soon that brings no request."""
        self.closes_idle = True
        for connection in list(self.connections):
            if isinstance(connection, BoundedHttpProtocol):
                connection.close_if_idle()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Between its requests, and within a request's head, it has a deadline."""

    max_connections = most_connections()
    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle_bytes = 0
        """Received since the parser last came to the end of a head, of a message, or to a piece of body."""
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._too_large = False
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_over = len(self.connections) - self.max_connections
        if num_over <= 0:
            self._watch_head()
            if isinstance(self.server_state, Leaving) and self.server_state.closes_idle:
                self.close_if_idle()
            return
        if num_over == 1:
            log.warning("over %d open HTTP connections; further ones are refused", self.max_connections)
        self._refuse(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many open connections")
        if num_over > MAX_REFUSED_OPEN:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)
        if isinstance(self.server_state, Leaving):
            self.server_state.lost.set()

    def close_if_idle(self) -> None:
        """Close when no request comes within LAST_REQUEST_S, from now or from the end of the present answer on."""
        self.timeout_keep_alive = LAST_REQUEST_S
        if not self._in_head and not self._is_answering():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(LAST_REQUEST_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Parse, unless this connection has been refused and only waits for its client to read that."""
        for start in range(0, len(data), PIECE_BYTES):
            if self._refused or self.transport.is_closing():
                return
            piece = data[start : start + PIECE_BYTES]
            self._idle_bytes += len(piece)
            super().data_received(piece)
            if self._idle_bytes > MAX_HEAD_BYTES:
                self._too_large = True
                self.send_400_response("")
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser did not take, or what a bound stopped it at."""
        if self._too_large:
            status = http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            msg = f"more than {MAX_HEADERS} headers or {MAX_HEAD_BYTES} bytes of them"
        else:
            status = http.HTTPStatus.BAD_REQUEST
        self._refuse(status, msg)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._too_large = True
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        self._in_head, self._idle_bytes = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._idle_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: such a request is answered as if it had not asked."""

    def _watch_head(self) -> None:
        """Start the deadline when the client owes a head, stop it when it owes none."""
        if not self._in_head and self._is_answering():
            self._unwatch_head()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering():
            # The next request of a pipeline; the one before it may still have its answer.
            self._watch_head()
        elif self._in_head:
            self._refuse(http.HTTPStatus.REQUEST_TIMEOUT, f"no complete head within {self.head_timeout_s:g} s")
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: http.HTTPStatus, message: str) -> None:
        """Answer without the application, then close once the client has had time to read it."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._unwatch_head()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
        )
        if self._is_answering():
            # An answer has begun or is due before this one; theirs cannot be mixed.
            self.transport.close()
            return
        self.transport.write(head.encode() + message.encode())
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        async def run(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("extensions", {})[WRITE_EXTENSION] = functools.partial(_write_piece, cycle)
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                # The service ends and does not wait for this client: no failure that anyone should look into.
                cycle.disconnected = True
                self.transport.close()

        super()._start_asgi_task(cycle, run)
