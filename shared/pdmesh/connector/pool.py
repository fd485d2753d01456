"""A pool of KV blocks in anonymous shared memory (memfd), and the generation words that make late reads detectable.

Layout of the file: `num_blocks` little-endian uint64 generation words, padded to a page, then `num_blocks` blocks of
`block_bytes` each. The owner maps it read-write and bumps a block's word before the block gets new content; consumers map
it read-only. Nothing has a name in the file system, so nothing is left behind when a process is killed.
"""

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmesh.connector.staging import Lane, StagingArea

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How large a pool is; equal shapes on both sides are needed to read one."""

    num_blocks: int
    block_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes before the first block."""
        return -(-self.num_blocks * 8 // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.num_blocks * self.block_bytes


class PullTarget:
    """Blocks that a pull writes to. Whoever keeps it keeps no memory mapped: its views are made when they are asked for."""

    def __init__(self, pool: "KVPool", lane: Lane | None) -> None:
        """Raises ValueError for a lane that is not there."""
        self._pool = pool
        self._lane = lane
        self.shape = pool.shape if lane is None else PoolShape(len(self.blocks), lane.block_bytes)

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """uint8 [num_blocks, block_bytes]."""
        if self._lane is None:
            return self._pool.blocks
        if self._pool.staging is None:
            raise ValueError("this pool has no staging area")
        return self._pool.staging.blocks(self._lane)


class KVPool:
    """A mapped pool. `generations` is uint64 [num_blocks], `blocks` uint8 [num_blocks, block_bytes].

    Owns its mapping, not `fd`'s lifetime: `close` unmaps and closes the duplicate it holds.
    """

    def __init__(self, fd: int, shape: PoolShape, *, writable: bool) -> None:
        self.fd = os.dup(fd)
        self.shape = shape
        self.writable = writable
        self.on_bump: Callable[[list[int]], None] | None = None
        """Called with what `bump` was given."""
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self.staging: StagingArea | None = None
        """Where blocks of other sizes may be pulled to; the caller's to set before a connector registers the pool."""
        self._map = mmap.mmap(self.fd, shape.total_bytes, flags=mmap.MAP_SHARED, prot=access)
        self.generations: NDArray[np.uint64] = np.frombuffer(self._map, dtype="<u8", count=shape.num_blocks)
        self.blocks: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8, offset=shape.header_bytes).reshape(
            shape.num_blocks, shape.block_bytes
        )

    def bump(self, block_ids: list[int]) -> None:
        """Give each block a new generation; call before its content changes hands."""
        self.generations[block_ids] += np.uint64(1)
        if self.on_bump is not None:
            self.on_bump(block_ids)

    def target(self, lane: Lane | None) -> PullTarget:
        """Return the blocks that a pull writes to: this pool's, or those of a lane of its staging area.

        Raises ValueError for a lane that is not there.
        """
        return PullTarget(self, lane)

    def generations_of(self, block_ids: list[int]) -> list[int]:
        return [int(word) for word in self.generations[block_ids]]

    def close(self) -> None:
        """Drop the mapping; views handed out before keep it alive until they go."""
        del self.generations, self.blocks
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


def create_pool_file(name: str) -> int:
    """Create an empty memfd to be inherited by the process that will size and own it; `name` is for /proc only."""
    return os.memfd_create(f"pdmesh-{name}", os.MFD_CLOEXEC)


def size_pool_file(fd: int, shape: PoolShape) -> None:
    """Give the file its size and its first generation words. Memory is taken page by page as blocks are first written."""
    os.ftruncate(fd, shape.total_bytes)
    # A random start: what was promised of one start of an owner never matches the pool of its next.
    first = secrets.randbits(62).to_bytes(8, "little")
    os.pwrite(fd, first * shape.num_blocks, 0)


def read_only_fd(fd: int) -> int:
    """Open the same file again for reading only, to hand to a consumer. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
