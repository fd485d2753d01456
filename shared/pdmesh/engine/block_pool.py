"""The blocks of all KV groups: who refers to them, which are free, which can be found by key.

Every block is in one of two places: referenced (ref_count > 0) or in the free queue. A free block keeps its content and its
key until it is taken for something else, so the free queue is also the prefix cache's LRU order. A block belongs to the group
that took it last; each group has an index of its own, as equal keys name other content in another group.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from pdmesh.connector.pool import KVPool
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.plan import NO_BLOCK
from pdmesh.engine.rounded_blocks import RoundedBlocks


class BlockPool:
    """Reference counts, free queue and key index over the blocks of a `KVPool`. Not thread-safe."""

    def __init__(
        self, num_blocks: int, num_groups: int, pool: KVPool | None = None, events: KVEventLog | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        self._events = events
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        """Group in whose index a block's key is."""
        self._by_key: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._free = _FreeQueue(num_blocks)
        self.rounded = RoundedBlocks()
        self._copies: dict[int, int] = {}
        """Ordered copies that no step has been told of: target -> source, which is referenced meanwhile."""

    @property
    def num_free(self) -> int:
        """Blocks that nothing refers to; cached ones count."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, least recently used first, each with one reference and a new generation.

        What they cached is forgotten. The caller has checked `num_free`.
        """
        taken = [self._free.pop_first() for _ in range(count)]
        self.forget(taken)
        self.rounded.renew(taken)
        for block_id in taken:
            self._ref_counts[block_id] = 1
        if self._pool is not None and taken:
            # Before anything is written: a late reader must see the change no later than the new content.
            self._pool.bump(taken)
        return taken

    def copy(self, block_id: int) -> int:
        """Take a block, as `allocate` does, and order that it gets the content of `block_id` before the next step computes."""
        # The content may itself be ordered only.
        source = self._copies.get(block_id, block_id)
        self.acquire([source])
        [taken] = self.allocate(1)
        self._copies[taken] = source
        self.rounded.copied(source, taken)
        return taken

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies (source, target) that the next step must begin with, whose plan must be complete by now."""
        copies, self._copies = self._copies, {}
        self.release(list(copies.values()))
        return [(source, target) for target, source in copies.items()]

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; free ones leave the free queue. NO_BLOCK is skipped, here and in `release`."""
        for block_id in block_ids:
            if block_id == NO_BLOCK:
                continue
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence, its tail first, so that a chain's head is evicted last."""
        for block_id in reversed(block_ids):
            if block_id == NO_BLOCK:
                continue
            count = self._ref_counts[block_id]
            assert count > 0, f"block {block_id} released more often than acquired"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                if block_id in self._copies:
                    # What was to be copied here is not wanted any more.
                    self.release([self._copies.pop(block_id)])
                # A block without a key is of no use to anyone, so it is the first to be taken again.
                self._free.push(block_id, first=self._keys[block_id] is None)

    def find(self, group: int, key: bytes) -> int | None:
        """Return the block that holds the content of `key` in a group."""
        return self._by_key[group].get(key)

    def register(self, group: int, block_id: int, key: bytes) -> bool:
        """Make a full, computed block findable; a second block with the same content stays unnamed."""
        index = self._by_key[group]
        if key in index or self._keys[block_id] is not None:
            return False
        self._keys[block_id], self._groups[block_id] = key, group
        index[key] = block_id
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable; whoever refers to them keeps them."""
        for block_id in block_ids:
            key = None if block_id == NO_BLOCK else self._keys[block_id]
            if key is not None:
                self._keys[block_id] = None
                del self._by_key[self._groups[block_id]][key]
                if self._events is not None:
                    self._events.removed(self._groups[block_id], [key])

    def forget_all(self) -> None:
        """Make every block unfindable."""
        self._keys = [None] * self.num_blocks
        self._by_key = [{} for _ in self._by_key]
        if self._events is not None:
            self._events.cleared()

    def generations_of(self, block_ids: list[int]) -> list[int]:
        return [0] * len(block_ids) if self._pool is None else self._pool.generations_of(block_ids)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every block is in exactly one place, given the block lists of all that hold references."""
        expected = Counter(block_id for blocks in holders for block_id in blocks if block_id != NO_BLOCK)
        expected.update(self._copies.values())
        free = self._free.walk()
        assert len(free) == len(set(free)) == len(self._free), "the free queue is broken"
        for block_id, count in enumerate(self._ref_counts):
            assert count == expected[block_id], f"block {block_id}: {count} references, {expected[block_id]} holders"
        assert set(free) == {i for i, count in enumerate(self._ref_counts) if count == 0}, "a block is lost or double"
        named = {(self._groups[i], key): i for i, key in enumerate(self._keys) if key is not None}
        indexed = {(group, key): i for group, index in enumerate(self._by_key) for key, i in index.items()}
        assert named == indexed, "the key index is broken"


class _FreeQueue:
    """A doubly linked list over block ids, as two arrays with a sentinel at index `num_blocks`: every step is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self._sentinel = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def pop_first(self) -> int:
        first = self._next[self._sentinel]
        assert first != self._sentinel, "allocation from an empty pool"
        self.remove(first)
        return first

    def remove(self, block_id: int) -> None:
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before], self._previous[after] = after, before
        self._length -= 1

    def push(self, block_id: int, *, first: bool) -> None:
        before = self._sentinel if first else self._previous[self._sentinel]
        after = self._next[before]
        self._next[before] = self._previous[after] = block_id
        self._previous[block_id], self._next[block_id] = before, after
        self._length += 1

    def walk(self) -> list[int]:
        found: list[int] = []
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel and len(found) <= self._length:
            found.append(block_id)
            block_id = self._next[block_id]
        return found
