"""Wakes a loop that sleeps on descriptors alone, at a time."""

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

# Behind the time, so that who looks then finds it passed.
MARGIN_S = 0.01


class Alarm:
    """Calls a function, from a thread of its own, when the time is come; there is a thread only while one is set."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._due_s: float | None = None
        self._timer: threading.Timer | None = None

    def set(self, due_s: float | None) -> None:
        """Ring at `due_s` of the monotonic clock, and not at what was set before; None: not at all."""
        if due_s == self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = due_s, None
        if due_s is not None:
            self._timer = threading.Timer(max(due_s - time.monotonic(), 0.0) + MARGIN_S, self._ring)
            # A process that ends waits for no alarm.
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError as exc:
                log.warning("nobody is woken when a pull has waited too long: %s", exc)
                # It is set when the loop looks again.
                self._due_s = self._timer = None
