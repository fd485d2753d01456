"""Pulls that are under way in one connector, and the single door through which each of them ends.

Shared by the connectors: the process's loop adds, polls and cancels; the connector's own thread does the work and reports.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.base import Pull, PullResult, Push
from pdmesh.connector.pool import PoolShape

FENCE_GRACE_S = 1.0
# A piece of a write that has left may have a slow link before it, and to end it by force ends all pulls as well.
WRITE_GRACE_S = 5.0
ERROR_PREFIX = "error:"


class PullEnd(StrEnum):
    """Reasons of a pull that did not succeed, besides `error:<text>`."""

    STALE = "stale"
    CORRUPT = "corrupt"
    """The generations are right and the bytes are not."""
    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"
    CANCELLED = "cancelled"


def error_reason(text: object) -> str:
    """Reason of a pull that failed for none of the named causes."""
    return f"{ERROR_PREFIX}{text}"


def may_be_connectors(reason: str) -> bool:
    """Whether a pull's failure may be that of the way it went, so that it may succeed over another connector."""
    return reason in (PullEnd.PEER_LOST, PullEnd.CORRUPT) or reason.startswith(ERROR_PREFIX)


UNKNOWN = 0
"""In place of a block's sum: its owner does not tell what it sums to."""


def are_as_told(sums: "NDArray[np.uint64]", told: "Sequence[int] | NDArray[np.uint64]") -> bool:
    """Whether blocks sum to what their owner has told, as far as it has told anything."""
    wanted = np.asarray(told, dtype=np.uint64)
    return bool(((sums == wanted) | (wanted == UNKNOWN)).all())


class ActivePull:
    """One pull, or write of a push, under way. Any thread may set the flags; the connector's looks at them between copies."""

    def __init__(self, pull: Pull | Push) -> None:
        self.pull = pull
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + pull.deadline_s
        self._grace_s = WRITE_GRACE_S if isinstance(pull, Push) else FENCE_GRACE_S
        self.fence_s = self.deadline_s + self._grace_s
        """When a connector whose reads cannot be taken back must make sure by force that they have ended."""
        self._cancelled = False
        self._peer_lost = False
        self._interrupted = threading.Event()

    @property
    def generations(self) -> list[int]:
        """What the source blocks of a pull must have."""
        return self.pull.generations if isinstance(self.pull, Pull) else []

    @property
    def checksums(self) -> list[int]:
        """What the source blocks of a pull must sum to; empty: not checked."""
        return self.pull.checksums if isinstance(self.pull, Pull) else []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @cancelled.setter
    def cancelled(self, value: bool) -> None:
        self._cancelled = value
        self._interrupted.set()

    @property
    def peer_lost(self) -> bool:
        return self._peer_lost

    @peer_lost.setter
    def peer_lost(self, value: bool) -> None:
        self._peer_lost = value
        self._interrupted.set()

    def wait_until(self, due_s: float) -> None:
        """Sleep until then, or until it is over or should stop."""
        pause_s = min(due_s, self.deadline_s) - time.monotonic()
        if pause_s > 0:
            self._interrupted.wait(pause_s)

    def fence_soon(self) -> None:
        """It should have ended now."""
        self.fence_s = min(self.fence_s, time.monotonic() + self._grace_s)

    def interruption(self) -> str:
        """Why it should stop now; empty when it may go on."""
        if self.cancelled:
            return PullEnd.CANCELLED
        if self.peer_lost:
            return PullEnd.PEER_LOST
        return PullEnd.TIMEOUT if time.monotonic() >= self.deadline_s else ""


class ActivePulls:
    """The pulls of one connector. Thread-safe. Each pull added ends in exactly one PullResult."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[str, ActivePull] = {}
        self._results: list[PullResult] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __len__(self) -> int:
        return len(self._active)

    def add(self, pull: Pull | Push) -> ActivePull:
        """Take a pull in. Raises ValueError when its transfer id is under way already."""
        active = ActivePull(pull)
        with self._lock:
            if pull.transfer_id in self._active:
                raise ValueError(f"transfer {pull.transfer_id} is under way")
            self._active[pull.transfer_id] = active
        return active

    def get(self, transfer_id: str) -> ActivePull | None:
        """Find a pull that has not ended."""
        return self._active.get(transfer_id)

    def of_peer(self, peer_id: str) -> list[ActivePull]:
        """All that pull from one peer."""
        with self._lock:
            return [active for active in self._active.values() if active.pull.peer_id == peer_id]

    def all(self) -> list[ActivePull]:
        """All that have not ended."""
        with self._lock:
            return list(self._active.values())

    def finish(self, transfer_id: str, reason: str, num_bytes: int = 0, *, may_write: bool = False) -> bool:
        """End a pull; False when it had ended before. Call only when nothing writes to its target blocks any more (a read
        that was cancelled, or whose peer is lost, goes on until its transport says otherwise), or of a push with `may_write`."""
        with self._lock:
            active = self._active.pop(transfer_id, None)
            if active is None:
                return False
            self._results.append(
                PullResult(
                    transfer_id=transfer_id,
                    reason=reason,
                    num_bytes=num_bytes,
                    duration_s=time.monotonic() - active.started_s,
                    may_write=may_write,
                )
            )
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        return True

    def take(self) -> list[PullResult]:
        """Return what ended since the last call; `fileno` falls silent."""
        with self._lock:
            results, self._results = self._results, []
            if self._wake_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
        return results

    def fileno(self) -> int:
        """Readable while `take` has something to return."""
        return self._wake_fd

    def close(self) -> None:
        """Close the descriptor; results that were not taken can still be."""
        with self._lock:
            fd, self._wake_fd = self._wake_fd, -1
        if fd >= 0:
            os.close(fd)


def fault_of(pull: Pull | Push, source: PoolShape, target: PoolShape) -> str:
    """Say what is wrong with the block lists of a pull or push; empty when nothing is."""
    num = len(pull.source_block_ids)
    if len(pull.target_block_ids) != num:
        return error_reason("block lists differ in length")
    if isinstance(pull, Pull) and (len(pull.generations) != num or len(pull.checksums) not in (0, num)):
        return error_reason("block lists differ in length")
    if source.block_bytes != target.block_bytes:
        return error_reason(f"blocks of {source.block_bytes} bytes do not fit in those of {target.block_bytes}")
    for ids, shape, side in ((pull.source_block_ids, source, "source"), (pull.target_block_ids, target, "target")):
        if ids and not 0 <= min(ids) <= max(ids) < shape.num_blocks:
            return error_reason(f"a {side} block lies outside the pool")
    if len(set(pull.target_block_ids)) != num:
        return error_reason("a target block is named twice")
    return ""
