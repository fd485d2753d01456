"""When each of many things is due: moved often, looked at often, rarely due. No I/O and no clock of its own."""

import heapq
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=str)

# Entries that were moved or dropped stay in the heap until they surface, up to as many as are wanted and these.
MAX_STALE = 64


class Deadlines(Generic[KeyT]):
    """A time for each key. Moving one later is a dict's assignment; every other call costs the heap's logarithm, amortised."""

    def __init__(self) -> None:
        self._at_s: dict[KeyT, float] = {}
        self._queued_s: dict[KeyT, float] = {}
        """The time under which a key stands in the heap: never after its own."""
        self._heap: list[tuple[float, KeyT]] = []

    def __len__(self) -> int:
        return len(self._at_s)

    def set(self, key: KeyT, at_s: float) -> None:
        """Make `key` due at `at_s`, earlier or later than it was."""
        self._at_s[key] = at_s
        if at_s < self._queued_s.get(key, float("inf")):
            self._queue(key, at_s)

    def drop(self, key: KeyT) -> None:
        """Forget a key; unknown ones are ignored."""
        self._at_s.pop(key, None)
        self._queued_s.pop(key, None)

    def next_s(self) -> float | None:
        """The earliest time; None when there is nothing."""
        self._surface()
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_s: float) -> list[KeyT]:
        """Take out what is due, earliest first."""
        due = []
        while (at_s := self.next_s()) is not None and at_s <= now_s:
            _, key = heapq.heappop(self._heap)
            self.drop(key)
            due.append(key)
        return due

    def _surface(self) -> None:
        """Bring an entry that tells its key's true time to the top."""
        while self._heap:
            queued_s, key = self._heap[0]
            if self._queued_s.get(key) != queued_s:
                heapq.heappop(self._heap)
            elif (at_s := self._at_s[key]) > queued_s:
                heapq.heapreplace(self._heap, (at_s, key))
                self._queued_s[key] = at_s
            else:
                return

    def _queue(self, key: KeyT, at_s: float) -> None:
        self._queued_s[key] = at_s
        heapq.heappush(self._heap, (at_s, key))
        if len(self._heap) > 2 * len(self._at_s) + MAX_STALE:
            self._heap = [(at_s, key) for key, at_s in self._at_s.items()]
            self._queued_s = dict(self._at_s)
            heapq.heapify(self._heap)
