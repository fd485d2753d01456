"""Whether what has failed is asked again: a circuit breaker, without I/O, clock given. One for each thing that may fail.

After `threshold` failures in a row nobody asks for a while (0.2 s, each time twice as long, up to a bound); then one may, the
probe, while the others are still refused. Its success lets everybody in again.

    CLOSED ──trip──► OPEN ──probe──► HALF_OPEN ──succeed──► CLOSED, or ──fail / give up──► OPEN
"""

import time
from collections.abc import Callable
from enum import Enum

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 5.0


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """A probe is on its way."""


class BreakerEvent(Enum):
    TRIP = "trip"
    """One failure too many in a row."""
    PROBE = "probe"
    SUCCEED = "succeed"
    FAIL = "fail"
    GIVE_UP = "give_up"
    """The probe ended without having learnt anything."""


BREAKER_TABLE: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PROBE): BreakerState.HALF_OPEN,
    # Something that began earlier, or had nobody else to ask, went well.
    (BreakerState.OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.SUCCEED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAIL): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.GIVE_UP): BreakerState.OPEN,
}
"""What is not here changes nothing: attempts that run beside a probe end whenever they do."""


class Breaker:
    """Starts closed. Who is admitted says how it went; each attempt ends in one of `succeeded`, `failed` and `gave_up`."""

    def __init__(self, *, threshold: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = BreakerState.CLOSED
        self._threshold, self._clock = threshold, clock
        self._num_failures = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._not_before_s = 0.0

    @property
    def admits(self) -> bool:
        """Whether `admit` would let somebody in now."""
        if self.state is BreakerState.OPEN:
            return self._clock() >= self._not_before_s
        return self.state is BreakerState.CLOSED

    @property
    def wait_s(self) -> float:
        """Seconds until the next probe may go; 0 also while one is on its way."""
        return max(0.0, self._not_before_s - self._clock()) if self.state is BreakerState.OPEN else 0.0

    def admit(self) -> bool:
        """Whether the caller may ask; where the breaker was open it is the probe then."""
        if not self.admits:
            return False
        self._move(BreakerEvent.PROBE)
        return True

    def succeeded(self) -> None:
        """An attempt went well."""
        self._move(BreakerEvent.SUCCEED)
        self._num_failures, self._backoff_s = 0, FIRST_BACKOFF_S

    def failed(self) -> None:
        """An attempt failed. While open it changes nothing: it began before, or had nobody else to ask."""
        self._num_failures += 1
        is_enough = self._num_failures >= self._threshold
        event = BreakerEvent.FAIL if self.state is BreakerState.HALF_OPEN else BreakerEvent.TRIP
        if (event is BreakerEvent.FAIL or is_enough) and self._move(event):
            self._not_before_s = self._clock() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def gave_up(self) -> None:
        """The probe told nothing, as when its caller left: the next may go at once."""
        self._move(BreakerEvent.GIVE_UP)

    def _move(self, event: BreakerEvent) -> bool:
        """Apply an event; whether it meant anything in this state."""
        moved = BREAKER_TABLE.get((self.state, event))
        self.state = moved or self.state
        return moved is not None
