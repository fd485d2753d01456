"""Weights into the CPU library's panels: from values, or from a quantised checkpoint's own codes.

Both release the interpreter's lock, so several weights can be packed by several threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdmesh_kernels.cpu.abi import PANEL, Format, Weight
from pdmesh_kernels.cpu.library import Library

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
# Rows widened to float32 at a time: a vocabulary's whole table would double a small model's memory.
CHUNK_ROWS = 128 * PANEL


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [num_outputs, num_inputs] as the library reads it."""

    format: Format
    num_outputs: int
    num_inputs: int
    group: int
    """Inputs that share a scale; 0 where the format has none."""
    is_gated: bool
    panels: NDArray[np.uint8]
    """Flat, 64-byte aligned; may be mapped from a file."""

    def structure(self, *, int8_rows: bool = False) -> Weight:
        """Return the library's description of it, which borrows `panels`. `int8_rows`: what is multiplied with it is quantised
        to 8 bits first, which weights in 4 bits allow."""
        num_panels = panel_count(self.num_outputs, self.is_gated)
        return Weight(
            format=self.format,
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            group=self.group,
            is_gated=self.is_gated,
            int8_rows=int8_rows,
            panel_bytes=self.panels.nbytes // num_panels,
            panels=self.panels.ctypes.data,
        )


def panel_count(num_outputs: int, is_gated: bool) -> int:
    """Return how many panels a weight has; a gated one has half a panel of each kind in each."""
    return -(-num_outputs // 2 // (PANEL // 2)) if is_gated else -(-num_outputs // PANEL)


def packed_bytes(
    library: Library, format: Format, num_outputs: int, num_inputs: int, group: int, is_gated: bool
) -> int:
    """Return the size of `PackedWeight.panels`; 0 for a group that the format does not allow."""
    panel_bytes: int = library.functions.pdm_panel_bytes(format, num_inputs, group)
    return panel_bytes * panel_count(num_outputs, is_gated)


def pack_values(
    library: Library,
    format: Format,
    values: torch.Tensor,
    *,
    group: int = 0,
    is_gated: bool = False,
    target: NDArray[np.uint8] | None = None,
) -> PackedWeight:
    """Pack a float tensor [n, K]; I8 and Q8 (with `group`) are quantised here. `is_gated`: its rows are gate, then up.

    `target`: where to write, `packed_bytes` long and aligned; else new memory. Raises LibraryError where the format cannot
    hold it: a value that is not finite, or is too large.
    """
    num_outputs, num_inputs = values.shape
    panels = _panels(library, format, num_outputs, num_inputs, group, is_gated, target)
    chunk_rows = num_outputs if is_gated else CHUNK_ROWS
    for start in range(0, num_outputs, chunk_rows):
        rows = values[start : start + chunk_rows].float().contiguous()
        address = panels.ctypes.data + packed_bytes(library, format, start, num_inputs, group, False)
        library.call("pdm_pack", format, rows.shape[0], num_inputs, group, is_gated, rows.data_ptr(), address)
    return PackedWeight(format, num_outputs, num_inputs, group, is_gated, panels)


def pack_codes(
    library: Library,
    format: Format,
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32] | None,
    *,
    group: int,
    is_gated: bool = False,
    target: NDArray[np.uint8] | None = None,
) -> PackedWeight:
    """Pack codes [n, K], w = scale * code + offset per `group` inputs: scales and offsets [n, K / group rounded up].

    Q8 has codes of 128 more than the number, and no offsets. `target` as for `pack_values`. Raises LibraryError where the
    format cannot hold them exactly.
    """
    num_outputs, num_inputs = codes.shape
    wanted = (num_outputs, -(-num_inputs // group))
    if scales.shape != wanted or (offsets is not None and offsets.shape != wanted):
        raise ValueError(f"scales and offsets of {num_outputs} x {num_inputs} in groups of {group} must be {wanted}")
    codes = np.ascontiguousarray(codes, dtype=np.uint8)
    scales = np.ascontiguousarray(scales, dtype=np.float32)
    offsets = None if offsets is None else np.ascontiguousarray(offsets, dtype=np.float32)
    panels = _panels(library, format, num_outputs, num_inputs, group, is_gated, target)
    library.call(
        "pdm_pack_codes",
        format,
        num_outputs,
        num_inputs,
        group,
        is_gated,
        codes.ctypes.data,
        scales.ctypes.data,
        None if offsets is None else offsets.ctypes.data,
        panels.ctypes.data,
    )
    return PackedWeight(format, num_outputs, num_inputs, group, is_gated, panels)


def aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory of this size that begins where the library wants weights and KV pools to; it holds anything."""
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes]


def unpack_row(library: Library, weight: PackedWeight, row: int) -> NDArray[np.float32]:
    """Return one row as products use it: rounded to bfloat16 where they are."""
    values = np.empty(weight.num_inputs, dtype=np.float32)
    library.call("pdm_unpack_row", ctypes.byref(weight.structure()), row, values.ctypes.data)
    return values


def _panels(
    library: Library,
    format: Format,
    num_outputs: int,
    num_inputs: int,
    group: int,
    is_gated: bool,
    target: NDArray[np.uint8] | None,
) -> NDArray[np.uint8]:
    num_bytes = packed_bytes(library, format, num_outputs, num_inputs, group, is_gated)
    if target is not None:
        if target.shape != (num_bytes,) or target.ctypes.data % ALIGNMENT:
            raise ValueError(f"target must be {num_bytes} bytes at a multiple of {ALIGNMENT}, is {target.shape}")
        return target
    return aligned_bytes(num_bytes)
