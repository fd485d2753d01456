"""Connector `grpc`: pulls through the owner's server process (rpc KVPeer.ReadBlocks), where nothing faster reaches it.

One thread per pull under way, at most a few for each peer, so that one that stands still holds up nobody else's. Each chunk of
the stream carries blocks and the generation words read after them. The owner's half has nothing to do: its server process
answers from its own map of the pool. What speaks gRPC is in `grpc_peer`, imported with the first peer: most engines never need
it, and it takes a fifth of a second of their start.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import numpy as np

from pdmesh.connector.active import ActivePull, ActivePulls, PullEnd, are_as_told, error_reason, fault_of
from pdmesh.connector.base import FixedMetadata, PeerPool, Pull, PullResult, ReadInPlace
from pdmesh.connector.options import GrpcOptions
from pdmesh.connector.pool import KVPool, PullTarget
from pdmesh.connector.shm import check_block_bytes
from pdmesh.connector.throttle import Throttle
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import copy_blocks

if TYPE_CHECKING:
    from pdmesh.connector.grpc_peer import GrpcPeer, ReadCall

CONNECT_TIMEOUT_S = 4.0


class GrpcConnector(FixedMetadata, ReadInPlace):
    """The consumer's half. `PeerPool.metadata` is the `host:port` under which the owner's server process was reached."""

    name = "grpc"

    def __init__(self, peer_id: str, secret: MeshSecret, options: GrpcOptions | None = None) -> None:
        self._secret = secret
        self._options = options or GrpcOptions()
        self._throttle = Throttle(self._options.throttle_bytes_s)
        self._pool: KVPool | None = None
        self._peers: dict[str, GrpcPeer] = {}
        self._pulls = ActivePulls()
        self._calls: dict[str, ReadCall] = {}
        self._turns: dict[str, Future[None]] = {}
        """By transfer id, until it has ended."""
        self._lock = threading.Lock()

    def register(self, pool: KVPool) -> bytes:
        self._pool = pool
        return b""

    def connect(self, peer: PeerPool) -> None:
        pool = self._registered()
        check_block_bytes(peer, pool.shape)
        from pdmesh.connector.grpc_peer import GrpcPeer

        made = GrpcPeer(peer, self._secret, self._options.num_threads)
        try:
            made.check(CONNECT_TIMEOUT_S)
        except BaseException:
            made.close()
            raise
        self.disconnect(peer.peer_id)
        self._peers[peer.peer_id] = made

    def disconnect(self, peer_id: str) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        for active in self._pulls.of_peer(peer_id):
            active.peer_lost = True
            self._end_waiting(active.pull.transfer_id, PullEnd.PEER_LOST)
        # Ends its calls.
        peer.close()

    def start(self, pull: Pull) -> None:
        active = self._pulls.add(pull)
        pool = self._registered()
        peer = self._peers.get(pull.peer_id)
        if peer is None:
            self._pulls.finish(pull.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(pull, peer.shape, (target := pool.target(pull.lane)).shape):
            self._pulls.finish(pull.transfer_id, fault)
        else:
            self._begin(active, peer, target)

    def _begin(self, active: ActivePull, peer: GrpcPeer, target: PullTarget) -> None:
        """Have a pull carried out when it is its turn."""
        transfer_id = active.pull.transfer_id
        begun = threading.Lock()
        with self._lock:
            may_wait = peer.num_pulls >= self._options.num_threads
            peer.num_pulls += 1
        try:
            turn = peer.threads.submit(self._pull, active, peer, target, begun)
        except RuntimeError as exc:
            with self._lock:
                peer.num_pulls -= 1
            # Where no thread can be started another one may come to it all the same.
            if begun.acquire(blocking=False):
                # Or it is disconnected just now, in the thread that connects its successor.
                is_known = self._peers.get(peer.peer_id) is peer
                self._pulls.finish(transfer_id, error_reason(exc) if is_known else PullEnd.PEER_LOST)
            return
        with self._lock:
            self._turns[transfer_id] = turn

        def on_ended(_: Future[None]) -> None:
            with self._lock:
                peer.num_pulls -= 1
                if self._turns.get(transfer_id) is turn:
                    del self._turns[transfer_id]

        if may_wait:
            timer = threading.Timer(active.pull.deadline_s, self._end_waiting, [transfer_id, PullEnd.TIMEOUT])
            timer.name, timer.daemon = "grpc-deadline", True
            # Where no thread can be started it ends when its turn comes.
            with contextlib.suppress(RuntimeError):
                timer.start()
            turn.add_done_callback(lambda _: timer.cancel())
        turn.add_done_callback(on_ended)

    def _end_waiting(self, transfer_id: str, reason: str) -> None:
        """End a pull whose turn has not come; nothing writes for it."""
        with self._lock:
            turn = self._turns.get(transfer_id)
        if turn is not None and turn.cancel():
            self._pulls.finish(transfer_id, reason)

    def poll(self) -> list[PullResult]:
        return self._pulls.take()

    def cancel(self, transfer_id: str) -> None:
        active = self._pulls.get(transfer_id)
        if active is None:
            return
        active.cancelled = True
        self._end_waiting(transfer_id, PullEnd.CANCELLED)
        with self._lock:
            call = self._calls.get(transfer_id)
        if call is not None:
            call.cancel()

    def fileno(self) -> int:
        return self._pulls.fileno()

    def close(self) -> None:
        for active in self._pulls.all():
            self.cancel(active.pull.transfer_id)
        peers = list(self._peers.values())
        for peer in peers:
            self.disconnect(peer.peer_id)
        for peer in peers:
            peer.threads.shutdown()
        with self._lock:
            turns = list(self._turns.values())
        # Of peers that were disconnected before.
        wait(turns)
        self._pulls.close()

    def _registered(self) -> KVPool:
        if self._pool is None:
            raise RuntimeError("register a pool before anything is pulled")
        return self._pool

    def _pull(self, active: ActivePull, peer: GrpcPeer, target: PullTarget, begun: threading.Lock) -> None:
        """Carry out one pull, unless who has `begun` has ended it; runs in a thread and ends it, whatever happens."""
        if not begun.acquire(blocking=False):
            return
        pull = active.pull
        try:
            reason = active.interruption() or self._copy(active, peer, target)
        except Exception as exc:  # the thread's top
            reason = active.interruption() or peer.reason_of(exc)
            # The call is its own exception: as long as it is known anywhere, so would be the pool, by its frames.
            exc.__traceback__ = None
        num_bytes = 0 if reason else len(pull.source_block_ids) * peer.shape.block_bytes
        self._pulls.finish(pull.transfer_id, reason, num_bytes)

    def _copy(self, active: ActivePull, peer: GrpcPeer, target: PullTarget) -> str:
        pull, done = active.pull, 0
        with self._reading(active, peer) as chunks:
            for chunk in chunks:
                active.wait_until(self._throttle.book(len(chunk.data)))
                if reason := active.interruption():
                    return reason
                num = len(chunk.generations)
                if list(chunk.generations) != active.generations[done : done + num]:
                    return PullEnd.STALE
                blocks = np.frombuffer(chunk.data, dtype=np.uint8).reshape(num, peer.shape.block_bytes)
                sums = copy_blocks(target.blocks, pull.target_block_ids[done : done + num], blocks, range(num))
                if active.checksums and not are_as_told(sums, active.checksums[done : done + num]):
                    return PullEnd.CORRUPT
                done += num
        return "" if done == len(pull.source_block_ids) else error_reason("the owner sent fewer blocks than asked")

    @contextlib.contextmanager
    def _reading(self, active: ActivePull, peer: GrpcPeer) -> Iterator[ReadCall]:
        """The call of one pull, where `cancel` finds it; ended in any case."""
        pull = active.pull
        block_bytes = peer.shape.block_bytes
        call = peer.read(
            pull.source_block_ids,
            max(0.0, active.deadline_s - time.monotonic()),
            chunk_bytes=block_bytes * self._throttle.piece_blocks(block_bytes, self._options.chunk_bytes),
        )
        with self._lock:
            self._calls[pull.transfer_id] = call
        try:
            if active.cancelled:
                call.cancel()
            yield call
        finally:
            call.cancel()
            with self._lock:
                del self._calls[pull.transfer_id]
