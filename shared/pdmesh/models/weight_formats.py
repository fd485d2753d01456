"""In which of the CPU library's formats a projection is kept, and its tensors put into it.

A quantised checkpoint stays as it is where that changes no number; otherwise its numbers are kept in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import ConfigError
from pdmesh.models.quantised_tensor import QuantisedTensor, concatenated
from pdmesh.models.weight_plan import Projection
from pdmesh.models.weights import WeightReader
from pdmesh_kernels.cpu.abi import Format
from pdmesh_kernels.cpu.library import Library, LibraryError
from pdmesh_kernels.cpu.packing import PackedWeight, pack_codes, pack_values

if TYPE_CHECKING:
    import torch

# What the library computes in.
ComputeDType = Literal["float32", "bfloat16"]
# Of weights that are quantised here. Accuracy by size: docs/quantization.md.
ONLINE_GROUP = 64


class Quantization(Enum):
    """What is done to compute with fewer bits than the checkpoint has."""

    NONE = "none"
    INT8 = "int8"
    """Weights and, as they come, activations in 8 bits."""
    INT8_WEIGHT_ONLY = "int8_weight_only"
    INT8_ACTIVATIONS = "int8_activations"
    """Activations in 8 bits where the checkpoint's weights are in 4: nothing else changes, weights least of all."""

    @property
    def of_weights(self) -> Quantization:
        """What is done with weights that the checkpoint has in full precision."""
        return Quantization.NONE if self is Quantization.INT8_ACTIVATIONS else self


@dataclass(frozen=True, slots=True)
class FormatChoice:
    format: Format
    group: int
    """0 where the format has none."""


def choose_format(
    reader: WeightReader, projection: Projection, dtype: ComputeDType, quantization: Quantization, *, is_table: bool
) -> FormatChoice:
    """Decide for one projection; `is_table`: it is the embedding or the head. Raises ConfigError for float32 with int8."""
    if dtype == "float32":
        if quantization is not Quantization.NONE:
            raise ConfigError(f"quantization: {quantization.value} needs --dtype bfloat16, not {dtype}")
        return FormatChoice(Format.F32, 0)
    own = _own_format(reader, projection)
    if own is not None:
        return own
    if quantization.of_weights is Quantization.NONE or is_table:
        return FormatChoice(Format.BF16, 0)
    if quantization is Quantization.INT8:
        return FormatChoice(Format.I8, 0)
    return FormatChoice(Format.Q8, ONLINE_GROUP)


def why_expanded(reader: WeightReader, projection: Projection, choice: FormatChoice) -> str:
    """Say why a projection that the checkpoint has in codes is kept in `choice`, expanded; empty where it is not, or in float32,
    which was asked for."""
    if choice.format is not Format.BF16:
        return ""
    names = [f"{name}.weight" for name in projection.parts]
    if reasons := sorted({reason for name in names if (reason := reader.why_expanded(name))}):
        return ", ".join(reasons)
    # Each of them could be kept, but not as one.
    return "parts in different formats" if any(reader.quantised_kind(name) is not None for name in names) else ""


def pack_projection(
    library: Library,
    reader: WeightReader,
    projection: Projection,
    choice: FormatChoice,
    target: NDArray[np.uint8] | None = None,
) -> PackedWeight:
    """Read the projection's tensors and pack them as one, into `target` where it is given.

    Raises ConfigError for weights that the format cannot hold.
    """
    import torch

    try:
        if _own_format(reader, projection) == choice and choice.format is not Format.BF16:
            return _pack_own(library, reader, projection, choice, target)
        values = torch.empty(projection.num_outputs, projection.num_inputs, dtype=_dtype_of(choice))
        for name, rows in zip(projection.parts, torch.split(values, list(projection.parts.values())), strict=True):
            reader.read(f"{name}.weight", rows)
        return pack_values(
            library, choice.format, values, group=choice.group, is_gated=projection.is_gated, target=target
        )
    except LibraryError as exc:
        raise ConfigError(f"{projection.name}: its weights cannot be kept as {choice.format.name}: {exc}") from exc


def _own_format(reader: WeightReader, projection: Projection) -> FormatChoice | None:
    """Return the format that holds all parts as the checkpoint has them; None where no single one does."""
    kinds = [reader.quantised_kind(f"{name}.weight") for name in projection.parts]
    present = [kind for kind in kinds if kind is not None]
    if len(present) < len(kinds) or len({kind.group for kind in present}) > 1:
        return None
    group, is_half = present[0].group, all(kind.is_half for kind in present)
    if all(kind.bits == 4 for kind in present):
        return FormatChoice(Format.Q4 if is_half else Format.Q4_WIDE, group)
    # Four bits fit into eight unless they have offsets, which eight have not.
    if is_half and all(kind.is_symmetric for kind in present):
        return FormatChoice(Format.Q8, group)
    return None


def _pack_own(
    library: Library,
    reader: WeightReader,
    projection: Projection,
    choice: FormatChoice,
    target: NDArray[np.uint8] | None,
) -> PackedWeight:
    parts: list[QuantisedTensor] = []
    for name in projection.parts:
        tensor = reader.read_quantised(f"{name}.weight")
        is_widened = choice.format is Format.Q8 and tensor.kind.bits == 4
        parts.append(tensor.in_eight_bits() if is_widened else tensor)
    whole = concatenated(parts)
    return pack_codes(
        library,
        choice.format,
        whole.codes,
        whole.scales,
        None if choice.format is Format.Q8 else whole.offsets,
        group=choice.group,
        is_gated=projection.is_gated,
        target=target,
    )


def _dtype_of(choice: FormatChoice) -> torch.dtype:
    import torch

    # What is quantised here is taken as exactly as the checkpoint has it.
    return torch.bfloat16 if choice.format is Format.BF16 else torch.float32
