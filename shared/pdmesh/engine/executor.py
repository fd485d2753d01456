"""Runs plans one after the other on a thread of its own, so that the core plans, receives and sends meanwhile.

At most two plans are here: one that runs, and one that follows it at once. The second is submitted while the first computes,
before its tokens are known: that is asynchronous scheduling. Until it begins it can be had back, for who came meanwhile.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pdmesh.engine.plan import StepPlan, StepResult

# A step that hangs longer at the end is left to end with the process.
CLOSE_GRACE_S = 30.0


class Worker(Protocol):
    """What executes a plan: `runner.Runner`."""

    def run(self, plan: StepPlan, on_begin: Callable[[], None] | None = None) -> StepResult:
        """Execute a plan; `on_begin` is called when its input is ready and the model begins."""


class Executor:
    """Plans in, results out in the same order; a step that raised comes out as its exception."""

    def __init__(self, worker: Worker, *, is_async: bool, on_start: Callable[[], None] | None = None) -> None:
        """`on_start` is called once on the thread of its own, before it runs anything."""
        self._worker = worker
        self._on_start = on_start
        self._is_async = is_async
        self._plans: queue.SimpleQueue[list[StepPlan | None]] = queue.SimpleQueue()
        """Each in a list, out of which either thread pops it: who does has it."""
        self._last: list[StepPlan | None] = []
        """The one that was submitted last."""
        self._done: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        self._untold: StepResult | Exception | None = None
        self._untold_times = (0.0, 0.0)
        """Of the step that ended last; the worker's thread alone looks at these."""
        self._begun_s = 0.0
        self.begun_s = self.ended_s = 0.0
        """When the model began with the last step of which `take_results` tells, and when that ended; on the monotonic clock."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._num_submitted = 0
        self.num_ended = 0
        """Steps whose results were taken."""
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    @property
    def num_submitted(self) -> int:
        return self._num_submitted

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return self._num_submitted == self.num_ended

    @property
    def can_take(self) -> bool:
        """Whether a plan submitted now would be the next to run."""
        if self.is_idle:
            return True
        # A step that ended may have failed, and must be judged before anything is planned on it.
        return self._is_async and self._num_submitted == self.num_ended + 1 and self._done.empty()

    def fileno(self) -> int:
        """Readable when `can_take` or `take_results` may have changed."""
        return self._wake_fd

    def submit(self, plan: StepPlan) -> None:
        self._num_submitted += 1
        self._last = [plan]
        self._plans.put(self._last)

    def recall(self) -> bool:
        """Take the plan that was submitted last back, to be submitted again; False when it has begun."""
        try:
            self._last.pop()
        except IndexError:
            return False
        self._num_submitted -= 1
        return True

    def take_results(self) -> list[StepResult | Exception]:
        """Return what ended since the last call, in order; never blocks."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        results = []
        while not self._done.empty():
            results.append(self._done.get())
        self.num_ended += len(results)
        return results

    def close(self) -> None:
        """End the thread behind the steps that are here."""
        self._plans.put([None])
        self._thread.join(CLOSE_GRACE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _work(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while (plan := self._next_plan()) is not None:
            try:
                outcome: StepResult | Exception = self._worker.run(plan, self._begin)
            except Exception as exc:  # a step that failed is the core's to judge
                outcome = exc
            except BaseException as exc:  # whatever a step raises, this thread must not end with it
                outcome = RuntimeError(f"{type(exc).__name__}: {exc}")
            # One that failed before it began has not told of the step before it.
            self._tell()
            self._untold, self._untold_times = outcome, (self._begun_s, time.monotonic())
        self._tell()

    def _next_plan(self) -> StepPlan | None:
        """Return the plan that follows. When one is here it begins first: the core, told now, would contend for Python's lock
        with the thread that the device waits for."""
        while True:
            try:
                place = self._plans.get_nowait()
            except queue.Empty:
                self._tell()
                place = self._plans.get()
            with contextlib.suppress(IndexError):
                return place.pop()

    def _begin(self) -> None:
        self._begun_s = time.monotonic()
        self._tell()

    def _tell(self) -> None:
        if self._untold is not None:
            self.begun_s, self.ended_s = self._untold_times
            self._done.put(self._untold)
            self._untold = None
            os.eventfd_write(self._wake_fd, 1)
