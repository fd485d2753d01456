"""Blocks for sequences: what is cached already, room for what comes, names for what is full, and everything back at the end."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.kv_groups import KVGroup, blocks_at_once
from pdmesh.engine.plan import NO_BLOCK
from pdmesh.engine.prompt_blocks import PromptBlocks
from pdmesh.engine.request import Sequence
from pdmesh.engine.tier_keys import TierKeys
from pdmesh.protocol.messages import GroupBlocks

BlockLists = list[list[int]]
"""Block ids of each group."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached beginning of a sequence: block tables of equal length, one per group."""

    blocks: BlockLists
    num_tokens: int


class KVManager:
    """Gives blocks of every group to sequences and takes them back. Knows nothing about queues and budgets."""

    def __init__(
        self,
        groups: list[KVGroup],
        pool: BlockPool,
        hasher: BlockHasher,
        *,
        max_chunk_tokens: int,
        tier_root: bytes = b"",
        enable_prefix_caching: bool = True,
        events: KVEventLog | None = None,
    ) -> None:
        assert len({group.block_size for group in groups}) == 1, "groups share one pool"
        self.groups = groups
        self.block_size = groups[0].block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = pool
        self.rounded = pool.rounded
        self._hasher = hasher
        self._max_chunk_tokens = max_chunk_tokens
        self.tier_keys = TierKeys(tier_root, self.block_size)
        self.prompts = PromptBlocks(pool, hasher, len(groups), events)
        self._has_windows = any(group.window for group in groups)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` can be computed when nothing else holds blocks."""
        return blocks_at_once(self.groups, num_tokens, self._max_chunk_tokens) <= self._pool.num_blocks

    # ---- the prefix cache -----------------------------------------------------------------------

    def lookup(self, sequence: Sequence) -> Hit:
        """Return the longest cached beginning behind which all groups can go on; at least one token is left to compute.

        Its blocks are not referenced yet: use them before anything else is allocated.
        """
        if not self.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return Hit([[] for _ in self.groups], 0)
        count = (sequence.num_tokens - 1) // self.block_size
        keys = self._keys(sequence, count)
        # What one group lacks may shorten the hit to where another lacks something: until no group does. It only shrinks.
        while True:
            before = count
            for index, group in enumerate(self.groups):
                count = group.longest_hit(
                    lambda place, index=index: self._pool.find(index, keys[place]) is not None,  # type: ignore[misc]
                    count,
                )
            if count == before or len(self.groups) == 1:
                break
        blocks = [self._found(index, keys, count) for index in range(len(self.groups))]
        return Hit(blocks, count * self.block_size)

    def register(self, sequence: Sequence, *, unnamed: Container[tuple[int, int]] = ()) -> None:
        """Make the blocks that are full and computed by now findable, but for those whose (group, place) is in `unnamed`."""
        num_full, done = sequence.num_computed // self.block_size, sequence.num_registered
        if num_full <= done:
            return
        sequence.num_registered = num_full
        self.rounded.spread(sequence.blocks, num_full)
        if not self.enable_prefix_caching or not sequence.may_register:
            return
        keys = self._keys(sequence, num_full)
        for index, blocks in enumerate(sequence.blocks):
            full = [
                place for place in range(done, num_full) if blocks[place] != NO_BLOCK and (index, place) not in unnamed
            ]
            stored = [place for place in full if self._pool.register(index, blocks[place], keys[place])]
            if stored:
                tokens = sequence.tokens.view(0, num_full * self.block_size)
                self.prompts.tell_stored(index, stored, sequence.keys, tokens, sequence.request.extra_keys)

    def forget(self, sequence: Sequence) -> None:
        """Take the names off a sequence's blocks: what they hold is not to be trusted."""
        for blocks in sequence.blocks:
            self._pool.forget(blocks)

    def reset_prefix_cache(self, live: Iterable[Sequence]) -> None:
        """Forget all that is cached; sequences that live now go on, but name nothing that rests on it."""
        self._pool.forget_all()
        for sequence in live:
            sequence.may_register = False

    # ---- room -----------------------------------------------------------------------------------

    def allocate(
        self, sequence: Sequence, num_tokens: int, *, hit: Hit | None = None, start: int = 0, reserve: int = 0
    ) -> bool:
        """Let the sequence's tables cover `num_tokens`; False, with nothing taken, when there is no room.

        The blocks of `hit` become its first. No query before `start` will be computed, so what only those would read gets
        no block. `reserve` blocks must stay free behind it, unless it takes none.
        """
        have = len(hit.blocks[0]) if hit is not None else len(sequence.blocks[0])
        end = -(-num_tokens // self.block_size)
        # Where each group's new blocks begin; before that its table has NO_BLOCK.
        firsts = [have] * len(self.groups)
        if self._has_windows:
            firsts = [min(max(have, group.first_needed(start)), max(end, have)) for group in self.groups]
        num_new = sum(max(end - first, 0) for first in firsts)
        taken = num_new + (0 if hit is None else self._num_from_free(hit))
        if taken > 0 and taken + reserve > self._pool.num_free:
            return False
        if hit is not None:
            for table, blocks in zip(sequence.blocks, hit.blocks, strict=True):
                self._pool.acquire(blocks)
                table += blocks
            sequence.num_registered = have
        for table, first in zip(sequence.blocks, firsts, strict=True):
            if end > have:
                table += [NO_BLOCK] * (first - have) + self._pool.allocate(end - first)
        sequence.capacity = len(sequence.blocks[0]) * self.block_size
        return True

    def has_room_for_all(self, sequence: Sequence, hit: Hit | None, reserve: int) -> bool:
        """Whether all tokens that a waiting sequence has would find room now, as far as they are needed at once."""
        tables = sequence.blocks if hit is None else hit.blocks
        num_missing = -(-sequence.num_tokens // self.block_size) - len(tables[0])
        taken = 0 if hit is None else self._num_from_free(hit)
        for group, table in zip(self.groups, tables, strict=True):
            num_held = sum(block_id != NO_BLOCK for block_id in table) if group.window else len(table)
            most = group.max_blocks(sequence.num_tokens, self._max_chunk_tokens)
            taken += max(min(num_missing, most - num_held), 0)
        return taken == 0 or taken + reserve <= self._pool.num_free

    def drop_unneeded(self, sequence: Sequence) -> None:
        """Take back the blocks that no query behind the computed tokens reads. Steps under way compute what is behind them."""
        if not self._has_windows:
            return
        for group, table in zip(self.groups, sequence.blocks, strict=True):
            start = end = min(group.first_needed(sequence.num_computed), len(table))
            while start > 0 and table[start - 1] != NO_BLOCK:
                start -= 1
            self._pool.release(table[start:end])
            table[start:end] = [NO_BLOCK] * (end - start)

    def share(self, donor: Sequence, taker: Sequence, *, reserve: int = 0) -> int:
        """Give a further choice what `donor` has computed of their prompt; return the tokens it need not compute.

        Full blocks are referenced. The last one, which both go on to fill, is copied; when that would leave fewer than
        `reserve` blocks free, its tokens are left to compute. At least one token always is.
        """
        num_tokens = min(donor.num_computed, donor.request.num_prompt, taker.num_tokens - 1)
        num_full, rest = divmod(num_tokens, self.block_size)
        if rest and self._pool.num_free < len(self.groups) + reserve:
            num_tokens, rest = num_tokens - rest, 0
        firsts = [group.first_needed(num_tokens) for group in self.groups]
        end = num_full + (rest > 0)
        if any(NO_BLOCK in table[first:end] for table, first in zip(donor.blocks, firsts, strict=True)):
            # The donor is so far ahead that its windows have left the prompt.
            return 0
        for index, (table, first) in enumerate(zip(donor.blocks, firsts, strict=True)):
            shared = [NO_BLOCK] * min(first, num_full) + table[first:num_full]
            self._pool.acquire(shared)
            taker.blocks[index] = [*shared, self._pool.copy(table[num_full])] if rest else shared
        taker.may_register = donor.may_register
        taker.keys = donor.keys[:num_full]
        taker.num_registered = num_full
        taker.capacity = end * self.block_size
        taker.num_computed = taker.num_planned = num_tokens
        return num_tokens

    def holds_prompt(self, sequence: Sequence) -> bool:
        """Whether all full blocks of the prompt, but for its last token, are computed."""
        return sequence.num_computed >= (sequence.request.num_prompt - 1) // self.block_size * self.block_size

    def borrow(self, count: int) -> BlockLists | None:
        """Take blocks for no sequence; None when there are not as many. The caller must `drop` them."""
        if self._pool.num_free < count:
            return None
        return [self._pool.allocate(count), *([] for _ in self.groups[1:])]

    # ---- references -----------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Take back all of a sequence's blocks; it starts from nothing."""
        self.drop(self.detach(sequence))

    def detach(self, sequence: Sequence) -> BlockLists:
        """Part a sequence from its blocks and return them, still referenced: the caller must `drop` them."""
        blocks, sequence.blocks = sequence.blocks, [[] for _ in self.groups]
        sequence.num_registered = sequence.num_computed = sequence.num_planned = sequence.capacity = 0
        return blocks

    def hold(self, sequence: Sequence, num_tokens: int) -> BlockLists:
        """Add a reference to what a query at the last of `num_tokens`, or behind, reads; the caller must `drop` it."""
        end = -(-num_tokens // self.block_size)
        held = []
        for group, table in zip(self.groups, sequence.blocks, strict=True):
            first = group.first_needed(num_tokens - 1)
            held.append([NO_BLOCK] * first + table[first:end])
        for blocks in held:
            self._pool.acquire(blocks)
        return held

    def drop(self, blocks: BlockLists) -> None:
        """Give references back."""
        for block_ids in blocks:
            self._pool.release(block_ids)

    def generations_of(self, block_ids: list[int]) -> list[int]:
        return self._pool.generations_of(block_ids)

    def describe(self, blocks: BlockLists) -> list[GroupBlocks]:
        """Return blocks with their generations, as peers are told of them, each group from its first block on."""
        described = []
        for index, table in enumerate(blocks):
            first = next((place for place, block_id in enumerate(table) if block_id != NO_BLOCK), len(table))
            generations = self._pool.generations_of(table[first:])
            described.append(
                GroupBlocks(group=index, block_ids=table[first:], generations=generations, first_block=first)
            )
        return described

    @property
    def has_copies(self) -> bool:
        """Whether a step must be planned for copies' sake: until then these hold their sources."""
        return self._pool.has_copies

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the block copies (source, target) that the step planned now must begin with."""
        return self._pool.take_copies()

    def check_integrity(self, holders: Iterable[BlockLists]) -> None:
        """Assert that references and holders agree."""
        self._pool.check_integrity(blocks for lists in holders for blocks in lists)

    # ---- inside ---------------------------------------------------------------------------------

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Return the sequence's names, extended to at least `count`; each block is hashed once."""
        if len(sequence.keys) < count:
            start, end = len(sequence.keys) * self.block_size, count * self.block_size
            self._hasher.extend(sequence.keys, sequence.tokens.view(start, end), sequence.request.extra_keys)
        return sequence.keys

    def _found(self, index: int, keys: list[bytes], count: int) -> list[int]:
        first = min(self.groups[index].first_needed(count * self.block_size), count)
        found = [self._pool.find(index, key) for key in keys[first:count]]
        return [NO_BLOCK] * first + [block_id for block_id in found if block_id is not None]

    def _num_from_free(self, hit: Hit) -> int:
        return sum(block_id != NO_BLOCK and self._pool.is_free(block_id) for table in hit.blocks for block_id in table)
