"""A pull of blocks that are not laid out as those here: which of a peer's blocks it takes, and in which pieces.

Pure. Both ends count a request's tokens alike, and each its own blocks; a piece is as many of the target's blocks as are made
of what one lane of the staging area holds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdmesh.engine.kv_groups import KVGroup
from pdmesh.errors import TransferFailed
from pdmesh.protocol.layout import Layout, incompatibility, most_source_blocks
from pdmesh.protocol.messages import KVSource
from pdmesh.protocol.token_pieces import blocks_of

# What is converted at a time: the copy takes some times as much memory, and milliseconds in which its thread holds a core.
PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """What is missing of one KV group."""

    group: int
    source: Layout
    target: Layout
    tokens: range
    """Positions in the request."""
    source_block_ids: list[int]
    """Of the blocks that hold `tokens` at the source."""
    generations: list[int]
    checksums: list[int] = field(default_factory=list)
    """Of the same blocks; empty: not checked."""
    target_block_ids: list[int] = field(default_factory=list)
    """Of the blocks that hold them here."""

    @property
    def starts_inside_a_block(self) -> bool:
        """Whether its first block here stays without its first tokens: a window needs them no longer."""
        return self.tokens.start % self.target.block_size != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertingPull:
    """One transfer's work, all groups'. Stands where a `Pull` does whose blocks need no conversion."""

    transfer_id: str
    peer_id: str
    parts: list[GroupPart]
    deadline_s: float
    """Seconds from `start` after which it is given up."""
    offer_id: str = ""
    connector: str = ""
    """As those of a `Pull`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Whole blocks of the target, and the source's that they are made of."""

    part: GroupPart
    tokens: range
    source_places: slice
    """In the part's lists."""
    target_block_ids: list[int]

    @property
    def first_source_block(self) -> int:
        """Index, in the request, of the first of the source's blocks."""
        return self.tokens.start // self.part.source.block_size


def plan_conversion(
    source: KVSource, groups: Sequence[KVGroup], *, num_hit_tokens: int, start: int
) -> list[GroupPart] | None:
    """Return what to pull when the first `num_hit_tokens` are here and queries from `start` on will be computed; None when
    nothing is missing. The target's blocks are left out, as they are not allocated yet.

    Raises TransferFailed, with the reason as its message, for a source that does not fit together or leaves a gap.
    """
    fits = len(source.groups) == len(groups) == len(source.layouts)
    if source.num_tokens < 1 or not 0 < source.deadline_s < math.inf or not fits:
        raise TransferFailed("mismatch")
    is_checked = all(len(blocks.checksums) == len(blocks.block_ids) for blocks in source.groups)
    parts = []
    for index, (blocks, layout, group) in enumerate(zip(source.groups, source.layouts, groups, strict=True)):
        if group.layout is None or incompatibility(layout, group.layout) is not None:
            raise TransferFailed("mismatch")
        end = -(-source.num_tokens // layout.block_size)
        if blocks.group != index or not blocks.is_sound or len(blocks.block_ids) != end - blocks.first_block:
            raise TransferFailed("mismatch")
        tokens = range(max(num_hit_tokens, _first_needed(group, start)), source.num_tokens)
        if not tokens:
            continue
        first = tokens.start // layout.block_size - blocks.first_block
        if first < 0:
            raise TransferFailed("gap")
        parts.append(
            GroupPart(
                group=index,
                source=layout,
                target=group.layout,
                tokens=tokens,
                source_block_ids=blocks.block_ids[first:],
                generations=blocks.generations[first:],
                checksums=blocks.checksums[first:] if is_checked else [],
            )
        )
    return parts or None


def _first_needed(group: KVGroup, position: int) -> int:
    """Return the first token that a query at `position`, or behind it, reads."""
    return max(position - group.window + 1, 0) if group.window else 0


def pieces_of(part: GroupPart, *, lane_blocks: int) -> Iterator[Piece]:
    """Part what is missing, in order. A block of the source that lies across two pieces is in both. `lane_blocks` is how many
    of the source's a lane holds: at least those that one block of the target may be made of."""
    size, target_size = part.source.block_size, part.target.block_size
    least = most_source_blocks(part.source, part.target)
    most = min(lane_blocks, max(least, PIECE_BYTES // part.source.block_bytes))
    if most < least:
        raise ValueError(f"a lane holds {lane_blocks} of the source's blocks, of which one block may take {least}")
    start, first_source, first_target = part.tokens.start, part.tokens.start // size, part.tokens.start // target_size
    while start < part.tokens.stop:
        # As far as the source's blocks reach, cut at the end of a block of the target.
        reach = (start // size + most) * size
        end = min(reach // target_size * target_size, part.tokens.stop)
        held = blocks_of(range(start, end), size)
        made = blocks_of(range(start, end), target_size)
        yield Piece(
            part=part,
            tokens=range(start, end),
            source_places=slice(held.start - first_source, held.stop - first_source),
            target_block_ids=part.target_block_ids[made.start - first_target : made.stop - first_target],
        )
        start = end
