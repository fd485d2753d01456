"""The rule of each KV group: which blocks of a sequence its layers still read, and what of a sequence can be found cached.

All groups share one pool of equal blocks, and a sequence's block tables have the same length in all of them: entry i stands
for tokens [i * block_size, (i + 1) * block_size). Where a group's rule needs no block, the entry is NO_BLOCK. A group that
keeps one state instead of a history (Mamba) is a rule whose first needed block is its last.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.protocol.layout import Layout


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one rule: `full` attention, or `sliding` with a window."""

    block_size: int
    kind: str = "full"
    window: int = 0
    """Tokens that a query sees, itself included; 0: all."""
    layout: Layout | None = None
    """Of its blocks, where those of others may be converted."""

    def first_needed(self, position: int) -> int:
        """Return the index of the first block that a query at `position`, or behind it, reads."""
        return max(position - self.window + 1, 0) // self.block_size if self.window else 0

    def max_blocks(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` holds at once when it is computed in chunks of up to that size.

        A window's blocks go back when a block has become full after the step that read them has ended; by then the next
        chunk has its blocks too.
        """
        total = -(-num_tokens // self.block_size)
        if not self.window:
            return total
        num_kept = self.window - 1 + self.block_size - 1 + 2 * max_chunk_tokens
        return min(total, -(-num_kept // self.block_size) + 1)

    def longest_hit(self, is_cached: Callable[[int], bool], limit: int) -> int:
        """Return the most leading blocks, up to `limit`, behind which a sequence can go on: all that its next query reads
        is cached. Looks at a full group's blocks from the first on, at a sliding group's from the last back."""
        if not self.window:
            return next((index for index in range(limit) if not is_cached(index)), limit)
        end, index = limit, limit
        while index > self.first_needed(end * self.block_size):
            index -= 1
            if not is_cached(index):
                end = index
        return end


def blocks_at_once(groups: list[KVGroup], num_tokens: int, max_chunk_tokens: int) -> int:
    """Return the most blocks of the shared pool that one sequence of `num_tokens` holds at once."""
    return sum(group.max_blocks(num_tokens, max_chunk_tokens) for group in groups)
