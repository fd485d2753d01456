"""The sums of a pool's blocks, as its owner tells them to those who pull: each content is summed once, away from the loop."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.active import UNKNOWN
from pdmesh.connector.pages import PagesAhead
from pdmesh.connector.pool import KVPool
from pdmesh.protocol.messages import MAX_GENERATIONS, GroupBlocks
from pdmesh_kernels.block_sum import sum_blocks

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class PoolSums:
    """A context manager: leaving it waits for what is being summed. `pool` may be a read-only map, whose pages are then mapped
    ahead, and stays the caller's.

    `block_size`: tokens of a block; the last one of a prompt may still grow, so that it is summed anew each time that its
    content is prepared, and never while its request goes on. 0: all blocks are full.
    """

    def __init__(self, pool: KVPool, *, block_size: int = 0) -> None:
        num_blocks = pool.shape.num_blocks
        self._pool = pool
        self._block_size = block_size
        self._sums: Words = np.zeros(num_blocks, dtype=np.uint64)
        self._generations: Words = np.full(num_blocks, MAX_GENERATIONS - 1, dtype=np.uint64)
        """Of the content that was summed."""
        self._is_full: Flags = np.zeros(num_blocks, dtype=np.bool_)
        """Whether that content stays as long as the generation."""
        self._begun: Future[None] | None = None
        """The last of what `prepare` has begun."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums")
        # Nobody who waits for sums waits for these.
        self._second_look = ThreadPoolExecutor(1, thread_name_prefix="sums-again")
        # Who writes to a pool has its pages already, or takes them ahead.
        self._pages = None if pool.writable else PagesAhead(pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is being summed."""
        self._thread.shutdown(cancel_futures=True)
        self._second_look.shutdown(cancel_futures=True)
        if self._pages is not None:
            self._pages.close()

    def prepare(self, groups: Iterable[GroupBlocks], num_tokens: int, *, grows: bool = False) -> None:
        """Begin to sum blocks that hold `num_tokens` from position 0 and are complete so far; returns at once.

        `grows`: their request goes on and writes behind those tokens while consumers read, so that nothing is told of a block
        which is not full.
        """
        for blocks in groups:
            missing, num_full = ~self._known(blocks, num_tokens), self._num_full(blocks, num_tokens)
            # Summed before, but it may have grown.
            missing[num_full:] = not grows
            if grows:
                ids, generations = _ids(blocks)[num_full:], _generations(blocks)[num_full:]
                self._store(ids, generations, np.zeros(len(ids), dtype=np.bool_), np.full(len(ids), UNKNOWN, np.uint64))
            if missing.any():
                self._begun = self._thread.submit(self._sum, *self._picked(blocks, missing, num_tokens))

    def adopt(self, groups: list[GroupBlocks], sums: list[list[int]], num_tokens: int) -> None:
        """As `prepare` of what does not grow, where the core has summed the blocks; what is known here already stays."""
        for blocks, told in zip(groups, sums, strict=True):
            missing = ~self._known(blocks, num_tokens)
            missing[self._num_full(blocks, num_tokens) :] = True
            self._store(*self._picked(blocks, missing, num_tokens), np.asarray(told, dtype=np.uint64)[missing])

    async def of(self, groups: list[GroupBlocks], num_tokens: int) -> list[GroupBlocks]:
        """Return such blocks with their sums, which are computed now where they are not known yet.

        UNKNOWN is the sum of a block that still grows, and of one whose content is no longer that of its generation.
        """
        loop = asyncio.get_running_loop()
        if self._begun is not None and not self._begun.done():
            # The thread takes one after the other. Not its own future: a caller that is cancelled would cancel it for all.
            await loop.run_in_executor(self._thread, _nothing)
        for blocks in groups:
            missing = ~self._known(blocks, num_tokens)
            if missing.any():
                await loop.run_in_executor(self._thread, self._sum, *self._picked(blocks, missing, num_tokens))
        return [self._told(blocks) for blocks in groups]

    def with_known(self, blocks: GroupBlocks) -> GroupBlocks:
        """Return blocks with their sums if all are known already, else without."""
        ids = _ids(blocks)
        if not (self._generations[ids] == _generations(blocks)).all():
            return blocks
        return msgspec.structs.replace(blocks, checksums=self._sums[ids].tolist())

    def _told(self, blocks: GroupBlocks) -> GroupBlocks:
        ids = _ids(blocks)
        sums = np.where(self._generations[ids] == _generations(blocks), self._sums[ids], np.uint64(UNKNOWN))
        return msgspec.structs.replace(blocks, checksums=sums.tolist())

    async def changed(self, groups: list[GroupBlocks]) -> list[GroupBlocks]:
        """Sum blocks again and return those that hold other bytes than they were summed to; only groups that have any.

        Nothing is known of a block that may grow, was never summed, or has been given other content since.
        """
        loop = asyncio.get_running_loop()
        changed = [await loop.run_in_executor(self._second_look, self._changed, blocks) for blocks in groups]
        return [blocks for blocks in changed if blocks.block_ids]

    def _changed(self, blocks: GroupBlocks) -> GroupBlocks:
        """Runs in the thread."""
        ids, generations = _ids(blocks), _generations(blocks)
        is_judged = (self._generations[ids] == generations) & self._is_full[ids] & (self._sums[ids] != UNKNOWN)
        ids, generations = ids[is_judged], generations[is_judged]
        differs = sum_blocks(self._pool.blocks, ids) != self._sums[ids]
        # As in `_sum`: what got other content meanwhile is not damaged.
        differs &= self._pool.generations[ids] == generations
        return GroupBlocks(
            group=blocks.group, block_ids=ids[differs].tolist(), generations=generations[differs].tolist()
        )

    def note(self, block_ids: list[int], generations: list[int], sums: list[int]) -> None:
        """Take in what full blocks sum to, from whoever knows it already."""
        self._store(
            np.asarray(block_ids, dtype=np.int64),
            np.asarray(generations, dtype=np.uint64),
            np.ones(len(block_ids), dtype=np.bool_),
            np.asarray(sums, dtype=np.uint64),
        )

    def _num_full(self, blocks: GroupBlocks, num_tokens: int) -> int:
        """How many of the blocks listed are full."""
        if not self._block_size:
            return len(blocks.block_ids)
        return max(0, min(num_tokens // self._block_size - blocks.first_block, len(blocks.block_ids)))

    def _known(self, blocks: GroupBlocks, num_tokens: int) -> Flags:
        """Which of the blocks listed have a sum; that of one which has become full since does not count."""
        ids, num_full = _ids(blocks), self._num_full(blocks, num_tokens)
        known: Flags = self._generations[ids] == _generations(blocks)
        known[:num_full] &= self._is_full[ids[:num_full]]
        return known

    def _picked(self, blocks: GroupBlocks, chosen: Flags, num_tokens: int) -> tuple[Ids, Words, Flags]:
        """Ids and generations of some of the blocks listed, and which of them are full."""
        is_full = np.flatnonzero(chosen) < self._num_full(blocks, num_tokens)
        return _ids(blocks)[chosen], _generations(blocks)[chosen], is_full

    def _sum(self, ids: Ids, generations: Words, is_full: Flags) -> None:
        """Runs in the thread."""
        sums = sum_blocks(self._pool.blocks, ids)
        if self._pages is not None:
            self._pages.note(ids.tolist())
        # Nothing has to hold the blocks: what got other content meanwhile was not summed. The words after the data.
        are_same = self._pool.generations[ids] == generations
        self._store(ids[are_same], generations[are_same], is_full[are_same], sums[are_same])

    def _store(self, ids: Ids, generations: Words, is_full: Flags, sums: Words) -> None:
        # The generation last: whoever finds it finds the sum.
        self._sums[ids] = sums
        self._is_full[ids] = is_full
        self._generations[ids] = generations


def _nothing() -> None:
    pass


def _ids(blocks: GroupBlocks) -> Ids:
    return np.asarray(blocks.block_ids, dtype=np.int64)


def _generations(blocks: GroupBlocks) -> Words:
    return np.asarray(blocks.generations, dtype=np.uint64)
