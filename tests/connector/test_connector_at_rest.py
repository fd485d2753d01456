"""Pulls that the core's own loop carries out over shm, because it would only wait for them."""

import threading
import time
from collections.abc import Iterator

import pytest

from pdmesh.connector import shm
from pdmesh.connector.base import PeerPool, Pull, PullResult
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.shm import ShmConnector
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, make_pool, wait_for

SHAPE = PoolShape(num_blocks=64, block_bytes=64 << 10)
DEADLINE_S = 10.0
ROUNDS = 200


class Pair:
    """An owner and a consumer in one process."""

    def __init__(self) -> None:
        self.source: KVPool = make_pool(SHAPE, filled=True)
        self.owner = ShmConnector("owner@1", MeshSecret(SECRET))
        self.target: KVPool = make_pool(SHAPE, filled=False)
        self.consumer = ShmConnector("consumer@1", MeshSecret(SECRET))
        self.consumer.register(self.target)
        self.peer = PeerPool(
            peer_id="owner@1",
            metadata=self.owner.register(self.source),
            num_blocks=SHAPE.num_blocks,
            block_bytes=SHAPE.block_bytes,
        )
        self.consumer.connect(self.peer)
        self._num = 0

    def start(self, num_blocks: int = SHAPE.num_blocks) -> None:
        self._num += 1
        blocks = list(range(num_blocks))
        self.consumer.start_at_rest(
            Pull(
                transfer_id=f"t{self._num}",
                peer_id="owner@1",
                source_block_ids=blocks,
                generations=self.source.generations_of(blocks),
                target_block_ids=blocks,
                deadline_s=DEADLINE_S,
            )
        )

    def result(self) -> PullResult:
        [result] = wait_for(self.consumer, 1, DEADLINE_S)
        return result

    def close(self) -> None:
        for connector in (self.consumer, self.owner):
            connector.close()
        for pool in (self.target, self.source):
            pool.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_short_pull_has_ended_when_it_was_begun(pair: Pair) -> None:
    pair.start()
    [result] = pair.consumer.poll()
    assert (result.reason, result.num_bytes) == ("", SHAPE.num_blocks * SHAPE.block_bytes)
    assert (pair.target.blocks == pair.source.blocks).all()


def test_a_long_pull_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "MAX_AT_REST_BYTES", 2 * SHAPE.block_bytes)
    seen: list[threading.Thread] = []
    copy = shm.copy_blocks
    monkeypatch.setattr(shm, "copy_blocks", lambda *args: (seen.append(threading.current_thread()), copy(*args))[1])
    pair.start(2)
    assert pair.result().reason == ""
    assert set(seen) == {threading.current_thread()}
    seen.clear()
    pair.start(3)
    assert pair.result().reason == ""
    assert {each.name for each in seen} == {"shm-copy"}


def test_a_peer_that_is_connected_anew_meanwhile_is_not_unmapped_under_a_pull(pair: Pair) -> None:
    """Without the lock the process would die of the first of them."""
    is_over = False

    def connect_again() -> None:
        while not is_over:
            pair.consumer.connect(pair.peer)

    thread = threading.Thread(target=connect_again)
    thread.start()
    try:
        reasons = set()
        for _ in range(ROUNDS):
            pair.start()
            reasons.add(pair.result().reason)
            time.sleep(0)
    finally:
        is_over = True
        thread.join()
    assert reasons <= {"", "peer_lost"}
    assert "" in reasons
    pair.start()
    assert pair.result().reason == ""
