"""silu_mul: the gated activation of a SwiGLU feed-forward, on the fused gate-and-up projection."""

import torch
import torch.nn.functional as functional

from pdmesh_kernels.checks import require, require_float
from pdmesh_kernels.silu_mul.reference import silu_mul_reference

__all__ = ["silu_mul", "silu_mul_reference"]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, a new tensor.

    | argument | shape   | dtype            | stride              |
    |----------|---------|------------------|---------------------|
    | gate_up  | [T, 2I], gate first | float32/16, bf16 | last dim contiguous |
    | result   | [T, I]  | as gate_up       | contiguous          |

    Moves 3·T·I elements. Below float32 the activation is rounded once before the product.
    """
    require_float("silu_mul", "gate_up", gate_up, 2)
    require(gate_up.shape[1] % 2 == 0, "silu_mul", f"gate_up must have an even width, has {gate_up.shape[1]}")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
