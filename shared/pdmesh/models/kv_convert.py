"""KV blocks of one layout made into those of another, through the order that all backends share.

For an engine that fetches from a peer whose block size, number format or packing is not its own: what came in the peer's blocks
is converted before the request's first step. The copy is on the CPU, in memory of several times the blocks' size.
"""

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import HandshakeRefused
from pdmesh.models.kv_items import HELD_AS, convert_items
from pdmesh.protocol.layout import CPU_PACKING, Layout, incompatibility
from pdmesh.protocol.token_pieces import blocks_of, map_tokens
from pdmesh_kernels.cpu.kv_layout import KVItems


def convert(
    blocks: NDArray[np.uint8],
    source: Layout,
    target: Layout,
    *,
    tokens: range | None = None,
    first_block: int = 0,
) -> NDArray[np.uint8]:
    """Return `tokens` of a request in new blocks [M, target.block_bytes] of `target`.

    `blocks` [N, at least source.block_bytes] follow each other in the request; `first_block` is the index there of the first of
    them, in the source's block size. `tokens` are positions in the request, by default all that `blocks` have room for. The first
    new block is the one that holds `tokens.start`, in the target's block size; slots of other tokens are zero, whatever is in the
    source's.

    Equal dtypes keep every bit, int8's scales too; otherwise numbers are rounded as `convert_items` has it.

    Raises HandshakeRefused where `incompatibility` has a reason, TransferFailed for numbers too large for the target's dtype, and
    ValueError for tokens that are not in `blocks`.
    """
    if (reason := incompatibility(source, target)) is not None:
        raise HandshakeRefused(reason)
    held = range(first_block * source.block_size, (first_block + len(blocks)) * source.block_size)
    tokens = held if tokens is None else tokens
    new_blocks = blocks_of(tokens, target.block_size)
    if tokens and not held.start <= tokens.start < tokens.stop <= held.stop:
        raise ValueError(f"tokens {tokens}: the blocks hold {held}")
    if not tokens:
        return np.zeros((0, target.block_bytes), np.uint8)
    unpacked = unpack(blocks, source)
    moved = _empty_blocks(unpacked, len(new_blocks), target.block_size)
    for piece in map_tokens(tokens, source.block_size, target.block_size):
        to = slice(piece.destination_slot, piece.destination_slot + piece.num_tokens)
        of = slice(piece.source_slot, piece.source_slot + piece.num_tokens)
        index, from_index = piece.destination_block - new_blocks.start, piece.source_block - first_block
        moved.items[index, ..., to, :] = unpacked.items[from_index, ..., of, :]
        if moved.scales is not None and unpacked.scales is not None:
            moved.scales[index, ..., to] = unpacked.scales[from_index, ..., of]
    return pack(convert_items(moved, source.dtype, target.dtype), target)


def unpack(blocks: NDArray[np.uint8], layout: Layout) -> KVItems:
    """Return copies of the items in `blocks` [N, at least block_bytes], as `HELD_AS` has them."""
    if layout.packing == CPU_PACKING:
        return layout.cpu_layout().unpack(blocks)
    size = layout.block_bytes
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] < size:
        raise ValueError(f"blocks are {blocks.dtype} {blocks.shape}, not uint8 [N, {size} or more]")
    items = np.array(blocks[:, :size], order="C").view(HELD_AS[layout.dtype])
    return KVItems(items=items.reshape(len(blocks), *layout.block_shape), scales=None)


def pack(items: KVItems, layout: Layout) -> NDArray[np.uint8]:
    """Return new blocks [N, block_bytes] that hold the items, whose dtype is the layout's."""
    blocks = np.zeros((len(items.items), layout.block_bytes), np.uint8)
    if layout.packing == CPU_PACKING:
        layout.cpu_layout().pack(items, blocks)
    else:
        blocks[:] = np.ascontiguousarray(items.items).reshape(len(blocks), -1).view(np.uint8)
    return blocks


def _empty_blocks(like: KVItems, num_blocks: int, block_size: int) -> KVItems:
    """Zeros of the same model and dtype."""
    _, layers, heads, halves, _, head_dim = like.items.shape
    shape = (num_blocks, layers, heads, halves, block_size)
    return KVItems(
        items=np.zeros((*shape, head_dim), like.items.dtype),
        scales=None if like.scales is None else np.zeros(shape, np.float32),
    )
