"""What a client without a key can do to any HTTP port, with bytes of its own making."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdmesh import http_protocol
from pdmesh.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS, BoundedHttpProtocol
from support.api_server import serve_in_thread

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
SOCKET_TIMEOUT_S = 10


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer the number of body bytes; /forever and whoever never sends all of a body get none."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
    if scope["path"] == "/forever":
        await asyncio.sleep(60)
    body = str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serve_in_thread(app) as url:
        yield host_and_port(url)


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 0.3)


def host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=SOCKET_TIMEOUT_S)


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def read_until(connection: socket.socket, end: bytes) -> None:
    data = b""
    while not data.endswith(end):
        part = connection.recv(65536)
        assert part, f"closed after {data!r}"
        data += part


def exchange(address: tuple[str, int], *parts: bytes) -> bytes:
    """Send the parts and return what the server says until it closes."""
    with connect(address) as connection:
        for part in parts:
            connection.sendall(part)
        return read_to_end(connection)


def endless(address: tuple[str, int], start: bytes, filler: bytes) -> bytes:
    """Send filler until the server has had enough; returns what it says, nothing when it just closes."""
    sent = 0
    with connect(address) as connection:
        connection.sendall(start)
        connection.setblocking(False)
        while sent < 8 << 20:
            try:
                sent += connection.send(filler)
            except BlockingIOError:
                time.sleep(0.001)
            except ConnectionError:
                return b""
            try:
                return connection.recv(65536)
            except BlockingIOError:
                continue
            except ConnectionError:
                return b""
    raise AssertionError(f"no end after {sent} bytes")


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "filler", "answer"),
    [
        pytest.param(GET + b"X: ", b"a" * 8192, b"HTTP/1.1 431 ", id="header"),
        pytest.param(b"GET /", b"a" * 8192, b"HTTP/1.1 431 ", id="target"),
        pytest.param(b"", b"\r\n" * 4096, b"HTTP/1.1 431 ", id="empty lines"),
        pytest.param(CHUNKED + b"1\r\nx\r\n0\r\nX: ", b"a" * 8192, b"", id="trailer"),
        pytest.param(CHUNKED + b"1;x=", b"a" * 8192, b"", id="chunk extension"),
    ],
)
def test_what_never_ends_is_refused(address: tuple[str, int], start: bytes, filler: bytes, answer: bytes) -> None:
    # One header of 100 MB once stalled every other client for seconds.
    assert endless(address, start, filler).startswith(answer)


def test_a_head_at_the_bound_passes_and_one_over_it_does_not(address: tuple[str, int]) -> None:
    close = b"Connection: close\r\n\r\n"
    assert exchange(address, GET, b"X: " + b"a" * (MAX_HEAD_BYTES - 200) + b"\r\n", close).startswith(b"HTTP/1.1 200")
    over = exchange(address, GET, b"X: " + b"a" * (MAX_HEAD_BYTES + (32 << 10)) + b"\r\n", close)
    assert over.startswith(b"HTTP/1.1 431 ")


def test_too_many_small_headers_are_refused(address: tuple[str, int]) -> None:
    most = MAX_HEADERS - 2
    close = b"Connection: close\r\n\r\n"
    assert exchange(address, GET + b"a: b\r\n" * most + close).startswith(b"HTTP/1.1 200")
    assert exchange(address, GET + b"a: b\r\n" * (most + 1) + close).startswith(b"HTTP/1.1 431 ")


def test_bodies_and_many_requests_on_a_connection_are_not_heads(address: tuple[str, int]) -> None:
    num_bytes = 3 * MAX_HEAD_BYTES + 1
    with connect(address) as connection:
        for _ in range(3):
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % num_bytes + b"x" * num_bytes)
            read_until(connection, b"\r\n\r\n%d" % num_bytes)
    pipelined = (GET + b"X: " + b"a" * 1000 + b"\r\n\r\n") * 100 + GET + b"Connection: close\r\n\r\n"
    assert exchange(address, pipelined).count(b"HTTP/1.1 200 ") == 101


@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, b"\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(address: tuple[str, int], sent: bytes) -> None:
    started = time.monotonic()
    answer = exchange(address, sent)
    assert time.monotonic() - started < 5
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.usefixtures("short_deadline")
def test_dribbling_does_not_move_the_deadline(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(b"GET /")
        for _ in range(100):
            try:
                connection.sendall(b"a")
            except ConnectionError:
                return
            time.sleep(0.05)
    raise AssertionError("a head came a byte at a time for 5 s")


@pytest.mark.usefixtures("short_deadline")
def test_the_deadline_spares_a_request_being_answered_and_its_successor(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(GET + b"\r\n")
        read_until(connection, b"\r\n\r\n0")
        # Longer than the deadline: a connection at rest has the keep-alive time instead.
        time.sleep(0.6)
        connection.sendall(POST + b"Content-Length: 2\r\n\r\nx")
        time.sleep(0.6)
        connection.sendall(b"x")
        read_until(connection, b"\r\n\r\n2")


@pytest.mark.parametrize("most_refused", [0, 9])
def test_one_connection_too_many_is_told_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most_refused: int
) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "max_connections", 2)
    monkeypatch.setattr(http_protocol, "MAX_REFUSED_OPEN", most_refused)
    with serve_in_thread(app) as url:
        address = host_and_port(url)
        with connect(address) as first, connect(address) as second:
            for held in (first, second):
                held.sendall(GET + b"\r\n")
                assert held.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert exchange(address).startswith(b"HTTP/1.1 503 ")
        assert "over 2 open HTTP connections" in caplog.text
        assert _eventually(lambda: exchange(address, GET, b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 "))


@pytest.mark.parametrize(
    "request_bytes", [POST + b"Content-Length: 9\r\n\r\nx", b"GET /forever HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_the_end_of_the_service_is_no_failure(caplog: pytest.LogCaptureFixture, request_bytes: bytes) -> None:
    # Each request open at SIGTERM once left a CancelledError's traceback.
    with caplog.at_level(logging.INFO):
        with serve_in_thread(app) as url:
            connection = connect(host_and_port(url))
            connection.sendall(request_bytes)
            time.sleep(0.1)
        with connection:
            assert read_to_end(connection) == b""
    assert not [record for record in caplog.records if record.exc_info]
    assert "ASGI" not in caplog.text


def _eventually(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if is_so():
            return True
        threading.Event().wait(0.05)
    return False
