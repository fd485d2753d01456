"""The thread of a native helper process that sums what has arrived while the next piece of it is read."""

import contextlib
import logging
import os
import queue
import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.active import are_as_told
from pdmesh_kernels.block_sum import Arrivals, sum_blocks

log = logging.getLogger(__name__)

PATIENCE_S = 0.01
"""How long the thread stays with a pull of which nothing comes; pieces within a host are 4 ms apart at most."""
TURN_S = 0.0005
"""How often it looks meanwhile whether others wait, where there are others: to look costs the reading thread Python's lock."""


class SumsThread:
    """Sums blocks of pulls; sleeps while nothing arrives.

    Not an executor that is told of every piece: to wake it took 30 µs each time and its start in Python a tenth of a
    millisecond of the reading thread's, in which nothing was copied.
    """

    def __init__(self) -> None:
        self._arriving: queue.SimpleQueue[ArrivingBlocks] = queue.SimpleQueue()
        self._judged_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._live: weakref.WeakSet[ArrivingBlocks] = weakref.WeakSet()
        threading.Thread(target=self._run, name="sums", daemon=True).start()

    @property
    def turn_s(self) -> float:
        """How long to stay with a pull of which nothing comes before it is asked whether others wait."""
        if self.has_waiting:
            return 0.0
        return PATIENCE_S if len(self._live) <= 1 else min(TURN_S, PATIENCE_S)

    @property
    def has_waiting(self) -> bool:
        """Whether pulls wait for their turn."""
        return not self._arriving.empty()

    def fileno(self) -> int:
        """What becomes readable when there is a verdict, until `drain`."""
        return self._judged_fd

    def drain(self) -> None:
        """Before the verdicts are looked at."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._judged_fd)

    def expect(self, arriving: "ArrivingBlocks") -> None:
        """Blocks of a pull will arrive, until `leave`."""
        self._live.add(arriving)

    def leave(self, arriving: "ArrivingBlocks") -> None:
        """None will arrive any more."""
        self._live.discard(arriving)

    def add(self, arriving: "ArrivingBlocks") -> None:
        """Begin to sum what arrives of a pull; returns at once."""
        self._arriving.put(arriving)

    def _run(self) -> None:
        while True:
            arriving = self._arriving.get()
            try:
                arriving.follow()
            except Exception:  # the thread's top
                log.exception("blocks cannot be summed")
                arriving.verdict = False
            if arriving.verdict is not None:
                os.eventfd_write(self._judged_fd, 1)


class ArrivingBlocks:
    """The blocks of one pull, which are summed as they arrive and compared with what their owner told."""

    def __init__(
        self, thread: SumsThread, blocks: NDArray[np.uint8], ids: NDArray[np.int64], wanted: list[int]
    ) -> None:
        """`wanted` is what the blocks `ids` sum to; empty: nothing is compared."""
        self.is_checked = bool(wanted)
        self.verdict: bool | None = None if self.is_checked else True
        """Whether they are right; None until all are summed. The thread's `fileno` tells when it is known."""
        self._thread = thread
        self._blocks, self._ids = blocks, ids
        self._arrivals = Arrivals(blocks, ids)
        self._is_summed_here = np.zeros(len(ids), dtype=bool)
        self._wanted = np.asarray(wanted, dtype=np.uint64)
        self._lock = threading.Lock()
        self._is_followed = False
        self._is_abandoned = False
        if self.is_checked:
            thread.expect(self)

    def sum_here(self, begin: int, end: int) -> None:
        """Sum what has just arrived in the thread that calls; several may, each other blocks."""
        if self.is_checked:
            self._arrivals.sums[begin:end] = sum_blocks(self._blocks, self._ids[begin:end])
            self._is_summed_here[begin:end] = True

    def finish(self) -> None:
        """All have arrived; returns at once where all were summed on the way."""
        if not self.is_checked:
            return
        if self._is_summed_here.all():
            self.verdict = are_as_told(self._arrivals.sums, self._wanted)
        else:
            self.note(len(self._ids))

    def is_summed_here(self, piece: slice) -> bool:
        """Whether blocks were all summed by `sum_here`."""
        return bool(self._is_summed_here[piece].all())

    def note(self, num_arrived: int) -> None:
        """Say how many have arrived; returns at once."""
        if self.is_checked:
            self._arrivals.note(num_arrived)
            with self._lock:
                is_new, self._is_followed = not self._is_followed, True
            if is_new:
                self._thread.add(self)

    def abandon(self) -> None:
        """No more will come."""
        self._is_abandoned = True
        self._thread.leave(self)
        self._arrivals.note(-1)

    def follow(self) -> None:
        """Sum what has arrived and what follows soon; in the thread for that."""
        num_summed, leave_s = 0, time.monotonic() + PATIENCE_S
        while True:
            self._arrivals.follow(self._thread.turn_s)
            if self._arrivals.is_whole:
                self.verdict = are_as_told(self._arrivals.sums, self._wanted)
                return
            if self._arrivals.num_summed > num_summed:
                num_summed, leave_s = self._arrivals.num_summed, time.monotonic() + PATIENCE_S
            # Who waits may be whole, and somebody wait for what it sums to.
            is_over = self._is_abandoned or self._thread.has_waiting or time.monotonic() >= leave_s
            with self._lock:
                # Looked at under the lock: who notes an arrival after this adds the pull again.
                if is_over and not self._arrivals.has_more:
                    self._is_followed = False
                    return
