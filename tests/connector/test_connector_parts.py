"""The small parts that connectors share: the table of pulls, runs of blocks, the registry, the shm socket."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time

import pytest

from pdmesh.connector.active import ActivePulls
from pdmesh.connector.base import Pull
from pdmesh.connector.pool import PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.connector.shm_socket import MAX_PENDING, OWNER_TIMEOUT_S, PoolListener, fetch_pool
from pdmesh.errors import ConfigError, HandshakeRefused
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, make_pool

SHAPE = PoolShape(num_blocks=4, block_bytes=4096)


def pull(transfer_id: str, deadline_s: float = 5.0) -> Pull:
    return Pull(
        transfer_id=transfer_id,
        peer_id="p@1",
        source_block_ids=[],
        generations=[],
        target_block_ids=[],
        deadline_s=deadline_s,
    )


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_a_pull_ends_once_and_the_descriptor_tells() -> None:
    pulls = ActivePulls()
    pulls.add(pull("a"))
    with pytest.raises(ValueError, match="under way"):
        pulls.add(pull("a"))
    assert not is_readable(pulls.fileno())
    assert pulls.finish("a", "stale")
    assert not pulls.finish("a", "")
    assert is_readable(pulls.fileno())
    assert [each.reason for each in pulls.take()] == ["stale"]
    assert not is_readable(pulls.fileno())
    assert pulls.take() == []
    pulls.close()


def test_results_of_a_closed_connector_can_still_be_taken() -> None:
    pulls = ActivePulls()
    pulls.add(pull("a"))
    pulls.add(pull("b"))
    pulls.finish("a", "")
    pulls.close()
    pulls.finish("b", "cancelled")
    assert [each.transfer_id for each in pulls.take()] == ["a", "b"]
    assert pulls.fileno() == -1


def test_an_interruption_has_one_reason() -> None:
    pulls = ActivePulls()
    active = pulls.add(pull("a", deadline_s=0.0))
    assert active.interruption() == "timeout"
    active.peer_lost = True
    assert active.interruption() == "peer_lost"
    active.cancelled = True
    assert active.interruption() == "cancelled"
    assert pulls.add(pull("b")).interruption() == ""
    pulls.close()


def test_an_unknown_connector_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'rdma'.*shm, nixl, grpc"):
        make_worker_connectors(["shm", "rdma"], peer_id="a@1", secret=MeshSecret(SECRET))


def test_a_consumer_cannot_write_to_a_pool() -> None:
    pool = make_pool(SHAPE, filled=True)
    listener = PoolListener(pool, "a@1", MeshSecret(SECRET))
    shared = fetch_pool(listener.socket_name, "a@1", SHAPE, MeshSecret(SECRET))
    assert (shared.pool.blocks == pool.blocks).all()
    with pytest.raises(ValueError, match="read-only"):
        shared.pool.blocks[0, 0] = 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(shared.pool.fd, b"x")
    pool.blocks[1, 1] = 77
    assert shared.pool.blocks[1, 1] == 77
    assert shared.owner_alive
    listener.close()
    assert not shared.owner_alive
    shared.close()
    pool.close()


def test_a_stranger_that_says_nothing_keeps_no_one_out() -> None:
    pool = make_pool(SHAPE, filled=True)
    listener = PoolListener(pool, "a@1", MeshSecret(SECRET))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect("\0" + listener.socket_name)
        silent.recv(100)
        fetch_pool(listener.socket_name, "a@1", SHAPE, MeshSecret(SECRET)).close()
    listener.close()
    pool.close()


def test_many_silent_ones_delay_no_one_and_are_hung_up_on(caplog: pytest.LogCaptureFixture) -> None:
    """Once, each silent connection held up all later handshakes for half a second, with a line in the log."""
    pool = make_pool(SHAPE, filled=True)
    listener = PoolListener(pool, "a@1", MeshSecret(SECRET))
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(MAX_PENDING + 6):
            each = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            each.settimeout(10)
            each.connect("\0" + listener.socket_name)
            assert each.recv(100)
            silent.append(each)
        start_s = time.monotonic()
        shared = fetch_pool(listener.socket_name, "a@1", SHAPE, MeshSecret(SECRET))
        assert time.monotonic() - start_s < OWNER_TIMEOUT_S / 2
        # More than the owner will remember: the oldest go at once, the others when their time is up.
        assert all(each.recv(1) == b"" for each in silent[:6])
        assert time.monotonic() - start_s < OWNER_TIMEOUT_S / 2
        assert all(each.recv(1) == b"" for each in silent)
        assert shared.owner_alive
        shared.close()
    assert len(caplog.records) == 1
    listener.close()
    pool.close()


def test_an_owner_without_descriptors_serves_again_when_there_are_some() -> None:
    """Once, an error of accept() ended the thread that hands the pool out."""
    program = f"""
import os, resource, socket, sys, threading
sys.path[:0] = {sys.path!r}
from pdmesh.connector.pool import PoolShape
from pdmesh.connector.shm_socket import PoolListener, fetch_pool
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, make_pool
shape = PoolShape(num_blocks=4, block_bytes=4096)
pool = make_pool(shape, filled=True)
listener = PoolListener(pool, "a@1", MeshSecret(SECRET))
waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
waiting.settimeout(0.5)
waiting.connect("\\0" + listener.socket_name)
try:
    waiting.recv(100)
    raise SystemExit("a connection was accepted without a descriptor")
except TimeoutError:
    pass
for fd in taken:
    os.close(fd)
fetch_pool(listener.socket_name, "a@1", shape, MeshSecret(SECRET)).close()
waiting.settimeout(5)
assert waiting.recv(100)
listener.close()
pool.close()
print("served")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "served\n", ended.stderr


def test_who_does_not_know_the_secret_or_the_owner_gets_no_memory() -> None:
    pool = make_pool(SHAPE, filled=True)
    listener = PoolListener(pool, "a@1", MeshSecret(SECRET))
    for peer_id, shape, secret in (
        ("a@1", SHAPE, "the secret of another mesh"),
        ("a@2", SHAPE, SECRET),
        ("a@1", PoolShape(num_blocks=3, block_bytes=4096), SECRET),
    ):
        with pytest.raises(HandshakeRefused):
            fetch_pool(listener.socket_name, peer_id, shape, MeshSecret(secret))
    listener.close()
    with pytest.raises(HandshakeRefused, match="cannot be shared"):
        fetch_pool(listener.socket_name, "a@1", SHAPE, MeshSecret(SECRET))
    pool.close()
