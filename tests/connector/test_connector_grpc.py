"""Pulls over gRPC from an owner that stands still: they cost nobody else anything, and end when they should."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from pdmesh.connector.base import PeerPool, Pull
from pdmesh.connector.grpc import GrpcConnector
from pdmesh.connector.options import GrpcOptions
from pdmesh.connector.pool import PoolShape
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from support.no_threads import REFUSAL, refuse_threads
from support.pool_node import SECRET, make_pool, wait_for

SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
NUM_THREADS = 2


class Owner(mesh_pb2_grpc.KVPeerServicer):
    """Sends what it is asked for, once it may."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.may_send = threading.Event()
        self.asked = threading.Semaphore(0)
        self.address = ""

    def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> Iterator[pb.BlockChunk]:
        if request.block_ids:
            self.asked.release()
            while not self.may_send.wait(0.05):
                if not context.is_active():
                    return
            num = len(request.block_ids)
            yield pb.BlockChunk(data=bytes(num * SHAPE.block_bytes), generations=[0] * num)

    @property
    def pool(self) -> PeerPool:
        return PeerPool(
            peer_id=self.peer_id,
            metadata=self.address.encode(),
            num_blocks=SHAPE.num_blocks,
            block_bytes=SHAPE.block_bytes,
        )


@contextmanager
def serving(peer_id: str) -> Iterator[Owner]:
    owner = Owner(peer_id)
    server = grpc.server(futures.ThreadPoolExecutor(16))
    mesh_pb2_grpc.add_KVPeerServicer_to_server(owner, server)
    owner.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield owner
    finally:
        owner.may_send.set()
        server.stop(None).wait(5)


def pull(owner: Owner, transfer_id: str, target: int, deadline_s: float = 60.0) -> Pull:
    return Pull(
        transfer_id=transfer_id,
        peer_id=owner.peer_id,
        source_block_ids=[0],
        generations=[0],
        target_block_ids=[target],
        deadline_s=deadline_s,
    )


@pytest.fixture
def connector() -> Iterator[GrpcConnector]:
    made = GrpcConnector("consumer@1", MeshSecret(SECRET), GrpcOptions(num_threads=NUM_THREADS))
    pool = make_pool(SHAPE, filled=False)
    made.register(pool)
    yield made
    made.close()
    pool.close()


def occupy(connector: GrpcConnector, frozen: Owner) -> None:
    """Have pulls from a frozen owner hold all threads that there are for it."""
    connector.connect(frozen.pool)
    for number in range(NUM_THREADS):
        connector.start(pull(frozen, f"held-{number}", number))
    for _ in range(NUM_THREADS):
        assert frozen.asked.acquire(timeout=5)


def outcomes(connector: GrpcConnector, num: int) -> dict[str, str]:
    return {each.transfer_id: each.reason for each in wait_for(connector, num, 5.0)}


def test_a_frozen_owner_holds_up_nobody_elses_pulls(connector: GrpcConnector) -> None:
    """Its pulls held the few threads that there were for all: a living owner's timed out without having been tried."""
    with serving("frozen@1") as frozen, serving("living@1") as living:
        occupy(connector, frozen)
        connector.connect(living.pool)
        living.may_send.set()
        connector.start(pull(living, "fifth", 5))
        assert outcomes(connector, 1) == {"fifth": ""}


def test_a_pull_that_was_refused_for_want_of_a_thread_is_not_carried_out_later(
    connector: GrpcConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in the line of the threads that there were: one of them wrote to its blocks, which were another request's."""

    with serving("owner@1") as owner:
        connector.connect(owner.pool)
        connector.start(pull(owner, "first", 0))
        assert owner.asked.acquire(timeout=5)
        with monkeypatch.context() as patched:
            refuse_threads(patched)
            connector.start(pull(owner, "second", 1))
            assert outcomes(connector, 1) == {"second": f"error:{REFUSAL}"}
        owner.may_send.set()
        assert outcomes(connector, 1) == {"first": ""}
        # Behind what is in line.
        connector.start(pull(owner, "third", 2))
        assert outcomes(connector, 1) == {"third": ""}
        assert owner.asked.acquire(timeout=5)
        assert not owner.asked.acquire(blocking=False)


def test_a_pull_that_waits_for_its_turn_ends_when_it_is_told_to_or_at_its_deadline(connector: GrpcConnector) -> None:
    """Its blocks stayed in quarantine until a thread was free, though nothing wrote to them."""
    with serving("frozen@1") as frozen:
        occupy(connector, frozen)
        connector.start(pull(frozen, "cancelled", 4))
        connector.cancel("cancelled")
        assert outcomes(connector, 1) == {"cancelled": "cancelled"}
        connector.start(pull(frozen, "late", 5, deadline_s=0.2))
        assert outcomes(connector, 1) == {"late": "timeout"}
        connector.start(pull(frozen, "waits", 6))
        connector.disconnect(frozen.peer_id)
        ended = outcomes(connector, NUM_THREADS + 1)
        assert ended == dict.fromkeys(("waits", *(f"held-{number}" for number in range(NUM_THREADS))), "peer_lost")
        assert not connector._turns


def test_a_pull_whose_turn_comes_is_carried_out(connector: GrpcConnector) -> None:
    with serving("frozen@1") as frozen:
        occupy(connector, frozen)
        connector.start(pull(frozen, "waits", 4))
        frozen.may_send.set()
        assert set(outcomes(connector, NUM_THREADS + 1).values()) == {""}
