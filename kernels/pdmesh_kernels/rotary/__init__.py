"""rotary: turn query and key heads by their token's position; `rotary_frequencies` has the angles."""

import torch

from pdmesh_kernels.checks import require, require_float, require_shape
from pdmesh_kernels.rotary.reference import rotary_reference
from pdmesh_kernels.rotary.torch_cpu import rotary_torch

__all__ = ["rotary", "rotary_reference"]


def rotary(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Return the turned heads, a new tensor.

    | argument | shape         | dtype            | stride              |
    |----------|---------------|------------------|---------------------|
    | x_THD    | [T, H, D]     | float32/16, bf16 | last dim contiguous |
    | cos_TF   | [T, D/2]      | as x             | contiguous          |
    | sin_TF   | [T, D/2]      | as x             | contiguous          |
    | result   | [T, H, D]     | as x             | contiguous          |

    Any YaRN attention factor is already in cos and sin. Moves 2·|x| elements.
    """
    require_float("rotary", "x", x_THD, 3)
    require(x_THD.shape[2] % 2 == 0, "rotary", f"head_dim must be even, is {x_THD.shape[2]}")
    angles = (x_THD.shape[0], x_THD.shape[2] // 2)
    require_shape("rotary", "cos", cos_TF, angles)
    require_shape("rotary", "sin", sin_TF, angles)
    require(cos_TF.dtype == sin_TF.dtype == x_THD.dtype, "rotary", "x, cos and sin must share a dtype")
    return rotary_torch(x_THD, cos_TF, sin_TF)
