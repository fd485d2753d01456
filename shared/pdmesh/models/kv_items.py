"""Keys and values from one number format to another, as a KV block holds them.

Numbers are rounded to nearest, ties to even. NaN stays NaN and an infinity stays one, except that in int8 either spoils its
whole row with NaN, as in the CPU library; what is finite never becomes infinite.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import TransferFailed
from pdmesh_kernels.cpu.kv_layout import KVItems

HELD_AS: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int8": np.int8,
}
"""Each format in numpy: bfloat16 as its bits, int8 with a scale per token and head."""


def convert_items(source: KVItems, source_dtype: str, target_dtype: str) -> KVItems:
    """Return the items in `target_dtype`, and the same object where the two are equal. Both are keys of HELD_AS.

    Raises TransferFailed for numbers that are finite, and too large for `target_dtype`.
    """
    if source_dtype == target_dtype:
        return source
    floats = _floats(source, source_dtype)
    if target_dtype == "int8":
        return _quantise(floats)
    if target_dtype == "float32":
        return KVItems(items=floats, scales=None)
    is_half = target_dtype == "float16"
    with np.errstate(over="ignore"):
        items: NDArray[Any] = floats.astype(np.float16) if is_half else _bfloat16_bits(floats)
    infinite = np.isinf(items) if is_half else (items & 0x7FFF) == 0x7F80
    lost = infinite & np.isfinite(floats)
    if lost.any():
        raise TransferFailed(
            f"{np.count_nonzero(lost)} keys and values are too large for {target_dtype}, the largest is "
            f"{np.abs(floats[lost]).max():g} in {source_dtype}"
        )
    return KVItems(items=items, scales=None)


def _floats(source: KVItems, dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (source.items.astype(np.uint32) << 16).view(np.float32)
    floats: NDArray[np.float32] = source.items.astype(np.float32)
    if source.scales is None:
        return floats
    # A scale that is no number makes its row none.
    with np.errstate(invalid="ignore"):
        return floats * source.scales[..., None]


def _bfloat16_bits(floats: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(floats).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    # Rounding up could carry a NaN's payload into its exponent: it is cut off instead, with one bit set so that it stays a NaN.
    return np.where(np.isnan(floats), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _quantise(floats: NDArray[np.float32]) -> KVItems:
    """Scale each token and head so that its largest magnitude becomes 127."""
    # NaN goes through `max`; rows too small for a float to hold their inverse become zero.
    largest = np.abs(floats).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.float32(127) / largest
        too_small = np.isinf(inverse)
        inverse[too_small] = 0
        scaled = np.rint(floats * inverse[..., None])
    spoilt = ~np.isfinite(largest)
    scales = np.where(too_small, np.float32(0), largest / np.float32(127))
    scales[spoilt] = np.nan
    scaled[spoilt] = 0
    return KVItems(items=np.clip(scaled, -127, 127).astype(np.int8), scales=scales)
