"""linear by the CPU library, for packed weights."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from pdmesh_kernels.cpu.abi import DType, Epilogue, Format, Isa, LinearArgs
from pdmesh_kernels.cpu.library import Library, Pool
from pdmesh_kernels.cpu.packing import PackedWeight, panel_count
from pdmesh_kernels.linear.reference import Gate

DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16}


@dataclass(frozen=True, slots=True)
class LinearRuntime:
    """What runs it: one call at a time per pool."""

    library: Library
    pool: Pool
    isa: Isa


@dataclass(frozen=True, slots=True)
class PanelLogits:
    """Logits and, of each row's panels (32 columns each), the largest value and its lowest id; NaN where one is NaN."""

    values: torch.Tensor
    """[M, n] float32"""
    best_value: torch.Tensor
    """[M, panels] float32"""
    best_id: torch.Tensor
    """[M, panels] int32"""


def linear_cpu(
    runtime: LinearRuntime,
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    gate: Gate | None = None,
    residual: torch.Tensor | None = None,
    int8_rows: bool = False,
) -> torch.Tensor:
    """As `linear`, whose checks were made."""
    if residual is not None:
        output = residual.clone()
        run(runtime, x, weight, output, Epilogue.ADD, bias, int8_rows=int8_rows)
        return output
    epilogue = Epilogue.STORE if gate is None else Epilogue[gate.name]
    output = torch.empty(x.shape[0], weight.num_outputs // 2 if gate else weight.num_outputs, dtype=x.dtype)
    run(runtime, x, weight, output, epilogue, bias, int8_rows=int8_rows)
    return output


def logits_cpu(runtime: LinearRuntime, x: torch.Tensor, weight: PackedWeight, *, soft_cap: float = 0.0) -> PanelLogits:
    """Return x Wᵀ in float32, capped where soft_cap is over 0 (cap · tanh(y / cap)), and what greedy sampling needs."""
    shape = (x.shape[0], panel_count(weight.num_outputs, False))
    found = PanelLogits(
        torch.empty(x.shape[0], weight.num_outputs), torch.empty(shape), torch.empty(shape, dtype=torch.int32)
    )
    run(runtime, x, weight, found.values, Epilogue.LOGITS, None, soft_cap=soft_cap, best=found)
    return found


def run(
    runtime: LinearRuntime,
    x: torch.Tensor,
    weight: PackedWeight,
    output: torch.Tensor,
    epilogue: Epilogue,
    bias: torch.Tensor | None,
    *,
    soft_cap: float = 0.0,
    best: PanelLogits | None = None,
    int8_rows: bool = False,
) -> None:
    """Fill `output`; where its rows have room behind n columns, zeros follow up to the next multiple of 64."""
    structure = weight.structure(int8_rows=int8_rows)
    args = LinearArgs(
        weight=ctypes.pointer(structure),
        input=x.data_ptr(),
        input_stride=x.stride(0) if x.shape[0] > 1 else x.shape[1],
        num_rows=x.shape[0],
        epilogue=epilogue,
        bias=None if bias is None else bias.data_ptr(),
        output=output.data_ptr(),
        output_stride=output.stride(0) if output.shape[0] > 1 else output.shape[1],
        output_dtype=DTYPES[output.dtype],
        soft_cap=soft_cap,
    )
    if best is not None:
        args.best_value, args.best_id = best.best_value.data_ptr(), best.best_id.data_ptr()
    if weight.format is Format.I8 or int8_rows:
        num_bytes = runtime.library.functions.pdm_linear_scratch_bytes(ctypes.byref(structure), x.shape[0])
        scratch = np.empty(num_bytes, dtype=np.uint8)
        args.scratch = scratch.ctypes.data
    runtime.library.call("pdm_linear", runtime.pool.handle, runtime.isa, ctypes.byref(args))
