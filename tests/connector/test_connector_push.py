"""Writes into the pools of peers, and how a pool's owner shuts out who writes: real processes, real NIXL."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdmesh.connector.base import PeerPool, Push, PushConnector
from pdmesh.connector.grave import Grave
from pdmesh.connector.options import connector_options
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, Node, make_pool, pool_node, wait_for, word_of

SHAPE = PoolShape(num_blocks=64, block_bytes=64 << 10)
# Slow enough for something to happen between two pieces of a write: a block takes 6 ms.
SLOWLY = {"throttle_bytes_s": 10 << 20}


class Writer:
    """An owner in this process."""

    def __init__(self, options: dict[str, object]) -> None:
        made = make_worker_connectors(
            ["nixl"],
            peer_id="writer@1",
            secret=MeshSecret(SECRET),
            options=connector_options(json.dumps({"nixl": options})),
        )["nixl"]
        assert isinstance(made, PushConnector)
        self.connector = made
        self.pool: KVPool = make_pool(SHAPE, filled=True)
        self.connector.register(self.pool)

    def push(self, consumer: PeerPool, sources: list[int], targets: list[int], deadline_s: float = 10.0) -> None:
        self.connector.push(
            Push(
                transfer_id="t",
                peer_id=consumer.peer_id,
                source_block_ids=sources,
                target_block_ids=targets,
                deadline_s=deadline_s,
            )
        )

    def words(self, block_ids: list[int]) -> list[list[int]]:
        return [[int(word_of(each, int(self.pool.generations[each])))] * 2 for each in block_ids]


@pytest.fixture
def node() -> Iterator[Node]:
    with pool_node(["nixl"], SHAPE, peer_id="consumer@1") as made:
        yield made


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    made = Writer(getattr(request, "param", {}))
    yield made
    made.connector.close()
    made.pool.close()


slowly = pytest.mark.parametrize("writer", [SLOWLY], indirect=True)


def test_what_is_written_is_there_when_it_is_said_to_be(node: Node, writer: Writer) -> None:
    consumer = node.pool_for("nixl")
    writer.connector.connect(consumer)
    before = node.ask("words", block_ids=list(range(64)))
    sources, targets = [5, 6, 7, 20], [40, 3, 41, 9]
    writer.push(consumer, sources, targets)
    (result,) = wait_for(writer.connector, 1, 15.0)
    after = node.ask("words", block_ids=list(range(64)))
    assert (result.reason, result.may_write, result.num_bytes) == ("", False, 4 * SHAPE.block_bytes)
    assert [after[each] for each in targets] == writer.words(sources)
    assert [after[each] for each in range(64) if each not in targets] == [
        before[each] for each in range(64) if each not in targets
    ]


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [([64], [1], "a source block lies outside"), ([1], [64], "a target block lies outside"), ([1, 2], [3, 3], "twice")],
)
def test_blocks_that_cannot_be_are_refused(
    node: Node, writer: Writer, sources: list[int], targets: list[int], words: str
) -> None:
    writer.connector.connect(node.pool_for("nixl"))
    writer.push(node.pool_for("nixl"), sources, targets)
    (result,) = wait_for(writer.connector, 1, 15.0)
    assert words in result.reason
    assert not result.may_write


@slowly
def test_a_write_that_is_cancelled_between_two_pieces_leaves_nothing_behind(node: Node, writer: Writer) -> None:
    consumer = node.pool_for("nixl")
    writer.connector.connect(consumer)
    writer.push(consumer, list(range(64)), list(range(64)))
    time.sleep(0.1)
    writer.connector.cancel("t")
    (result,) = wait_for(writer.connector, 1, 15.0)
    assert (result.reason, result.may_write) == ("cancelled", False)
    before = node.ask("words", block_ids=list(range(64)))
    time.sleep(0.2)
    assert node.ask("words", block_ids=list(range(64))) == before


@slowly
def test_a_write_to_a_peer_that_dies_ends(node: Node, writer: Writer) -> None:
    consumer = node.pool_for("nixl")
    writer.connector.connect(consumer)
    writer.push(consumer, list(range(64)), list(range(64)), deadline_s=5.0)
    time.sleep(0.1)
    node.kill()
    (result,) = wait_for(writer.connector, 1, 15.0)
    assert result.reason


def freeze(process: psutil.Process) -> None:
    """Stop a process, and see that it stands still: until its first thread has run its others go on, for long on a busy
    machine. So one that was told to stop took a write, and NIXL said rightly that it was done."""
    process.suspend()
    end_s = time.monotonic() + 10
    while {_state(stat) for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")} != {"T"}:
        assert time.monotonic() < end_s, "it does not stop"
        time.sleep(0.005)


def _state(stat: Path) -> str:
    return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0]


@pytest.mark.parametrize("writer", [{"ucx_tls": "tcp", "ucx_net_devices": "lo"}], indirect=True)
def test_what_was_handed_to_the_network_is_not_taken_for_settled(node: Node, writer: Writer) -> None:
    """Over TCP the peer's own process puts the bytes in their place: one that is frozen may do that at any later time."""
    consumer = node.pool_for("nixl")
    writer.connector.connect(consumer)
    helpers = psutil.Process(node.process.pid).children(recursive=True)
    for helper in helpers:
        freeze(helper)
    writer.push(consumer, list(range(64)), list(range(64)))
    time.sleep(0.1)
    writer.connector.cancel("t")
    (result,) = wait_for(writer.connector, 1, 15.0)
    assert result.reason
    assert result.may_write
    for helper in helpers:
        helper.resume()


