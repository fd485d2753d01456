"""A linear layer and what is fused to it: bias, then a gate of its two halves, then the sum with a residual."""

from enum import Enum

import torch

from pdmesh_kernels.gelu_mul.reference import gelu_mul_reference
from pdmesh_kernels.silu_mul.reference import silu_mul_reference


class Gate(Enum):
    """What joins the halves of a fused gate-and-up projection."""

    SILU_MUL = "silu_mul"
    GELU_MUL = "gelu_mul"


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
