"""Memory beside a pool in which a peer's blocks land when they are of another layout, until they are converted.

Parted into lanes, each of which one pull fills with blocks of whatever size the peer's have. Anonymous like the pool's; pages
are taken when they are first written, so an engine whose peers are all alike pays nothing.
"""

import contextlib
import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdmesh.protocol.layout import MAX_LANE_BLOCKS

PAGE_BYTES = 4096
NUM_LANES = 4


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane, cut into blocks of a peer's size. A pull counts its target blocks from the lane's start."""

    index: int
    block_bytes: int

    @property
    def first_word(self) -> int:
        """Place of its first block among the words of all lanes."""
        return self.index * MAX_LANE_BLOCKS


class StagingArea:
    """The mapped area. Made with a size it creates the file, with a descriptor it maps what another process has made."""

    def __init__(self, lane_bytes: int, fd: int | None = None) -> None:
        """`lane_bytes` is rounded down to pages. Raises OSError when there is no memory, ValueError for less than a page."""
        self.lane_bytes = lane_bytes // PAGE_BYTES * PAGE_BYTES
        if not self.lane_bytes:
            raise ValueError(f"a lane of {lane_bytes} bytes is less than a page")
        self.total_bytes = self.lane_bytes * NUM_LANES
        self.fd = os.memfd_create("pdmesh-kv-staging", os.MFD_CLOEXEC) if fd is None else os.dup(fd)
        if fd is None:
            os.ftruncate(self.fd, self.total_bytes)
        self._map = mmap.mmap(self.fd, self.total_bytes, flags=mmap.MAP_SHARED)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def num_blocks(self, block_bytes: int) -> int:
        """Return how many blocks of that size a lane holds."""
        return min(self.lane_bytes // block_bytes, MAX_LANE_BLOCKS) if block_bytes > 0 else 0

    def blocks(self, lane: Lane) -> NDArray[np.uint8]:
        """Return the lane's memory as [num_blocks, block_bytes]. Raises ValueError for a lane that is not there."""
        count = self.num_blocks(lane.block_bytes)
        if not 0 <= lane.index < NUM_LANES or not count:
            raise ValueError(f"there is no {lane} in {NUM_LANES} lanes of {self.lane_bytes} bytes")
        begin = self.offset(lane)
        return self.bytes[begin : begin + count * lane.block_bytes].reshape(count, lane.block_bytes)

    def offset(self, lane: Lane) -> int:
        """Return where the lane begins in the area."""
        return lane.index * self.lane_bytes

    def close(self) -> None:
        """Drop the mapping; views handed out before keep it alive until they go."""
        del self.bytes
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)
