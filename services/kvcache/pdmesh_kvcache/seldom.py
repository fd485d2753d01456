"""How often a thing that may happen thousands of times in a row is told in the log: once a minute, with how many there were."""

import time
from collections.abc import Callable

INTERVAL_S = 60.0


class Seldom:
    """Counts events by kind and says when the next line about a kind is due. The kinds must be few."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def due(self, kind: str) -> int:
        """Count an event; returns how many there were since the last line if a line is due now, else 0."""
        self._untold[kind] = self._untold.get(kind, 0) + 1
        now_s = self._clock()
        if kind in self._told_s and now_s - self._told_s[kind] < INTERVAL_S:
            return 0
        self._told_s[kind] = now_s
        return self._untold.pop(kind)
