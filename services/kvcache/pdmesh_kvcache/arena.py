"""An arena: the slots for blocks of one model and layout, in shared memory, with the index of what they hold.

Each arena is a pool of its own with a peer id of its own, so an engine that still maps an arena that is gone reads words that
never match: every pool's generations start at a random number.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.protocol.messages import GroupBlocks
from pdmesh_kernels.block_sum import copy_blocks, sum_blocks
from pdmesh_kvcache.index import SlotIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """What blocks must have in common to share an arena."""

    model_fingerprint: str
    layout_fingerprint: str


class Arena:
    """Owns its pool. Not thread-safe but for reading pinned slots and writing reserved ones."""

    def __init__(
        self,
        kind: BlockKind,
        *,
        peer_id: str,
        num_slots: int,
        block_bytes: int,
        on_evict: Callable[[], None],
        has_sums: bool = True,
    ) -> None:
        self.kind = kind
        self.peer_id = peer_id
        shape = PoolShape(num_slots, block_bytes)
        fd = create_pool_file(peer_id)
        try:
            size_pool_file(fd, shape)
            self.pool = KVPool(fd, shape, writable=True)
        finally:
            # The pool holds a duplicate.
            os.close(fd)
        self.sums = PoolSums(self.pool) if has_sums else None
        """Of what the slots hold; None: nothing is checked."""
        self.is_closed = False
        self.index = SlotIndex(num_slots, on_reuse=lambda slot: self.pool.bump([slot]), on_evict=on_evict)

    @property
    def total_bytes(self) -> int:
        """Memory it takes when it is full."""
        return self.pool.shape.total_bytes

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads from it or writes to it."""
        return self.index.num_pinned == 0 and self.index.num_filling == 0

    def blocks_of(self, group: int, slots: list[int]) -> GroupBlocks:
        """Slots with their present generations, as consumers want them."""
        blocks = GroupBlocks(group=group, block_ids=slots, generations=self.pool.generations_of(slots))
        return blocks if self.sums is None else self.sums.with_known(blocks)

    def fill(self, slot: int, payload: memoryview) -> None:
        """Write a checked block into a reserved slot; may be called in a thread."""
        source = np.frombuffer(payload, dtype=np.uint8)[None, :]
        [checksum] = copy_blocks(self.pool.blocks, [slot], source, [0]).tolist()
        self.note_sums([slot], [checksum])

    def note_sums(self, slots: list[int], checksums: list[int]) -> None:
        """Keep what filled slots sum to; it is computed here where nobody told it, which may take milliseconds."""
        if self.sums is not None:
            told = checksums or sum_blocks(self.pool.blocks, slots).tolist()
            self.sums.note(slots, self.pool.generations_of(slots), told)

    def damaged(self, slots: list[int]) -> list[int]:
        """Return the pinned slots that do not sum to what they did when they were filled; may be called in a thread."""
        told = self.blocks_of(0, slots).checksums
        if not told:
            return []
        now = sum_blocks(self.pool.blocks, slots).tolist()
        return [slot for slot, before, after in zip(slots, told, now, strict=True) if before != after]

    def close(self) -> None:
        """Invalidate what consumers still map, and let the memory go."""
        self.is_closed = True
        if self.sums is not None:
            self.sums.close()
        self.pool.bump(list(range(self.pool.shape.num_blocks)))
        self.pool.close()
