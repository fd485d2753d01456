"""Connector `grpc`: pulls through the owner's server process (rpc KVPeer.ReadBlocks), where nothing faster reaches it.

One thread per pull under way, at most a few; each chunk of the stream carries blocks and the generation words read after
them. The owner's half has nothing to do: its server process answers from its own map of the pool.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
import numpy as np

from pdmesh.connector.active import ActivePull, ActivePulls, PullEnd, error_reason, fault_of
from pdmesh.connector.base import PeerPool, Pull, PullResult, WorkerConnector
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.shm import check_block_bytes
from pdmesh.errors import HandshakeRefused
from pdmesh.lifecycle import GRPC_OPTIONS
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret

MAX_THREADS = 4
CONNECT_TIMEOUT_S = 4.0


class _Call(Protocol):
    """A ReadBlocks call under way, as far as it is used here."""

    def __iter__(self) -> Iterator[pb.BlockChunk]: ...

    def cancel(self) -> bool: ...


class _Peer:
    """A connection to an owner's server process."""

    def __init__(self, pool: PeerPool, secret: MeshSecret) -> None:
        self.peer_id = pool.peer_id
        self.shape = PoolShape(pool.num_blocks, pool.block_bytes)
        # A channel of its own: grpc would share a broken one between epochs of an owner.
        options = [*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(pool.metadata.decode(), options=options)
        self.stub = mesh_pb2_grpc.KVPeerStub(self.channel)
        self._metadata = secret.call_metadata()

    def read(self, block_ids: list[int], timeout_s: float) -> _Call:
        request = pb.ReadBlocksRequest(peer_id=self.peer_id, block_ids=block_ids)
        call: _Call = self.stub.ReadBlocks(request, timeout=timeout_s, metadata=self._metadata)
        return call


class GrpcConnector(WorkerConnector):
    """The consumer's half. `PeerPool.metadata` is the `host:port` under which the owner's server process was reached."""

    name = "grpc"

    def __init__(self, peer_id: str, secret: MeshSecret) -> None:
        self._secret = secret
        self._pool: KVPool | None = None
        self._peers: dict[str, _Peer] = {}
        self._pulls = ActivePulls()
        self._calls: dict[str, _Call] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="grpc-pull")

    def register(self, pool: KVPool) -> bytes:
        self._pool = pool
        return b""

    def connect(self, peer: PeerPool) -> None:
        pool = self._registered()
        check_block_bytes(peer, pool.shape)
        made = _Peer(peer, self._secret)
        try:
            # Nothing is asked for: only whether this very owner answers, and takes our secret.
            for _ in made.read([], CONNECT_TIMEOUT_S):
                pass
        except grpc.RpcError as exc:
            made.channel.close()
            raise HandshakeRefused(f"{peer.peer_id} cannot be read over gRPC: {_words(exc)}") from exc
        self.disconnect(peer.peer_id)
        self._peers[peer.peer_id] = made

    def disconnect(self, peer_id: str) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return
        for active in self._pulls.of_peer(peer_id):
            active.peer_lost = True
        # Ends its calls.
        peer.channel.close()

    def start(self, pull: Pull) -> None:
        active = self._pulls.add(pull)
        pool = self._registered()
        peer = self._peers.get(pull.peer_id)
        if peer is None:
            self._pulls.finish(pull.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(pull, peer.shape, pool.shape):
            self._pulls.finish(pull.transfer_id, fault)
        else:
            self._threads.submit(self._pull, active, peer, pool)

    def poll(self) -> list[PullResult]:
        return self._pulls.take()

    def cancel(self, transfer_id: str) -> None:
        active = self._pulls.get(transfer_id)
        if active is None:
            return
        active.cancelled = True
        with self._lock:
            call = self._calls.get(transfer_id)
        if call is not None:
            call.cancel()

    def fileno(self) -> int:
        return self._pulls.fileno()

    def close(self) -> None:
        for active in self._pulls.all():
            self.cancel(active.pull.transfer_id)
        for peer_id in list(self._peers):
            self.disconnect(peer_id)
        self._threads.shutdown()
        self._pulls.close()

    def _registered(self) -> KVPool:
        if self._pool is None:
            raise RuntimeError("register a pool before anything is pulled")
        return self._pool

    def _pull(self, active: ActivePull, peer: _Peer, pool: KVPool) -> None:
        """Carry out one pull; runs in a thread and ends it, whatever happens."""
        pull = active.pull
        try:
            reason = active.interruption() or self._copy(active, peer, pool)
        except grpc.RpcError as exc:
            reason = active.interruption() or _reason(exc)
        except Exception as exc:  # the thread's top
            reason = active.interruption() or error_reason(exc)
        num_bytes = 0 if reason else len(pull.source_block_ids) * peer.shape.block_bytes
        self._pulls.finish(pull.transfer_id, reason, num_bytes)

    def _copy(self, active: ActivePull, peer: _Peer, pool: KVPool) -> str:
        pull, done = active.pull, 0
        with self._reading(active, peer) as chunks:
            for chunk in chunks:
                if reason := active.interruption():
                    return reason
                num = len(chunk.generations)
                if list(chunk.generations) != pull.generations[done : done + num]:
                    return PullEnd.STALE
                blocks = np.frombuffer(chunk.data, dtype=np.uint8).reshape(num, peer.shape.block_bytes)
                pool.blocks[pull.target_block_ids[done : done + num]] = blocks
                done += num
        return "" if done == len(pull.source_block_ids) else error_reason("the owner sent fewer blocks than asked")

    @contextlib.contextmanager
    def _reading(self, active: ActivePull, peer: _Peer) -> Iterator[_Call]:
        """The call of one pull, where `cancel` finds it; ended in any case."""
        pull = active.pull
        call = peer.read(pull.source_block_ids, max(0.0, active.deadline_s - time.monotonic()))
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


def _reason(error: grpc.RpcError) -> str:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PullEnd.TIMEOUT
    # The owner is gone, or another one answers at its address.
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED):
        return PullEnd.PEER_LOST
    return error_reason(_words(error))


def _words(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower()} {error.details()}"
