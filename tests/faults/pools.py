"""Looks into engines' KV pools from outside, and damages them: their memory, as the kernel shows it to whoever may look."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from faults.node import Node
from pdmesh.connector.pool import PoolShape

FLIPPED_BYTES = slice(3, None, 64)
"""Sign and exponent of some float32 numbers."""


def damage(node: Node) -> int:
    """Turn bits in every block that is not empty; how many those were."""
    blocks = _blocks(node)
    used = blocks.any(axis=1)
    blocks[used, FLIPPED_BYTES] ^= 0x55
    return int(used.sum())


def contents(node: Node) -> set[bytes]:
    """The blocks of an engine that are not empty, byte for byte."""
    blocks = _blocks(node)
    return {block.tobytes() for block in blocks[blocks.any(axis=1)]}


def _blocks(node: Node) -> NDArray[np.uint8]:
    """The blocks of a pool, in place; unmapped when nobody has a view of them any more."""
    shape = PoolShape(*node.pool_shape())
    with node.pool_file().open("r+b") as file:
        memory = mmap.mmap(file.fileno(), shape.total_bytes)
    return np.frombuffer(memory, dtype=np.uint8, offset=shape.header_bytes).reshape(-1, shape.block_bytes)
