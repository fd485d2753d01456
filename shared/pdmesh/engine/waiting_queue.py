"""Sequences that wait for a step, in order: by rank, then by arrival."""

import bisect
from collections.abc import Iterator

from pdmesh.engine.request import BrokenSequence, Order, Sequence


class WaitingQueue:
    """Two lines, each in order: those that hold blocks, which go first, since only a step gives these back; then the others.

    Who is preempted holds nothing any more and returns to the place in the second line that its order gives it: first come,
    first served, that is before all who are new.
    """

    def __init__(self) -> None:
        self._holding: list[Sequence] = []
        self._others: list[Sequence] = []
        self.num_new = 0
        """Of those, the ones that have not had a turn yet."""
        self.num_tokens = 0
        """Tokens to compute of all that wait."""

    def __len__(self) -> int:
        return len(self._holding) + len(self._others)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._holding
        yield from self._others

    @property
    def num_holding(self) -> int:
        """Those that hold blocks."""
        return len(self._holding)

    def push(self, sequence: Sequence, *, is_new: bool = False) -> None:
        sequence.is_holding, sequence.is_new = sequence.holds_blocks, is_new
        bisect.insort(self._line_of(sequence), sequence, key=_order)
        self.num_new += is_new
        self.num_tokens += sequence.num_to_compute

    def first(self) -> Sequence:
        return (self._holding or self._others)[0]

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is. Raises BrokenSequence when it is not here."""
        line = self._line_of(sequence)
        index = bisect.bisect_left(line, sequence.order, key=_order)
        if index == len(line) or line[index] is not sequence:
            raise BrokenSequence(sequence, f"{sequence} does not wait")
        del line[index]
        self.num_new -= sequence.is_new
        sequence.is_new = False
        self.num_tokens -= sequence.num_to_compute

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out if it is here, whatever is true of it."""
        if any(each is sequence for each in self):
            for line in (self._holding, self._others):
                line[:] = [each for each in line if each is not sequence]
            self.num_new -= sequence.is_new
            self.num_tokens -= sequence.num_to_compute
            sequence.is_new = False

    def last_holder(self) -> Sequence | None:
        """Return the last of those that hold blocks."""
        return self._holding[-1] if self._holding else None

    def holders(self) -> list[Sequence]:
        return list(self._holding)

    def _line_of(self, sequence: Sequence) -> list[Sequence]:
        return self._holding if sequence.is_holding else self._others


def _order(sequence: Sequence) -> Order:
    return sequence.order
