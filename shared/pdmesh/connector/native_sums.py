"""The thread of a native helper process that sums what has arrived while the next piece of it is read."""

import logging
import queue
import threading
import time

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.active import are_as_told
from pdmesh_kernels.block_sum import Arrivals

log = logging.getLogger(__name__)

PATIENCE_S = 0.005
"""How long the thread stays with a pull of which nothing comes; pieces within a host are 2 ms apart."""


class SumsThread:
    """Sums blocks of pulls; sleeps while nothing arrives.

    Not an executor that is told of every piece: to wake it took 30 µs each time and its start in Python a tenth of a
    millisecond of the reading thread's, in which nothing was copied.
    """

    def __init__(self) -> None:
        self._arriving: queue.SimpleQueue[ArrivingBlocks] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="sums", daemon=True).start()

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
                arriving.verdict.put(False)


class ArrivingBlocks:
    """The blocks of one pull, which are summed as they arrive and compared with what their owner told."""

    def __init__(
        self, thread: SumsThread, blocks: NDArray[np.uint8], ids: NDArray[np.int64], wanted: list[int]
    ) -> None:
        """`wanted` is what the blocks `ids` sum to; empty: nothing is compared."""
        self.is_checked = bool(wanted)
        self.verdict: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Gets one."""
        self._thread = thread
        self._arrivals = Arrivals(blocks, ids)
        self._wanted = np.asarray(wanted, dtype=np.uint64)
        self._lock = threading.Lock()
        self._is_followed = False

    def note(self, num_arrived: int) -> None:
        """Say how many have arrived; returns at once."""
        if self.is_checked:
            self._arrivals.note(num_arrived)
            with self._lock:
                is_new, self._is_followed = not self._is_followed, True
            if is_new:
                self._thread.add(self)

    def are_right(self, deadline_s: float) -> bool:
        """Wait for what is being summed after all have arrived. Raises queue.Empty at the deadline."""
        return not self.is_checked or self.verdict.get(timeout=max(0.0, deadline_s - time.monotonic()))

    def abandon(self) -> None:
        """No more will come."""
        self._arrivals.note(-1)

    def follow(self) -> None:
        """Sum what has arrived and what follows soon; in the thread for that."""
        while True:
            self._arrivals.follow(PATIENCE_S)
            if self._arrivals.is_whole:
                self.verdict.put(are_as_told(self._arrivals.sums, self._wanted))
                return
            with self._lock:
                # Looked at under the lock: who notes an arrival after this adds the pull again.
                if not self._arrivals.has_more:
                    self._is_followed = False
                    return
