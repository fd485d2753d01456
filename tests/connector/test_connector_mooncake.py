"""Mooncake's agent: how a read is cut, and that no other host reaches an engine that is to serve this one alone."""

import socket

import numpy as np

from pdmesh.connector.mooncake_agent import MAX_PIECE_BYTES, keep_on_loopback
from pdmesh.connector.native_agent import merged


def ranges(*pieces: tuple[int, int]) -> "np.ndarray[tuple[int, int], np.dtype[np.uint64]]":
    return np.asarray([(address, num_bytes, 0) for address, num_bytes in pieces], dtype=np.uint64).reshape(-1, 3)


def test_neighbours_on_both_sides_are_read_at_once() -> None:
    local = ranges((1000, 10), (1010, 10), (1020, 10), (2000, 10), (2010, 10))
    remote = ranges((0, 10), (10, 10), (50, 10), (60, 10), (70, 10))
    assert list(merged(local, remote, 4096)) == [(1000, 0, 20), (1020, 50, 10), (2000, 60, 20)]
    assert not merged(ranges(), ranges(), 4096)


def test_a_piece_stays_small_enough_to_be_waited_for() -> None:
    size = MAX_PIECE_BYTES // 4
    blocks = ranges(*((index * size, size) for index in range(10)))
    assert [num_bytes // size for _, _, num_bytes in merged(blocks, blocks, MAX_PIECE_BYTES)] == [4, 4, 2]
    huge = ranges((0, 3 * MAX_PIECE_BYTES))
    assert list(merged(huge, huge, MAX_PIECE_BYTES)) == [(0, 0, 3 * MAX_PIECE_BYTES)]


def test_what_listens_is_kept_on_loopback() -> None:
    with socket.socket() as listening, socket.socket() as other:
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        keep_on_loopback()
        device = [each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for each in (listening, other)]
        assert device[0].rstrip(b"\0") == b"lo"
        assert device[1] == b""
        with socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=5):
            pass
