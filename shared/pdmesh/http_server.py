"""A service's HTTP server, and how it takes its leave: nothing that comes to it meanwhile is lost for want of a word.

Life: `async with serving(app, listener) as server`, then at a stop `leave()`, `stop_listening()`, `emptied()`. From `leave` on
each answer says `Connection: close`. Once nobody listens here, a connection that was open may still bring the request that its
client was about to send; one that brings none is closed a second later. So a client that keeps connections loses no request.
"""

import asyncio
import contextlib
import math
import select
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from pdmesh.errors import ConfigError
from pdmesh.http_protocol import BoundedHttpProtocol, Leaving
from pdmesh.lifecycle import HTTP_BACKLOG, drop_connects

# Until the loop has begun what it accepted.
ACCEPT_TURNS = 3
# While others may still connect, there might be no last one; a hundred times what a burst of 50 took.
ACCEPT_S = 1.0
LOOPBACK_ADDRESSES = ("127.", "::1")


def adopt(descriptor: int, *, on_loopback: bool) -> socket.socket:
    """Take over a listening socket that whoever started us has opened, and keeps.

    Raises ConfigError when it is none, or can be reached from further away than the settings were checked for.
    """
    try:
        adopted = socket.socket(fileno=descriptor)
    except OSError as exc:
        raise ConfigError(f"listen-fd {descriptor}: not an open socket: {exc.strerror}") from exc
    try:
        adopted.set_inheritable(False)
        fault = _unfit(adopted, on_loopback)
    except OSError as exc:
        fault = f"{exc.strerror}"
    if fault:
        # It is not ours.
        adopted.detach()
        raise ConfigError(f"listen-fd {descriptor}: {fault}")
    return adopted


def _unfit(adopted: socket.socket, on_loopback: bool) -> str:
    if adopted.family not in (socket.AF_INET, socket.AF_INET6) or adopted.type != socket.SOCK_STREAM:
        return "must be a TCP socket"
    if not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "must be a socket that listens"
    address = str(adopted.getsockname()[0])
    if on_loopback and not address.startswith(LOOPBACK_ADDRESSES):
        return f"it listens on {address}, and host says loopback only: set host to that address"
    return ""


async def _turns(count: int) -> None:
    """Let the event loop go around."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(app: Any, listener: socket.socket) -> AsyncIterator["HttpServer"]:
    """Serve an ASGI app on a listening socket, which is closed at the end. Closing waits for no client."""
    server = HttpServer(app, listener)
    task = asyncio.create_task(server._serve([listener]))
    try:
        yield server
    finally:
        server.ended.set()
        await task
        listener.close()


class HttpServer(uvicorn.Server):
    """Made by `serving`: uvicorn without its ten ticks a second, which keep a Date header fresh that nobody needs."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                date_header=False,
                timeout_graceful_shutdown=1,
                http=BoundedHttpProtocol,
                ws="none",
            )
        )
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self.ended = asyncio.Event()
        self._leaving = self.server_state = Leaving()
        self.install_signal_handlers = lambda: None

    def leave(self) -> None:
        """Ask each client, with its next answer, to connect anew."""
        self._leaving.announce()

    async def stop_listening(self, *, is_shared: bool = False) -> None:
        """Let the next who connects find another than us; `is_shared`: somebody else holds the socket, and what waits there."""
        until_s = time.monotonic() + ACCEPT_S
        if not is_shared:
            # Who knocks in the next moment knocks again a second later, when another listens here, or nobody.
            with contextlib.suppress(OSError):
                drop_connects(self._listener)
                until_s = math.inf
        await self._accept_waiting(until_s)
        # asyncio's own loop, unlike uvloop, accepts first and makes connections later, which a closed server may not.
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._listener)
        await _turns(ACCEPT_TURNS)
        for server in self.servers:
            server.close()
        self._leaving.close_idle()

    async def _accept_waiting(self, until_s: float) -> None:
        """Let the loop accept whoever has connected already: closing would reset them, unless another holds the socket."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        # uvloop accepts one in a turn. What it cannot accept, for want of descriptors, is not waited for.
        for _ in range(HTTP_BACKLOG):
            if not waiting.poll(0) or time.monotonic() >= until_s:
                break
            await asyncio.sleep(0)
        await _turns(ACCEPT_TURNS)

    async def emptied(self) -> None:
        """Return when no connection is open any more; the caller sets the deadline."""
        while self.server_state.connections:
            self._leaving.lost.clear()
            await self._leaving.lost.wait()

    async def main_loop(self) -> None:
        """Sleep until the server is to end."""
        await self.on_tick(0)
        await self.ended.wait()
