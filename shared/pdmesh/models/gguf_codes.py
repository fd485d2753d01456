"""ggml's 4- and 8-bit blocks as codes, scales and offsets, for backends that multiply them as they are.

Block formats: ggml-quants in ggml's sources; all little-endian.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdmesh.models.ggml_types import GGMLType
from pdmesh.models.quantised_tensor import QuantisedKind, QuantisedTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

KINDS = {
    GGMLType.Q4_0: QuantisedKind(4, 32, is_half=True, is_symmetric=True),
    GGMLType.Q4_1: QuantisedKind(4, 32, is_half=True, is_symmetric=False),
    GGMLType.Q8_0: QuantisedKind(8, 32, is_half=True, is_symmetric=True),
    # Scales are products of a float16 and an integer.
    GGMLType.Q4_K: QuantisedKind(4, 32, is_half=False, is_symmetric=False),
}
"""The types whose numbers are a scale times a code plus an offset, in groups of 32 inputs and more."""


def codes_of(raw: Bytes, kind: GGMLType, num_outputs: int, num_inputs: int) -> QuantisedTensor:
    """Take apart `raw`, a tensor's bytes as in the file; `kind` is one of KINDS."""
    block_bytes, take_apart = _BLOCK_FORMATS[kind]
    codes, scales, offsets = take_apart(raw.reshape(-1, block_bytes))
    num_groups = num_inputs // 32
    return QuantisedTensor(
        KINDS[kind],
        codes.reshape(num_outputs, num_inputs),
        scales.reshape(num_outputs, num_groups),
        offsets.reshape(num_outputs, num_groups),
    )


def _halves(blocks: Bytes, offset: int) -> Floats:
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The low four bits of all bytes are a block's first half, the high ones its second."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, scales * np.float32(-8)


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _halves(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scales, scales * np.float32(-128)


def _q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Eight groups of 32 with 6-bit scales and minima, which two float16 of the block multiply.

    Twelve bytes hold them: four scales and four minima in their low six bits; the other eight in nibbles and high bits.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes, _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


_BLOCK_FORMATS: dict[GGMLType, tuple[int, Callable[[Bytes], tuple[Bytes, Floats, Floats]]]] = {
    GGMLType.Q4_0: (18, _q4_0),
    GGMLType.Q4_1: (20, _q4_1),
    GGMLType.Q8_0: (34, _q8_0),
    GGMLType.Q4_K: (144, _q4_k),
}
"""Bytes per block, and blocks -> codes, scales, offsets."""
