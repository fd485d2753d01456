"""layer_norm: centre each row, scale it to unit variance, then by a learned gain, and add a learned bias."""

import torch
import torch.nn.functional as functional

from pdmesh_kernels.checks import require, require_float, require_shape
from pdmesh_kernels.layer_norm.reference import layer_norm_reference

__all__ = ["layer_norm", "layer_norm_reference"]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim, a new tensor.

    | argument | shape | dtype            | stride              |
    |----------|-------|------------------|---------------------|
    | x        | [T, D] | float32/16, bf16 | last dim contiguous |
    | weight   | [D]   | as x, or float32 | contiguous          |
    | bias     | [D]   | as weight        | contiguous          |
    | result   | as x  | as x             | contiguous          |

    Moves 2·|x| elements; accumulates in float32, and rounds once. In the CPU library it is `pdm_norm` with `is_layer_norm`.
    """
    require_float("layer_norm", "x", x, 2)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            require_shape("layer_norm", name, vector, (x.shape[-1],))
            is_fitting = vector.dtype in (x.dtype, torch.float32) and vector.device == x.device
            require(is_fitting, "layer_norm", f"{name} is {vector.dtype} on {vector.device}, x {x.dtype} on {x.device}")
    if x.dtype == weight.dtype == torch.float32:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)
    return layer_norm_reference(x, weight, bias, epsilon)
