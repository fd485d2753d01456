"""rms_norm: scale each row to unit root mean square, then by a learned gain."""

import torch
import torch.nn.functional as functional

from pdmesh_kernels.checks import require, require_float, require_shape
from pdmesh_kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x², last dim) + epsilon) * weight, a new tensor.

    | argument | shape | dtype          | stride               |
    |----------|-------|----------------|----------------------|
    | x        | [..., D], 2 or 3 dims | float32/16, bf16 | last dim contiguous |
    | weight   | [D]   | as x, or float32 | contiguous         |
    | result   | as x  | as x           | contiguous           |

    Moves 2·|x| elements; accumulates in float32. A gain of x's dtype multiplies what was rounded to that, as Llama has it in
    transformers; one of float32 multiplies before the only rounding, as Gemma has it.
    """
    require_float("rms_norm", "x", x, 3 if x.dim() == 3 else 2)
    require_shape("rms_norm", "weight", weight, (x.shape[-1],))
    is_fitting = weight.dtype in (x.dtype, torch.float32) and weight.device == x.device
    require(is_fitting, "rms_norm", f"weight is {weight.dtype} on {weight.device}, x {x.dtype} on {x.device}")
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)
    return rms_norm_reference(x, weight, epsilon)
