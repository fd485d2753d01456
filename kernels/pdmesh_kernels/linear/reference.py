"""A linear layer and what is fused to it: bias, then a gate of its two halves, then the sum with a residual."""

from enum import Enum

import torch

from pdmesh_kernels.gelu_mul.reference import gelu_mul_reference
from pdmesh_kernels.silu_mul.reference import silu_mul_reference

INT8_GROUP = 32
"""Inputs of a row that share a scale."""


class Gate(Enum):
    """What joins the halves of a fused gate-and-up projection."""

    SILU_MUL = "silu_mul"
    GELU_MUL = "gelu_mul"


def int8_rows_reference(x: torch.Tensor) -> torch.Tensor:
    """Return x [M, K] in float32 as 8 bits leave it: whole multiples of 1/127 of the largest of each 32 inputs."""
    num_rows, num_inputs = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -num_inputs % INT8_GROUP)).view(num_rows, -1, INT8_GROUP)
    most = groups.abs().amax(dim=2, keepdim=True)
    factors = torch.where(most > 0, torch.tensor(127.0) / most, 0.0)
    return (torch.round(groups * factors) * (most / 127.0)).view(num_rows, -1)[:, :num_inputs]


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: Gate | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias
    if gate is not None:
        y = silu_mul_reference(y) if gate is Gate.SILU_MUL else gelu_mul_reference(y)
    return y.to(x.dtype) if residual is None else residual + y
