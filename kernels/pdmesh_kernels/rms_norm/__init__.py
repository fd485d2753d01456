"""rms_norm: scale each row to unit root mean square, then by a learned gain."""

import torch
import torch.nn.functional as functional

from pdmesh_kernels.checks import require_float, require_same_dtype, require_shape
from pdmesh_kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x², last dim) + epsilon) * weight, a new tensor.

    | argument | shape | dtype          | stride               |
    |----------|-------|----------------|----------------------|
    | x        | [..., D], 2 or 3 dims | float32/16, bf16 | last dim contiguous |
    | weight   | [D]   | as x           | contiguous           |
    | result   | as x  | as x           | contiguous           |

    Moves 2·|x| bytes; accumulates in float32 and rounds to x's dtype before the gain, as transformers does.
    """
    require_float("rms_norm", "x", x, 3 if x.dim() == 3 else 2)
    require_shape("rms_norm", "weight", weight, (x.shape[-1],))
    require_same_dtype("rms_norm", x=x, weight=weight)
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
    return rms_norm_reference(x, weight, epsilon)
