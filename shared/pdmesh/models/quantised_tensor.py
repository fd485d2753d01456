"""A weight matrix as a quantised checkpoint has it: small codes, and per group of inputs what turns them into numbers.

Legend: n outputs, K inputs, G = K / group rounded up.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuantisedKind:
    """What is known of a tensor before its codes are read."""

    bits: Literal[4, 8]
    group: int
    """Inputs that share a scale, a multiple of 32."""
    is_half: bool
    """Every scale and offset is a number of float16."""
    is_symmetric: bool
    """Offsets are -scale * 2 ** (bits - 1), so the codes are signed numbers."""


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """w[n, k] = scales[n, k // group] * codes[n, k] + offsets[n, k // group], exact in float32 but for one rounding."""

    kind: QuantisedKind
    codes: NDArray[np.uint8]
    """[n, K]"""
    scales: NDArray[np.float32]
    """[n, G]"""
    offsets: NDArray[np.float32]
    """[n, G]"""

    def dequantised(self) -> NDArray[np.float32]:
        """Return [n, K]."""
        group, num_inputs = self.kind.group, self.codes.shape[1]
        values = self.codes.astype(np.float32)
        for index in range(self.scales.shape[1]):
            inputs = slice(index * group, min((index + 1) * group, num_inputs))
            values[:, inputs] *= self.scales[:, index : index + 1]
            values[:, inputs] += self.offsets[:, index : index + 1]
        return values

    def take_rows(self, rows: NDArray[np.intp]) -> "QuantisedTensor":
        return QuantisedTensor(self.kind, self.codes[rows], self.scales[rows], self.offsets[rows])

    def in_eight_bits(self) -> "QuantisedTensor":
        """Return the same numbers of a symmetric 4-bit tensor in 8 bits."""
        kind = QuantisedKind(8, self.kind.group, self.kind.is_half, True)
        return QuantisedTensor(kind, self.codes + np.uint8(120), self.scales, self.scales * np.float32(-128))


def concatenated(tensors: list[QuantisedTensor]) -> QuantisedTensor:
    """Return tensors of the same bits and group as one, rows behind rows."""
    kinds = [tensor.kind for tensor in tensors]
    kind = QuantisedKind(
        kinds[0].bits,
        kinds[0].group,
        all(kind.is_half for kind in kinds),
        all(kind.is_symmetric for kind in kinds),
    )
    return QuantisedTensor(
        kind,
        np.concatenate([tensor.codes for tensor in tensors]),
        np.concatenate([tensor.scales for tensor in tensors]),
        np.concatenate([tensor.offsets for tensor in tensors]),
    )
