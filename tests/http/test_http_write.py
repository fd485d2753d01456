"""Pieces of a body written past the middlewares arrive as sent events would, and wait for a client that does not read."""

import time
from typing import Any

import httpx
import pytest

from pdmesh.http_protocol import WRITE_EXTENSION
from support.api_server import serve_in_thread

PIECE = b"x" * 65536
NUM_PIECES = 200
taken: list[bool] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    write = scope["extensions"][WRITE_EXTENSION]
    assert not write(b"before the head")
    headers = [(b"content-length", b"3")] if scope["path"] == "/counted" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    # An empty chunk would end the body.
    assert not write(b"")
    if scope["path"] == "/counted":
        taken.append(write(b"abc"))
        await send({"type": "http.response.body", "body": b"abc"})
        return
    for number in range(NUM_PIECES):
        piece = b"%d;" % number + PIECE
        taken.append(write(piece))
        if not taken[-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"end", "more_body": False})
    assert not write(b"behind the end")


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_pieces_arrive_in_order_and_wait_for_a_slow_client(delay_s: float) -> None:
    taken.clear()
    with serve_in_thread(app) as url, httpx.stream("GET", url, timeout=20) as response:
        time.sleep(delay_s)
        body = response.read()
    assert body == b"".join(b"%d;" % number + PIECE for number in range(NUM_PIECES)) + b"end"
    assert any(taken)
    # 13 MB are more than sockets hold: a client that does not read is waited for.
    assert not all(taken) or not delay_s


def test_a_body_of_known_length_is_left_to_the_server() -> None:
    taken.clear()
    with serve_in_thread(app) as url:
        assert httpx.get(f"{url}/counted", timeout=20).content == b"abc"
    assert taken == [False]
