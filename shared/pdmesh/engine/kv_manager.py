"""Blocks for sequences: what is cached already, room for what comes, names for what is full, and everything back at the end."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdmesh.engine.block_key import extend_chain, first_parent
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.request import Sequence
from pdmesh.protocol.messages import GroupBlocks

BlockLists = list[list[int]]
"""Block ids of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """One KV group as the bookkeeping sees it."""

    blocks: BlockPool
    block_size: int
    root: bytes
    """Parent of its first keys: `block_key.root_key`."""


class KVManager:
    """Gives blocks of every group to sequences and takes them back. Knows nothing about queues and budgets."""

    def __init__(self, groups: list[KVGroup], *, enable_prefix_caching: bool) -> None:
        self.groups = groups
        self.enable_prefix_caching = enable_prefix_caching
        self._common_block_size = math.lcm(*(group.block_size for group in groups))

    @property
    def block_size(self) -> int:
        """Tokens per block of group 0, the one that offers and transfers are made of."""
        return self.groups[0].block_size

    @property
    def num_blocks(self) -> int:
        return sum(group.blocks.num_blocks for group in self.groups)

    @property
    def num_used(self) -> int:
        return sum(group.blocks.num_used for group in self.groups)

    @property
    def num_free(self) -> int:
        return min(group.blocks.num_free for group in self.groups)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits when it is alone."""
        return min(group.blocks.num_blocks * group.block_size for group in self.groups)

    def lookup(self, sequence: Sequence) -> BlockLists:
        """Return the cached blocks that hold the sequence's beginning; at least one token is left to compute.

        They are not referenced yet: use them before anything else is allocated.
        """
        if not self.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return [[] for _ in self.groups]
        found = [self._lookup(sequence, index) for index in range(len(self.groups))]
        # All groups must be able to go on from the same token.
        num_tokens = min(len(blocks) * group.block_size for blocks, group in zip(found, self.groups, strict=True))
        return [blocks[: num_tokens // group.block_size] for blocks, group in zip(found, self.groups, strict=True)]

    def _lookup(self, sequence: Sequence, index: int) -> list[int]:
        group = self.groups[index]
        limit = (sequence.num_tokens - 1) // group.block_size
        blocks: list[int] = []
        for key in self._keys(sequence, index, limit)[:limit]:
            block_id = group.blocks.find(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def allocate(
        self, sequence: Sequence, num_tokens: int, *, cached: BlockLists | None = None, reserve: int = 0
    ) -> bool:
        """Let the sequence's blocks cover `num_tokens`; False, with nothing changed, when there is no room.

        `cached` (from `lookup`) become its first blocks. `reserve` blocks of each group must stay free after it.
        """
        needs = []
        for index, group in enumerate(self.groups):
            hits = cached[index] if cached is not None else []
            need = -(-num_tokens // group.block_size) - len(sequence.blocks[index]) - len(hits)
            from_free = sum(group.blocks.is_free(block_id) for block_id in hits)
            if max(need, 0) + from_free + (reserve if need + from_free > 0 else 0) > group.blocks.num_free:
                return False
            needs.append(need)
        for index, group in enumerate(self.groups):
            if cached is not None:
                group.blocks.acquire(cached[index])
                sequence.blocks[index] += cached[index]
                sequence.num_registered[index] = len(cached[index])
            if needs[index] > 0:
                sequence.blocks[index] += group.blocks.allocate(needs[index])
        return True

    def share(self, donor: Sequence, taker: Sequence, *, reserve: int = 0) -> int:
        """Give a further choice what `donor` has computed of their prompt; return the tokens it need not compute.

        Full blocks are referenced. The last one, which both go on to fill, is copied; when that would leave fewer than
        `reserve` blocks free, its tokens are left to compute. At least one token always is.
        """
        num_tokens = min(donor.num_computed, donor.request.num_prompt, taker.num_tokens - 1)
        if any(num_tokens % group.block_size and group.blocks.num_free <= reserve for group in self.groups):
            num_tokens -= num_tokens % self._common_block_size
        for index, group in enumerate(self.groups):
            num_full, rest = divmod(num_tokens, group.block_size)
            blocks = donor.blocks[index][:num_full]
            group.blocks.acquire(blocks)
            if rest:
                blocks.append(group.blocks.copy(donor.blocks[index][num_full]))
            taker.blocks[index] = blocks
            taker.keys[index] = donor.keys[index][:num_full]
            taker.num_registered[index] = num_full
        taker.num_computed = num_tokens
        return num_tokens

    def holds_prompt(self, sequence: Sequence) -> bool:
        """Whether all full blocks of the prompt, but for its last token, are computed."""
        return (
            sequence.num_computed
            >= (sequence.request.num_prompt - 1) // self._common_block_size * self._common_block_size
        )

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that are full and computed by now findable."""
        if not self.enable_prefix_caching:
            return
        for index, group in enumerate(self.groups):
            num_full = sequence.num_computed // group.block_size
            done = sequence.num_registered[index]
            if num_full <= done:
                continue
            keys = self._keys(sequence, index, num_full)
            for place in range(done, num_full):
                group.blocks.register(sequence.blocks[index][place], keys[place])
            sequence.num_registered[index] = num_full

    def forget(self, sequence: Sequence) -> None:
        """Take the names off a sequence's blocks: what they hold is not to be trusted."""
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.blocks.forget(blocks)

    def release(self, sequence: Sequence) -> None:
        """Take back all of a sequence's blocks; it starts from nothing."""
        self.drop(self.detach(sequence))

    def detach(self, sequence: Sequence) -> BlockLists:
        """Part a sequence from its blocks and return them, still referenced: the caller must `drop` them."""
        blocks, sequence.blocks = sequence.blocks, [[] for _ in self.groups]
        sequence.num_registered = [0] * len(self.groups)
        sequence.num_computed = 0
        return blocks

    def hold(self, sequence: Sequence, num_tokens: int) -> BlockLists:
        """Add a reference to the blocks that hold the first `num_tokens`, and return them: the caller must `drop` them."""
        held = [
            blocks[: -(-num_tokens // group.block_size)]
            for blocks, group in zip(sequence.blocks, self.groups, strict=True)
        ]
        for blocks, group in zip(held, self.groups, strict=True):
            group.blocks.acquire(blocks)
        return held

    def drop(self, blocks: BlockLists) -> None:
        """Give references back."""
        for group, block_ids in zip(self.groups, blocks, strict=True):
            group.blocks.release(block_ids)

    def describe(self, blocks: BlockLists) -> list[GroupBlocks]:
        """Return blocks with their generations, as peers are told of them."""
        return [
            GroupBlocks(group=index, block_ids=block_ids, generations=group.blocks.generations_of(block_ids))
            for index, (group, block_ids) in enumerate(zip(self.groups, blocks, strict=True))
        ]

    def prompt_keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the prompt's full blocks in group 0."""
        num_full = sequence.request.num_prompt // self.block_size
        return self._keys(sequence, 0, num_full)[:num_full]

    def check_integrity(self, holders: Iterable[BlockLists]) -> None:
        """Assert that references and holders agree in every group."""
        lists = list(holders)
        for index, group in enumerate(self.groups):
            group.blocks.check_integrity(blocks[index] for blocks in lists)

    def _keys(self, sequence: Sequence, index: int, count: int) -> list[bytes]:
        """Return the sequence's keys, extended to at least `count`; each block is hashed once."""
        keys, group, request = sequence.keys[index], self.groups[index], sequence.request
        if not keys and index == 0 and len(request.prompt_keys) == request.num_prompt // group.block_size:
            keys += request.prompt_keys
        if len(keys) < count:
            parent = keys[-1] if keys else first_parent(group.root, cache_salt=request.cache_salt)
            start, end = len(keys) * group.block_size, count * group.block_size
            extend_chain(keys, sequence.tokens.view(start, end), group.block_size, parent)
        return keys