@slowly
def test_who_is_shut_out_writes_nothing_more_and_may_come_back_with_new_metadata(node: Node, writer: Writer) -> None:
    consumer = node.pool_for("nixl")
    writer.connector.connect(consumer)
    writer.push(consumer, list(range(64)), list(range(64)), deadline_s=5.0)
    time.sleep(0.1)
    assert node.ask("shut_out", connector="nixl", timeout_s=10.0)
    before = node.ask("words", block_ids=list(range(64)))
    assert before != writer.words(list(range(64))), "all was written before it was shut out"
    (result,) = wait_for(writer.connector, 1, 15.0)
    assert result.reason
    assert node.ask("words", block_ids=list(range(64))) == before
    end_s = time.monotonic() + 10
    while not node.refresh():
        assert time.monotonic() < end_s, "no new metadata came"
        time.sleep(0.05)
    writer.connector.connect(node.pool_for("nixl"))
    writer.push(node.pool_for("nixl"), [1, 2], [60, 61])
    (result,) = wait_for(writer.connector, 1, 15.0)
    assert result.reason == ""
    assert node.ask("words", block_ids=[60, 61]) == writer.words([1, 2])


def test_a_frozen_writer_is_shut_out_as_well(node: Node) -> None:
    """It cannot be asked, and goes on where it stopped when it is thawed."""
    with pool_node(["nixl"], SHAPE, peer_id="frozen@1") as frozen:
        peer = node.pool_for("nixl")
        fields = {"peer_id": peer.peer_id, "num_blocks": peer.num_blocks, "block_bytes": peer.block_bytes}
        frozen.ask("connect", connector="nixl", peer=fields | {"metadata": peer.metadata.hex()})
        frozen.ask("push", connector="nixl", peer_id=peer.peer_id, num_times=200, block_ids=list(range(64)))
        frozen.process.send_signal(signal.SIGSTOP)
        assert node.ask("shut_out", connector="nixl", timeout_s=10.0)
        before = node.ask("words", block_ids=list(range(64)))
        frozen.process.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert node.ask("words", block_ids=list(range(64))) == before


def test_a_grave_is_open_while_anybody_has_the_dead_ones_memory() -> None:
    grave = Grave()
    script = "import mmap, sys; page = mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(grave.fd)],
        pass_fds=[grave.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert not grave.is_closed(0.05)
        child.kill()
        child.wait()
        assert grave.is_closed(5.0)
    with pytest.raises(PermissionError):
        mmap.mmap(grave.fd, mmap.PAGESIZE)
    grave.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(grave.fd)
