"""Sequences that wait for a step: first come, first served, with O(1) removal of those that are aborted."""

import bisect
from collections.abc import Iterator

from pdmesh.engine.request import Sequence


class WaitingQueue:
    """Two lines: those that had their turn before (preempted, fetched, freed choices), then those that are new.

    Who returns has arrived before all who are new, so that the first line goes first and is kept in order of arrival.
    """

    def __init__(self) -> None:
        self._returned: list[Sequence] = []
        self._new: dict[tuple[int, int], Sequence] = {}
        self.num_tokens = 0
        """Tokens to compute of all that wait."""

    def __len__(self) -> int:
        return len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        yield from self._new.values()

    @property
    def num_new(self) -> int:
        return len(self._new)

    def push_new(self, sequence: Sequence) -> None:
        self._new[sequence.order] = sequence
        self.num_tokens += sequence.num_to_compute

    def push_returned(self, sequence: Sequence) -> None:
        bisect.insort(self._returned, sequence, key=_order)
        self.num_tokens += sequence.num_to_compute

    def first(self) -> Sequence:
        return self._returned[0] if self._returned else next(iter(self._new.values()))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; it must be here."""
        if self._new.pop(sequence.order, None) is None:
            index = bisect.bisect_left(self._returned, sequence.order, key=_order)
            assert self._returned[index] is sequence
            del self._returned[index]
        self.num_tokens -= sequence.num_to_compute

    def last_holder(self) -> Sequence | None:
        """Return the last arrived of those that hold blocks."""
        return next((sequence for sequence in reversed(self._returned) if sequence.holds_blocks), None)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
