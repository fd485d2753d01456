"""Runs plans one after the other on a thread of its own, so that the core plans, receives and sends meanwhile.

At most two plans are here: one that samples, and one that computes as soon as that has ended. The second is submitted when the
first has computed its logits, before its tokens are known: that is asynchronous scheduling.
"""

import os
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from pdmesh.engine.plan import StepPlan, StepResult

# A step that hangs longer at the end is left to end with the process.
CLOSE_GRACE_S = 30.0


class Worker(Protocol):
    """What executes a plan: `runner.Runner`."""

    def run(self, plan: StepPlan, on_computed: Callable[[], None] | None = None) -> StepResult:
        """Execute a plan; `on_computed` is called when nothing but sampling is left."""


class Executor:
    """Plans in, results out in the same order; a step that raised comes out as its exception."""

    def __init__(self, worker: Worker, *, is_async: bool) -> None:
        self._worker = worker
        self._is_async = is_async
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | Exception] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._num_submitted = 0
        self._num_computed = 0
        """Counted by the worker's thread alone."""
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
        """Whether a plan submitted now would be computed next."""
        if self.is_idle:
            return True
        is_next = self._is_async and self._num_submitted == self._num_computed == self.num_ended + 1
        # A step that ended may have failed, and must be judged before anything is planned on it.
        return is_next and self._done.empty()

    def fileno(self) -> int:
        """Readable when `can_take` or `take_results` may have changed."""
        return self._wake_fd

    def submit(self, plan: StepPlan) -> None:
        self._num_submitted += 1
        self._plans.put(plan)

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
        self._plans.put(None)
        self._thread.join(CLOSE_GRACE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _work(self) -> None:
        while (plan := self._plans.get()) is not None:
            num_before = self._num_computed
            try:
                outcome: StepResult | Exception = self._worker.run(
                    plan, self._note_computed if self._is_async else None
                )
            except Exception as exc:  # a step that failed is the core's to judge
                outcome = exc
            except BaseException as exc:  # whatever a step raises, this thread must not end with it
                outcome = RuntimeError(f"{type(exc).__name__}: {exc}")
            # In this order: who sees the count sees the outcome too.
            self._done.put(outcome)
            self._num_computed = num_before + 1
            os.eventfd_write(self._wake_fd, 1)

    def _note_computed(self) -> None:
        self._num_computed += 1
        os.eventfd_write(self._wake_fd, 1)
