"""A server's leave-taking: what an open connection may still ask, and which sockets it may be given."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from pdmesh import http_protocol
from pdmesh.errors import ConfigError
from pdmesh.http_server import adopt, serving
from pdmesh.lifecycle import listen

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WITHIN_S = 10.0
NUM_KNOCKING = 8
NUM_CLOSINGS = 3
NUM_AT_ONCE = 50
EVENT_LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The head of the answer to one more request."""
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(2) == b"ok"
    return head.lower()


def knocked(port: int) -> socket.socket:
    """A client that has connected and asked, with the loop standing still."""
    client = socket.create_connection(("127.0.0.1", port), WITHIN_S)
    client.sendall(GET)
    return client


def test_who_is_connected_may_ask_once_more_and_is_told_that_it_was_the_last() -> None:
    async def scenario() -> None:
        listener = listen("127.0.0.1", 0)
        async with serving(app, listener) as server:
            active, idle, mute = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
            assert b"connection: close" not in await asked(*active)
            assert b"connection: close" not in await asked(*idle)
            server.leave()
            await server.stop_listening()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", server.port)
            # The port is free while connections are open.
            listen("127.0.0.1", server.port).close()
            assert b"connection: close" in await asked(*active)
            assert await active[0].read() == b""
            # Others are not waited for longer than a moment: those that asked once, and those that never did.
            await server.emptied()
            assert await idle[0].read() == await mute[0].read() == b""
            for _, writer in (active, idle, mute):
                writer.close()

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


@pytest.mark.parametrize("new_event_loop", EVENT_LOOPS)
def test_no_connection_is_reset_when_the_port_is_closed(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Who got in is answered, who came later is refused; those in the queue at that moment were reset."""
    outcomes: Counter[str] = Counter()

    def knock(port: int, over: threading.Event) -> None:
        while not over.is_set():
            with socket.socket() as client:
                client.settimeout(WITHIN_S)
                try:
                    client.connect(("127.0.0.1", port))
                    client.sendall(GET)
                    outcomes["answered" if client.recv(1000) else "closed"] += 1
                except OSError as exc:
                    outcomes[type(exc).__name__] += 1
                    if isinstance(exc, ConnectionRefusedError):
                        return

    async def scenario() -> None:
        over = threading.Event()
        async with serving(app, listen("127.0.0.1", 0)) as server, asyncio.TaskGroup() as knocking:
            clients = [knocking.create_task(asyncio.to_thread(knock, server.port, over)) for _ in range(NUM_KNOCKING)]
            while outcomes["answered"] < NUM_KNOCKING:
                await asyncio.sleep(0.01)
            server.leave()
            await server.stop_listening()
            outcomes["answered"] = 0
            await asyncio.wait(clients, timeout=WITHIN_S)
            over.set()
            await server.emptied()

    for _ in range(NUM_CLOSINGS):
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(asyncio.wait_for(scenario(), WITHIN_S))
    assert outcomes["ConnectionRefusedError"] == NUM_KNOCKING * NUM_CLOSINGS, outcomes
    assert set(outcomes) <= {"answered", "ConnectionRefusedError"}, outcomes


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("new_event_loop", EVENT_LOOPS)
def test_a_burst_that_came_while_the_loop_was_busy_is_answered(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop], is_shared: bool
) -> None:
    """uvloop accepts one connection in a turn, and the port was closed after six. `is_shared`: whoever shared it has gone."""

    async def scenario() -> None:
        with contextlib.ExitStack() as clients:
            async with serving(app, listen("127.0.0.1", 0)) as server:
                # Until it accepts.
                first = await asyncio.open_connection("127.0.0.1", server.port)
                await asked(*first)
                burst = [clients.enter_context(knocked(server.port)) for _ in range(NUM_AT_ONCE)]
                server.leave()
                await server.stop_listening(is_shared=is_shared)
                first[1].close()
                await server.emptied()
                assert all(client.recv(1000).startswith(b"HTTP/1.1 200 ") for client in burst)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), WITHIN_S))


def test_a_request_in_the_middle_of_its_head_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LAST_REQUEST_S", 0.1)

    async def scenario() -> None:
        async with serving(app, listen("127.0.0.1", 0)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(GET[:-4])
            await writer.drain()
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            server.leave()
            await server.stop_listening()
            await asyncio.sleep(0.3)
            writer.write(GET[-4:])
            assert b"connection: close" in (await reader.readuntil(b"\r\n\r\n")).lower()
            await server.emptied()
            writer.close()

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "must be a TCP socket"),
        (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "must be a TCP socket"),
        (lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM), "must be a socket that listens"),
        (lambda: socket.create_server(("0.0.0.0", 0)), "it listens on 0.0.0.0, and host says loopback only"),
        (lambda: os.fdopen(os.open(os.devnull, os.O_RDONLY)), "not an open socket"),
    ],
)
def test_a_descriptor_that_is_not_fit_is_refused_and_left_alone(make: Callable[[], Any], says: str) -> None:
    with make() as unfit:
        with pytest.raises(ConfigError, match=f"listen-fd {unfit.fileno()}: {says}"):
            adopt(unfit.fileno(), on_loopback=True)
        # Closed here, and only here.
        assert unfit.fileno() >= 0


def test_a_socket_is_taken_over() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        adopted = adopt(listener.fileno(), on_loopback=False)
        assert adopted.getsockname() == listener.getsockname()
        adopted.detach()
