"""Connector `shm`: peers on one host; a pull is a memory copy out of the peer's mapped pool.

One thread copies and sums in one pass, some blocks at a time (without Python's lock), and gives every pull a turn in the
round. A loop that would only wait for a short one makes it itself: between two threads Linux may put milliseconds.

An owner that dies leaves its memory mapped and unchanged, and it gives a block its new generation before the first new byte;
so a copy whose generations match is right even then. Pulls not yet complete end with `peer_lost`.
"""

import contextlib
import logging
import queue
import select
import threading
import time
from collections import deque
from enum import Enum

import msgspec
import numpy as np

from pdmesh.connector.active import ActivePull, ActivePulls, PullEnd, are_as_told, error_reason, fault_of
from pdmesh.connector.base import FixedMetadata, PeerPool, Pull, PullResult, ReadInPlace
from pdmesh.connector.notices import NoticeConnector, OfferNotice
from pdmesh.connector.options import ShmOptions
from pdmesh.connector.pool import KVPool, PoolShape, PullTarget
from pdmesh.connector.shm_socket import PoolListener, SharedPool, fetch_pool
from pdmesh.connector.throttle import Throttle
from pdmesh.errors import HandshakeRefused
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import copy_blocks

log = logging.getLogger(__name__)


MAX_AT_REST_BYTES = 16 << 20
"""Of a pull that the loop carries out itself: it stands still for a millisecond or two."""


class ShmMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer needs to find the pool."""

    socket_name: str


class ShmConnector(FixedMetadata, ReadInPlace, NoticeConnector):
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
        self._readable = select.epoll()
        """Of the pulls' ends and of the peers that may tell something."""
        self._readable.register(self._pulls.fileno(), select.EPOLLIN)
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
        self._readable.register(shared.fileno(), select.EPOLLIN)
        self._peers[peer.peer_id] = shared

    def disconnect(self, peer_id: str) -> None:
        shared = self._peers.pop(peer_id, None)
        if shared is None:
            return
        self._hear_no_more(shared)
        for active in self._pulls.of_peer(peer_id):
            active.peer_lost = True
        # The thread unmaps it, after the last copy that was queued before.
        self._tasks.put(shared)

    def start(self, pull: Pull) -> None:
        if (copy := self._begun(pull)) is not None:
            self._tasks.put(copy)

    def start_at_rest(self, pull: Pull) -> None:
        copy = self._begun(pull)
        if copy is None:
            return
        if copy.num_bytes > MAX_AT_REST_BYTES:
            self._tasks.put(copy)
            return
        source = copy.source
        # Or the thread might unmap it meanwhile: peers are connected anew beside the core's loop.
        with source.in_use:
            while not (is_over := self._has_ended(copy)) and copy.due_s <= time.monotonic():
                pass
            if not is_over:
                self._tasks.put(copy)
            # No view of a pool may outlive its use here.
            del copy

    def _begun(self, pull: Pull) -> "_Copy | None":
        """Take a pull in; None where it has ended already."""
        active = self._pulls.add(pull)
        pool = self._registered()
        shared = self._peers.get(pull.peer_id)
        if shared is None:
            self._pulls.finish(pull.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(pull, shared.pool.shape, (target := pool.target(pull.lane)).shape):
            self._pulls.finish(pull.transfer_id, fault)
        else:
            return _Copy(active, shared, target, self._options.copy_bytes, self._throttle)
        return None

    def poll(self) -> list[PullResult]:
        return self._pulls.take()

    def cancel(self, transfer_id: str) -> None:
        if (active := self._pulls.get(transfer_id)) is not None:
            active.cancelled = True
            self._tasks.put(_Task.LOOK)

    def fileno(self) -> int:
        return self._readable.fileno()

    def retract(self, offer_id: str) -> None:
        if self._listener is not None:
            self._listener.forget(offer_id)

    def await_offer(self, peer_id: str, offer_id: str) -> None:
        if (shared := self._peers.get(peer_id)) is not None:
            shared.await_offer(offer_id)

    def take_notices(self) -> list[tuple[str, OfferNotice]]:
        readable = {descriptor for descriptor, _ in self._readable.poll(0)}
        told = []
        for peer_id, shared in list(self._peers.items()):
            if shared.fileno() not in readable:
                continue
            try:
                while (notice := shared.take_notice()) is not None:
                    told.append((peer_id, notice))
            except EOFError as exc:
                # Its pulls find out by themselves, and the server when it asks who is there.
                log.debug("%s tells nothing any more: %s", peer_id, exc)
                self._hear_no_more(shared)
        return told

    def is_awaited(self, offer_id: str) -> bool:
        return self._listener is not None and self._listener.is_awaited(offer_id)

    def tell(self, notice: OfferNotice) -> None:
        if self._listener is not None:
            self._listener.tell(notice)

    def _hear_no_more(self, shared: SharedPool) -> None:
        # A ValueError where the thread has closed it meanwhile: peers are connected anew beside the core's loop.
        with contextlib.suppress(OSError, ValueError):
            self._readable.unregister(shared.fileno())

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
        self._readable.close()
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
                if not self._has_ended(copy):
                    copies.append(copy)
                # No view of a pool may outlive this turn, or it could not be unmapped.
                del copy
            for shared in [each for each in unmap if all(copy.source is not each for copy in copies)]:
                unmap.remove(shared)
                with shared.in_use:
                    shared.close()

    def _has_ended(self, copy: "_Copy") -> bool:
        """Do one turn; whether it was the last."""
        pull = copy.active.pull
        try:
            reason = copy.step()
        except Exception as exc:  # whatever happens, the pull ends and the others go on
            log.exception("pull %s failed", pull.transfer_id)
            reason = error_reason(exc)
        if reason is None:
            return False
        self._pulls.finish(pull.transfer_id, reason, 0 if reason else copy.num_bytes)
        copy.source.note(pull.source_block_ids)
        return True


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
    """Raise HandshakeRefused when a peer's blocks cannot become ours as they are, nor are meant to."""
    if not peer.layouts and peer.block_bytes != own.block_bytes:
        raise HandshakeRefused(
            f"a block of {peer.peer_id} has {peer.block_bytes} bytes, one of this pool {own.block_bytes}"
        )


class _Copy:
    """One pull being carried out by the thread."""

    def __init__(
        self, active: ActivePull, source: SharedPool, target: PullTarget, copy_bytes: int, throttle: Throttle
    ) -> None:
        pull, block_bytes = active.pull, source.pool.shape.block_bytes
        self.active = active
        self.source = source
        self.due_s = 0.0
        """When there is something to do for it; until then only its end."""
        self.num_bytes = len(pull.source_block_ids) * block_bytes
        self._target = target
        self._throttle = throttle
        self._most = throttle.piece_blocks(block_bytes, copy_bytes)
        self._source_ids = np.asarray(pull.source_block_ids, dtype=np.int64)
        self._target_ids = np.asarray(pull.target_block_ids, dtype=np.int64)
        self._wanted = np.asarray(active.checksums, dtype=np.uint64)
        self._num_done = 0
        self._has_begun = False
        self._is_booked = False
        """Whether the next piece may be copied at `due_s`."""

    def step(self) -> str | None:
        """Copy one piece, or compare the generations when all are copied."""
        if reason := self.active.interruption():
            return reason
        if not self._has_begun:
            # First, or the frozen memory of an owner that has restarted would pass for overwritten blocks of a live one.
            if not self.source.owner_alive:
                return PullEnd.PEER_LOST
            if not self._generations_match():
                return PullEnd.STALE
            self._has_begun = True
        piece = slice(self._num_done, self._num_done + self._most)
        num_blocks = len(self._source_ids[piece])
        if not num_blocks:
            # The words are read after the data: x86 keeps loads in order, elsewhere the GIL's mutex, released and taken
            # again around each copy, is the fence.
            return "" if self._generations_match() else PullEnd.STALE
        if not self._is_booked:
            due_s = self._throttle.book(num_blocks * self.source.pool.shape.block_bytes)
            self._is_booked, self.due_s = True, min(due_s, self.active.deadline_s)
        if time.monotonic() < self.due_s:
            return None
        if not self.source.owner_alive:
            return PullEnd.PEER_LOST
        self._is_booked, self._num_done = False, piece.stop
        return None if self._copy(piece) else PullEnd.CORRUPT if self._generations_match() else PullEnd.STALE

    def _copy(self, piece: slice) -> bool:
        """Copy blocks; whether they are those that the owner summed."""
        sums = copy_blocks(
            self._target.blocks, self._target_ids[piece], self.source.pool.blocks, self._source_ids[piece]
        )
        return not self._wanted.size or are_as_told(sums, self._wanted[piece])

    def _generations_match(self) -> bool:
        pull = self.active.pull
        return self.source.pool.generations_of(pull.source_block_ids) == self.active.generations
