"""gelu_mul: the gated activation of a GeGLU feed-forward, on the fused gate-and-up projection."""

import torch
import torch.nn.functional as functional

from pdmesh_kernels.checks import require, require_float
from pdmesh_kernels.gelu_mul.reference import gelu_mul_reference

__all__ = ["gelu_mul", "gelu_mul_reference"]


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up with GELU's tanh form, a new tensor.

    | argument | shape   | dtype            | stride              |
    |----------|---------|------------------|---------------------|
    | gate_up  | [T, 2I], gate first | float32/16, bf16 | last dim contiguous |
    | result   | [T, I]  | as gate_up       | contiguous          |

    Moves 3·T·I elements. Below float32 the activation is rounded once before the product.
    """
    require_float("gelu_mul", "gate_up", gate_up, 2)
    require(gate_up.shape[1] % 2 == 0, "gelu_mul", f"gate_up must have an even width, has {gate_up.shape[1]}")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
