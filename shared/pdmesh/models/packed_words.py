"""AWQ's and GPTQ's 32-bit words taken apart, and what a group's scale and zero point mean.

Legend: n outputs, K inputs, G groups. Formats: the AutoAWQ (GEMM) and AutoGPTQ checkpoints; w = scale * (code - zero).
"""

import numpy as np
from numpy.typing import NDArray

from pdmesh.models.checkpoint_quantization import PackedFormat

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each nibble of a word holds, from the lowest."""


def unpack_codes(words: NDArray[np.int32], packed: PackedFormat, bits: int) -> NDArray[np.uint8]:
    """Return codes [n, K] of a `qweight`."""
    if packed is PackedFormat.AWQ:
        return np.ascontiguousarray(unpack_outputs(words, packed, bits).T)
    per_word = 32 // bits
    codes = np.empty((words.shape[1], words.shape[0] * per_word), dtype=np.uint8)
    for place in range(per_word):
        codes[:, place::per_word] = _field(words, place, bits).T
    return codes


def unpack_outputs(words: NDArray[np.int32], packed: PackedFormat, bits: int) -> NDArray[np.uint8]:
    """Return [rows, n] of words [rows, n / 8] that hold neighbouring outputs: AWQ's `qweight`, and `qzeros` of all."""
    per_word = 32 // bits
    order = AWQ_ORDER if packed is PackedFormat.AWQ else range(per_word)
    codes = np.empty((words.shape[0], words.shape[1] * per_word), dtype=np.uint8)
    for place, output in enumerate(order):
        codes[:, output::per_word] = _field(words, place, bits)
    return codes


def zero_points(words: NDArray[np.int32], packed: PackedFormat, bits: int) -> NDArray[np.float32]:
    """Return [n, G] of a `qzeros` [G, n / 8]."""
    zeros = unpack_outputs(words, packed, bits).T.astype(np.float32)
    # One more than the largest code is possible, and is meant.
    return zeros + np.float32(1) if packed is PackedFormat.GPTQ else zeros


def _field(words: NDArray[np.int32], place: int, bits: int) -> NDArray[np.uint8]:
    return (words >> np.int32(bits * place)).astype(np.uint8) & np.uint8((1 << bits) - 1)
