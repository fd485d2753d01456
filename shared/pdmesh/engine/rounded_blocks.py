"""Blocks whose KV was rounded between engines, or computed behind such: near what others would compute, and not the same.

The prefix cache of one engine may use them. Others are told where an offer's begin; they are not pushed; and the tier, which
serves all and keeps no such marks, is told only of what comes before the first of them.
"""

from collections.abc import Iterable

from pdmesh.engine.plan import NO_BLOCK


class RoundedBlocks:
    """Which blocks are so, by id, until they are taken for something else."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def mark(self, tables: list[list[int]], first: int) -> None:
        """All blocks from place `first` on hold rounded KV."""
        for table in tables:
            self._ids.update(block_id for block_id in table[first:] if block_id != NO_BLOCK)

    def spread(self, tables: list[list[int]], num_full: int) -> None:
        """Of the first `num_full` blocks, those behind a rounded one were computed from it."""
        first = self.num_exact(tables)
        if first < num_full:
            self.mark([table[:num_full] for table in tables], first)

    def num_exact(self, tables: list[list[int]]) -> int:
        """Return how many leading blocks are not so in any group."""
        return min(self._first(table) for table in tables)

    def renew(self, block_ids: Iterable[int]) -> None:
        """These are taken for new content."""
        if self._ids:
            self._ids.difference_update(block_ids)

    def copied(self, source: int, target: int) -> None:
        """A block gets the content of another."""
        if source in self._ids:
            self._ids.add(target)

    def _first(self, table: list[int]) -> int:
        if not self._ids or self._ids.isdisjoint(table):
            return len(table)
        return next(place for place, block_id in enumerate(table) if block_id in self._ids)
