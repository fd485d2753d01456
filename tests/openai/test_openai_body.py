"""Bodies that stop coming, and clients that leave while they send one."""

import logging
import socket
import time
from urllib.parse import urlsplit

import pytest

from pdmesh.config import HttpConfig
from pdmesh.errors import ConfigError
from pdmesh.openai.intake.identity import ApiKeys
from pdmesh.openai.text import TextModel
from support.api_server import ApiServer, api_server

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
    b"Connection: close\r\n\r\n{"
)


def begin(server: ApiServer) -> socket.socket:
    """Send a head and one byte of its body."""
    parts = urlsplit(server.url)
    connection = socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=10)
    connection.sendall(HEAD)
    return connection


def test_a_body_that_stops_is_a_408(text: TextModel) -> None:
    with api_server(text, config=HttpConfig(body_timeout_s=0.2)) as server, begin(server) as connection:
        started = time.monotonic()
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - started < 5


def test_a_body_that_dribbles_is_bounded_by_the_requests_time(text: TextModel) -> None:
    config = HttpConfig(body_timeout_s=5, request_timeout_s=0.4)
    with api_server(text, config=config) as server, begin(server) as connection:
        connection.settimeout(0.05)
        started = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - started < 4:
            connection.sendall(b" ")
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_while_it_sends_is_counted_and_nothing_else(
    text: TextModel, caplog: pytest.LogCaptureFixture, reset: bool
) -> None:
    # It once left two tracebacks in the log.
    with api_server(text) as server, caplog.at_level(logging.INFO):
        connection = begin(server)
        time.sleep(0.05)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        end = time.monotonic() + 5
        counted = 'pdmesh_api_requests_total{outcome="client_gone"} 1.0'
        while counted not in server.raw("GET", "/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]


def test_a_key_that_is_not_text_is_one_line() -> None:
    with pytest.raises(ConfigError, match="api-key number 2 "):
        ApiKeys(["fine", b"\xff".decode(errors="surrogateescape")])
