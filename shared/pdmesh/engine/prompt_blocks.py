"""Blocks of prompts that no sequence here computes: found, taken, and named like those that were computed."""

import itertools

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.block_hash import BlockHasher, ExtraKeys
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_events import KVEventLog

BlockLists = list[list[int]]
"""Block ids of each group."""


class PromptBlocks:
    """A `KVManager`'s pool, for whoever has a prompt and no sequence. All groups keep all blocks of it."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher, num_groups: int, events: KVEventLog | None) -> None:
        self._pool = pool
        self._hasher = hasher
        self._num_groups = num_groups
        self._events = events

    def keys(self, token_ids: NDArray[np.int64], extra_keys: ExtraKeys) -> list[bytes]:
        """Return the names of a prompt's full blocks."""
        keys: list[bytes] = []
        self._hasher.extend(keys, token_ids, extra_keys)
        return keys

    def find_run(self, keys: list[bytes]) -> BlockLists:
        """Return the leading blocks that all groups have cached; not referenced."""
        tables = [[self._pool.find(index, key) for key in keys] for index in range(self._num_groups)]
        count = min(table.index(None) if None in table else len(table) for table in tables)
        return [[block_id for block_id in table[:count] if block_id is not None] for table in tables]

    def take(self, count: int) -> BlockLists:
        """Take so many blocks for each group, referenced; the caller has checked `num_free` and must drop them."""
        return [self._pool.allocate(count) for _ in range(self._num_groups)]

    def acquire(self, blocks: BlockLists) -> None:
        """Add a reference to each; the caller must drop it."""
        for block_ids in blocks:
            self._pool.acquire(block_ids)

    def register(
        self, blocks: BlockLists, first: int, keys: list[bytes], token_ids: NDArray[np.int64], extra_keys: ExtraKeys
    ) -> None:
        """Make blocks findable that hold, from block `first` on, a prompt with these names and tokens."""
        for index, table in enumerate(blocks):
            places = range(first, first + len(table))
            stored = [place for place in places if self._pool.register(index, table[place - first], keys[place])]
            if stored:
                self.tell_stored(index, stored, keys, token_ids, extra_keys)

    def forget(self, blocks: BlockLists, first: int, keys: list[bytes]) -> None:
        """Take these names off blocks that were registered so: what they held is not to be trusted.

        A block that was given away meanwhile has another name, or none, and stays as it is.
        """
        for index, table in enumerate(blocks):
            named = zip(table, keys[first : first + len(table)], strict=True)
            self._pool.forget([block_id for block_id, key in named if self._pool.find(index, key) == block_id])

    def tell_stored(
        self, group: int, places: list[int], keys: list[bytes], token_ids: NDArray[np.int64], extra_keys: ExtraKeys
    ) -> None:
        """Publish, where events are, that the blocks at these places of a prompt can be found now; each run is one event."""
        if self._events is None:
            return
        size = self._hasher.block_size
        for _, run in itertools.groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
            stored = [place for _, place in run]
            first, end = stored[0], stored[-1] + 1
            self._events.stored(
                group,
                keys[first:end],
                keys[first - 1] if first else None,
                token_ids[first * size : end * size].tolist(),
                size,
                extra_keys,
            )
