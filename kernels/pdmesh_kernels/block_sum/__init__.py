"""block_sum: 64-bit sums of blocks of bytes, alone or in the same pass as a copy of them, to tell damage on the way.

| argument | shape | dtype | stride | device |
|---|---|---|---|---|
| `blocks`, `target`, `source` | blocks, bytes of one | uint8 | contiguous | host |
| `ids` | any; within the blocks | int64 or a list | contiguous | host |

Reads each block once, and writes it once where it is copied; the CPU library does both in one pass, past the caches. Nothing here
imports torch or builds anything: where the library is not there, numpy computes the same.
"""

import functools
import logging
from collections.abc import Sequence

import numpy as np

from pdmesh_kernels.block_sum import reference
from pdmesh_kernels.block_sum.cpu import CpuBlockSums
from pdmesh_kernels.block_sum.reference import Blocks, Ids, Sums
from pdmesh_kernels.cpu.library import LibraryError, find

__all__ = ["Arrivals", "Blocks", "Sums", "copy_blocks", "sum_blocks"]

log = logging.getLogger(__name__)


def sum_blocks(blocks: Blocks, ids: "Sequence[int] | Ids") -> Sums:
    """Return the sum of each block of `ids`."""
    checked = _checked(blocks, ids)
    library = _library()
    return reference.sum_blocks(blocks, checked) if library is None else library.sum_blocks(blocks, checked)


def copy_blocks(
    target: Blocks, target_ids: "Sequence[int] | Ids", source: Blocks, source_ids: "Sequence[int] | Ids"
) -> Sums:
    """Copy blocks `source_ids` of one array to `target_ids` of another that does not overlap it; return their sums.

    A target that is named twice holds one of its sources.
    """
    to, of = _checked(target, target_ids), _checked(source, source_ids)
    if target.shape[1] != source.shape[1] or len(to) != len(of):
        raise ValueError(f"{len(of)} blocks of {source.shape[1]} bytes cannot be {len(to)} of {target.shape[1]} bytes")
    library = _library()
    function = reference.copy_blocks if library is None else library.copy_blocks
    return function(target, to, source, of)


class Arrivals:
    """Sums blocks while they arrive, in a thread beside the one that fetches them."""

    def __init__(self, blocks: Blocks, ids: "Sequence[int] | Ids") -> None:
        self._blocks = blocks
        self._ids = _checked(blocks, ids)
        self._arrived = np.zeros(1, dtype=np.int32)
        self._num_summed = 0
        self.sums = np.zeros(len(self._ids), dtype=np.uint64)
        """Of those that have been summed."""

    @property
    def has_more(self) -> bool:
        """Whether something has arrived that is not summed."""
        return int(self._arrived[0]) > self._num_summed

    @property
    def num_summed(self) -> int:
        """How many have been summed."""
        return self._num_summed

    @property
    def is_whole(self) -> bool:
        """Whether all is summed."""
        return self._num_summed == len(self._ids)

    def note(self, num_arrived: int) -> None:
        """Say how many blocks have arrived; less than none says that no more will. For another thread than that of `follow`."""
        self._arrived[0] = num_arrived

    def follow(self, patience_s: float) -> None:
        """Sum what arrives until it is all there or nothing has come for so long. Python's lock is free meanwhile."""
        library = _library()
        function = reference.sum_arrivals if library is None else library.sum_arrivals
        self._num_summed = function(self._blocks, self._ids, self._arrived, self._num_summed, self.sums, patience_s)


@functools.cache
def _library() -> CpuBlockSums | None:
    try:
        library = find()
        return CpuBlockSums(library, library.isas[0])
    except (LibraryError, AttributeError) as exc:
        log.info("blocks are summed by numpy: %s", exc)
        return None


def _checked(blocks: Blocks, ids: "Sequence[int] | Ids") -> Ids:
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or not blocks.flags.c_contiguous:
        raise TypeError(f"blocks must be contiguous uint8 [N, B]; got {blocks.dtype} with {blocks.ndim} dimensions")
    checked = np.ascontiguousarray(ids, dtype=np.int64)
    if checked.size and not 0 <= checked.min() <= checked.max() < len(blocks):
        raise ValueError(f"a block lies outside 0…{len(blocks) - 1}")
    return checked
