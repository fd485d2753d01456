"""Connector `shm`: peers on one host; a pull is a memory copy out of the peer's mapped pool.

One thread copies, whole runs of neighbouring blocks at a time (numpy drops the GIL meanwhile), and gives every pull a turn
in the round. An owner that dies leaves its memory mapped and unchanged, and it gives a block its new generation before the
first new byte; so a copy whose generations match is right even then. Pulls not yet complete end with `peer_lost`.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec
import numpy as np

from pdmesh.connector.active import ActivePull, ActivePulls, PullEnd, error_reason, fault_of
from pdmesh.connector.base import FixedMetadata, PeerPool, Pull, PullResult, ReadInPlace
from pdmesh.connector.options import ShmOptions
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.shm_socket import PoolListener, SharedPool, fetch_pool
from pdmesh.connector.throttle import Throttle
from pdmesh.errors import HandshakeRefused
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)


class ShmMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer needs to find the pool."""

    socket_name: str


class ShmConnector(FixedMetadata, ReadInPlace):
    """Both ends of shared memory: lends the registered pool out, copies from the pools of peers."""

    name = "shm"

    def __init__(self, peer_id: str, secret: MeshSecret, options: ShmOptions | None = None) -> None:
        self._peer_id = peer_id
        self._secret = secret
        self._options = options or ShmOptions()
        self._throttle = Throttle(self._options.throttle_bytes_s)
        self._pool: KVPool | None = None
        self._listener: PoolListener | None = None
        self._peers: dict[str, SharedPool] = {}
        self._pulls = ActivePulls()
        self._tasks: queue.SimpleQueue[_Copy | SharedPool | _Task] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shm-copy", daemon=True)
        self._thread.start()

    def register(self, pool: KVPool) -> bytes:
        self._pool = pool
        self._listener = PoolListener(pool, self._peer_id, self._secret)
        return msgspec.msgpack.encode(ShmMetadata(socket_name=self._listener.socket_name))

    def connect(self, peer: PeerPool) -> None:
        pool = self._registered()
        try:
            metadata = msgspec.msgpack.decode(peer.metadata, type=ShmMetadata)
        except msgspec.MsgspecError as exc:
            raise HandshakeRefused(f"the shm metadata of {peer.peer_id} cannot be read: {exc}") from exc
        check_block_bytes(peer, pool.shape)
        shared = fetch_pool(
            metadata.socket_name, peer.peer_id, PoolShape(peer.num_blocks, peer.block_bytes), self._secret
        )
        self.disconnect(peer.peer_id)
        self._peers[peer.peer_id] = shared

    def disconnect(self, peer_id: str) -> None:
        shared = self._peers.pop(peer_id, None)
        if shared is None:
            return
        for active in self._pulls.of_peer(peer_id):
            active.peer_lost = True
        # The thread unmaps it, after the last copy that was queued before.
        self._tasks.put(shared)

    def start(self, pull: Pull) -> None:
        active = self._pulls.add(pull)
        pool = self._registered()
        shared = self._peers.get(pull.peer_id)
        if shared is None:
            self._pulls.finish(pull.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(pull, shared.pool.shape, pool.shape):
            self._pulls.finish(pull.transfer_id, fault)
        else:
            self._tasks.put(_Copy(active, shared, pool, self._options.copy_bytes, self._throttle))

    def poll(self) -> list[PullResult]:
        return self._pulls.take()

    def cancel(self, transfer_id: str) -> None:
        if (active := self._pulls.get(transfer_id)) is not None:
            active.cancelled = True
            self._tasks.put(_Task.LOOK)

    def fileno(self) -> int:
        return self._pulls.fileno()

    def close(self) -> None:
        for active in self._pulls.all():
            active.cancelled = True
        for peer_id in list(self._peers):
            self.disconnect(peer_id)
        self._tasks.put(_Task.STOP)
        self._thread.join()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._pulls.close()

    def _registered(self) -> KVPool:
        if self._pool is None:
            raise RuntimeError("register a pool before anything is pulled")
        return self._pool

    def _work(self) -> None:
        """Take turns among the copies; sleep when there are none. Ends when it is told to and nothing is left to copy."""
        copies: deque[_Copy] = deque()
        unmap: list[SharedPool] = []
        stopping = False
        while not (stopping and not copies):
            try:
                task = self._tasks.get(timeout=_patience_s(copies))
            except queue.Empty:
                pass
            else:
                if isinstance(task, _Copy):
                    copies.append(task)
                elif isinstance(task, SharedPool):
                    unmap.append(task)
                elif task is _Task.STOP:
                    stopping = True
            for _ in range(len(copies)):
                copy = copies.popleft()
                if (reason := self._advance(copy)) is None:
                    copies.append(copy)
                else:
                    # No view of a pool may outlive this turn, or it could not be unmapped.
                    num_bytes = 0 if reason else copy.num_bytes
                    transfer_id = copy.active.pull.transfer_id
                    del copy
                    self._pulls.finish(transfer_id, reason, num_bytes)
            for shared in [each for each in unmap if all(copy.source is not each for copy in copies)]:
                unmap.remove(shared)
                shared.close()

    def _advance(self, copy: "_Copy") -> str | None:
        """Do one turn; the reason it ended with (empty: it succeeded), or None when it goes on."""
        try:
            return copy.step()
        except Exception as exc:  # the thread's top: whatever happens, the pull ends and the others go on
            log.exception("pull %s failed", copy.active.pull.transfer_id)
            return error_reason(exc)


class _Task(Enum):
    """Orders to the thread."""

    LOOK = "look"
    """A copy that waits may have been cancelled."""
    STOP = "stop"


def _patience_s(copies: "deque[_Copy]") -> float | None:
    """How long no copy has anything to do; None while there is none."""
    if not copies:
        return None
    return max(0.0, min(copy.due_s for copy in copies) - time.monotonic())


def check_block_bytes(peer: PeerPool, own: PoolShape) -> None:
    """Raise HandshakeRefused when a peer's blocks cannot become ours."""
    if peer.block_bytes != own.block_bytes:
        raise HandshakeRefused(
            f"a block of {peer.peer_id} has {peer.block_bytes} bytes, one of this pool {own.block_bytes}"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring blocks on both sides: one memory copy."""

    source: int
    target: int
    num: int


class _Copy:
    """One pull being carried out by the thread."""

    def __init__(
        self, active: ActivePull, source: SharedPool, target: KVPool, copy_bytes: int, throttle: Throttle
    ) -> None:
        self.active = active
        self.source = source
        self.due_s = 0.0
        """When there is something to do for it; until then only its end."""
        self._target = target
        self._copy_bytes = copy_bytes
        self._throttle = throttle
        self._runs: Iterator[_Run] | None = None
        self._booked: _Run | None = None
        """What may be copied at `due_s`."""
        self.num_bytes = len(active.pull.source_block_ids) * source.pool.shape.block_bytes

    def step(self) -> str | None:
        """Copy one run, or compare the generations when all are copied."""
        if reason := self.active.interruption():
            return reason
        pull = self.active.pull
        if self._runs is None:
            # First, or the frozen memory of an owner that has restarted would pass for overwritten blocks of a live one.
            if not self.source.owner_alive:
                return PullEnd.PEER_LOST
            if not self._generations_match():
                return PullEnd.STALE
            most = self._throttle.piece_blocks(self.source.pool.shape.block_bytes, self._copy_bytes)
            self._runs = _runs(pull.source_block_ids, pull.target_block_ids, most)
        if self._booked is None and (run := next(self._runs, None)) is not None:
            self._book(run)
        run = self._booked
        if run is None:
            # The words are read after the data: x86 keeps loads in order, elsewhere the GIL's mutex, released and taken
            # again around each copy, is the fence.
            return "" if self._generations_match() else PullEnd.STALE
        if time.monotonic() < self.due_s:
            return None
        if not self.source.owner_alive:
            return PullEnd.PEER_LOST
        self._booked = None
        np.copyto(
            self._target.blocks[run.target : run.target + run.num],
            self.source.pool.blocks[run.source : run.source + run.num],
        )
        return None

    def _book(self, run: "_Run") -> None:
        self._booked = run
        due_s = self._throttle.book(run.num * self.source.pool.shape.block_bytes)
        self.due_s = min(due_s, self.active.deadline_s)

    def _generations_match(self) -> bool:
        pull = self.active.pull
        return self.source.pool.generations_of(pull.source_block_ids) == pull.generations


def _runs(source_ids: list[int], target_ids: list[int], most: int) -> Iterator[_Run]:
    """Group pairs of blocks that are neighbours on both sides, at most `most` to a run."""
    begin = 0
    for end in range(1, len(source_ids) + 1):
        goes_on = (
            end < len(source_ids)
            and end - begin < most
            and source_ids[end] == source_ids[end - 1] + 1
            and target_ids[end] == target_ids[end - 1] + 1
        )
        if not goes_on:
            yield _Run(source_ids[begin], target_ids[begin], end - begin)
            begin = end
