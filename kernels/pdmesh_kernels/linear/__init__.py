"""linear: x Wᵀ + b, with the gate of a feed-forward or the sum with the residual stream in the same pass."""

import torch

from pdmesh_kernels.checks import require, require_float, require_shape
from pdmesh_kernels.cpu.abi import Format
from pdmesh_kernels.cpu.packing import PackedWeight
from pdmesh_kernels.linear.cpu import LinearRuntime, linear_cpu
from pdmesh_kernels.linear.reference import Gate, int8_rows_reference, linear_reference

__all__ = ["Gate", "LinearRuntime", "int8_rows_reference", "linear", "linear_reference"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    gate: Gate | None = None,
    residual: torch.Tensor | None = None,
    runtime: LinearRuntime | None = None,
    int8_rows: bool = False,
) -> torch.Tensor:
    """Return x Wᵀ + b, gated or added to the residual where asked, a new tensor.

    | argument | shape  | dtype            | stride              |
    |----------|--------|------------------|---------------------|
    | x        | [M, K] | float32; bfloat16 for all packed weights but Format.F32's | last dim contiguous |
    | weight   | [n, K], for a gate its half first | as x, or packed | contiguous |
    | bias     | [n]    | float32          | contiguous          |
    | residual | [M, n], not with a gate | float32 | contiguous   |
    | result   | [M, n], with a gate [M, n / 2] | as x; with a residual float32 | contiguous |

    2·M·n·K FLOPs; reads the weight once. Accumulates in float32 and rounds once. A packed weight needs `runtime`, a tensor runs
    in PyTorch. `int8_rows`: weights in 4 bits are multiplied with what `int8_rows_reference` makes of x (W4A8).
    """
    require_float("linear", "x", x, 2)
    num_outputs, num_inputs = _shape(weight)
    require(x.shape[1] == num_inputs, "linear", f"x has {x.shape[1]} inputs, weight {num_inputs}")
    if bias is not None:
        require_shape("linear", "bias", bias, (num_outputs,))
        require(bias.dtype == torch.float32 and bias.is_contiguous(), "linear", "bias must be contiguous float32")
    if gate is not None:
        require(residual is None, "linear", "gate and residual exclude each other")
        require(num_outputs % 2 == 0, "linear", f"a gate needs an even number of outputs, has {num_outputs}")
    if residual is not None:
        require_shape("linear", "residual", residual, (x.shape[0], num_outputs))
        require(residual.dtype == torch.float32, "linear", f"residual must be float32, is {residual.dtype}")
    has_four_bits = isinstance(weight, PackedWeight) and weight.format.has_four_bits
    require(has_four_bits or not int8_rows, "linear", "int8_rows needs a packed weight in 4 bits")
    if isinstance(weight, torch.Tensor):
        require(weight.dtype == x.dtype, "linear", f"weight is {weight.dtype}, x {x.dtype}")
        return linear_reference(x, weight, bias, gate=gate, residual=residual)
    require(runtime is not None, "linear", "a packed weight needs a runtime")
    assert runtime is not None
    require(weight.is_gated == (gate is not None), "linear", "a weight is packed for a gate, or for none")
    wanted = torch.float32 if weight.format is Format.F32 else torch.bfloat16
    require(x.dtype == wanted, "linear", f"x must be {wanted} for {weight.format.name} weights, is {x.dtype}")
    return linear_cpu(runtime, x, weight, bias, gate=gate, residual=residual, int8_rows=int8_rows)


def _shape(weight: torch.Tensor | PackedWeight) -> tuple[int, int]:
    if isinstance(weight, PackedWeight):
        return weight.num_outputs, weight.num_inputs
    require_float("linear", "weight", weight, 2)
    return weight.shape[0], weight.shape[1]
