"""Sums by the CPU library: one pass over memory, also where it copies."""

import ctypes

import numpy as np

from pdmesh_kernels.block_sum.reference import Blocks, Count, Ids, Sums
from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import Library


class CpuBlockSums:
    """The functions of `reference`, with the same results. Thread-safe; Python's lock is free meanwhile."""

    def __init__(self, library: Library, isa: Isa) -> None:
        self._isa = int(isa)
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._sum = library.functions.pdm_block_sums
        self._sum.restype, self._sum.argtypes = None, [integer, pointer, size, pointer, integer, pointer]
        self._copy = library.functions.pdm_copy_blocks
        self._copy.restype = None
        self._copy.argtypes = [integer, pointer, pointer, pointer, pointer, size, integer, pointer]
        self._arrivals = library.functions.pdm_sum_arrivals
        self._arrivals.restype = integer
        self._arrivals.argtypes = [integer, pointer, size, pointer, integer, integer, pointer, integer, pointer]

    def sum_blocks(self, blocks_NB: Blocks, ids: Ids) -> Sums:
        sums = np.empty(len(ids), dtype=np.uint64)
        self._sum(self._isa, blocks_NB.ctypes.data, blocks_NB.shape[1], ids.ctypes.data, len(ids), sums.ctypes.data)
        return sums

    def copy_blocks(self, target_NB: Blocks, target_ids: Ids, source_NB: Blocks, source_ids: Ids) -> Sums:
        sums = np.empty(len(source_ids), dtype=np.uint64)
        self._copy(
            self._isa,
            target_NB.ctypes.data,
            target_ids.ctypes.data,
            source_NB.ctypes.data,
            source_ids.ctypes.data,
            source_NB.shape[1],
            len(source_ids),
            sums.ctypes.data,
        )
        return sums

    def sum_arrivals(
        self, blocks_NB: Blocks, ids: Ids, arrived: Count, num_done: int, sums: Sums, patience_s: float
    ) -> int:
        num: int = self._arrivals(
            self._isa,
            blocks_NB.ctypes.data,
            blocks_NB.shape[1],
            ids.ctypes.data,
            num_done,
            len(ids),
            arrived.ctypes.data,
            int(patience_s * 1e6),
            sums.ctypes.data,
        )
        return num
