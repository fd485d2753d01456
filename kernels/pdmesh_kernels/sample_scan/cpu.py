"""Draws by the CPU library: an answer is the definition's token, or UNDECIDED where rounding could decide."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import Library, LibraryError
from pdmesh_kernels.sample_scan.draws import DRAW


class Scanner:
    """Not for two threads at a time."""

    def __init__(self, library: Library, isa: Isa) -> None:
        self._isa = int(isa)
        self._draw = library.functions.pdm_sample_draw
        self._draw.restype = ctypes.c_int
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._draw.argtypes = [ctypes.c_int, pointer, size, ctypes.c_int, pointer, ctypes.c_int, pointer]

    def draw_tokens(self, logits_RV: NDArray[np.float32], draws: NDArray[np.void]) -> NDArray[np.int64]:
        """Draw one token for each of `draws`; UNDECIDED is left to the definition.

        | argument | shape | dtype | stride | device |
        |---|---|---|---|---|
        | `logits_RV` | rows, vocabulary | float32 | a row is contiguous | host |
        | `draws` | any | `DRAW` | contiguous | host |

        Reads the rows once or twice (4 V bytes each) and computes a Philox call for four tokens; sums in float64. The lock of
        Python is free meanwhile. Raises LibraryError when memory ran out.
        """
        if logits_RV.dtype != np.float32 or draws.dtype != DRAW or not draws.flags.c_contiguous:
            raise TypeError(f"logits must be float32, draws contiguous DRAW; got {logits_RV.dtype}, {draws.dtype}")
        if logits_RV.ndim != 2 or logits_RV.strides[1] != 4 or logits_RV.strides[0] % 4 or logits_RV.strides[0] < 0:
            raise ValueError(f"the rows of logits must be contiguous, strides are {logits_RV.strides}")
        num_rows, vocab = logits_RV.shape
        token_ids = np.empty(len(draws), dtype=np.int64)
        if not len(draws):
            return token_ids
        if not (0 <= draws["row"].min() <= draws["row"].max() < num_rows):
            raise ValueError(f"a draw's row is outside 0…{num_rows - 1}")
        if not (0 <= draws["best"].min() <= draws["best"].max() < vocab):
            raise ValueError(f"a draw's best id is outside 0…{vocab - 1}")
        stride = logits_RV.strides[0] // 4
        if self._draw(
            self._isa, logits_RV.ctypes.data, stride, vocab, draws.ctypes.data, len(draws), token_ids.ctypes.data
        ):
            raise LibraryError("pdm_sample_draw: out of memory")
        return token_ids
