"""Which slots of which blocks a request's tokens move between when prefill and decode have different block sizes.

For a consumer that fetches from a peer of another block size: it counts the peer's blocks, and copies slot by slot, by this.
"""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPiece:
    """Neighbouring tokens that lie in one block at either end. Blocks are counted within the request, from its first token."""

    source_block: int
    source_slot: int
    """Of the first token."""
    destination_block: int
    destination_slot: int
    """Of the first token."""
    num_tokens: int


def map_tokens(tokens: range, source_block_size: int, destination_block_size: int) -> tuple[TokenPiece, ...]:
    """Return the pieces that together are `tokens`, positions in the request, in their order.

    The first and the last block of either end may be partial: `tokens` starts behind the prefix that the destination has, and
    ends where the source has computed no more. Pieces are as long as both block sizes allow.
    """
    source_blocks = blocks_of(tokens, source_block_size)
    destination_blocks = blocks_of(tokens, destination_block_size)
    starts = {tokens.start, *(block * source_block_size for block in source_blocks[1:])}
    starts.update(block * destination_block_size for block in destination_blocks[1:])
    bounds = [*sorted(starts), tokens.stop] if tokens else []
    return tuple(
        TokenPiece(
            source_block=start // source_block_size,
            source_slot=start % source_block_size,
            destination_block=start // destination_block_size,
            destination_slot=start % destination_block_size,
            num_tokens=end - start,
        )
        for start, end in pairwise(bounds)
    )


def blocks_of(tokens: range, block_size: int) -> range:
    """Return which of a request's blocks hold `tokens`. Raises ValueError for what are no positions or no block size."""
    if tokens.step != 1 or tokens.start < 0:
        raise ValueError(f"tokens {tokens}: not neighbouring positions from 0 on")
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: must be at least 1")
    return range(tokens.start // block_size, -(-tokens.stop // block_size)) if tokens else range(0)
