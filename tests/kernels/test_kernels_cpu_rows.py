"""What the CPU library does row by row, against its definition: norms, the embedding of tokens, the angles of positions."""

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdmesh_kernels.checks import KernelArgumentError
from pdmesh_kernels.cpu.abi import DType, EmbedArgs, Format, Isa, NormArgs
from pdmesh_kernels.cpu.library import Library, Pool
from pdmesh_kernels.cpu.packing import pack_values, unpack_row
from pdmesh_kernels.layer_norm import layer_norm, layer_norm_reference
from pdmesh_kernels.rms_norm import rms_norm_reference

# Rows and their width: ends inside vectors, none at all, and what a model has.
SIZES = [(1, 1), (3, 15), (7, 16), (40, 31), (63, 65), (33, 576), (2, 1000)]
EPSILON = 1e-5
TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16}
# Relative to the answer's size: sums in float32, and one rounding.
TOLERANCE = {DType.F32: 2e-6, DType.BF16: 4e-3}
POISON = -7.5


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest, library: Library) -> Iterator[Pool]:
    pool = Pool(library, request.param)
    yield pool
    pool.close()


def norm_cpu(
    library: Library,
    pool: Pool,
    isa: Isa,
    x: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    *,
    is_layer_norm: bool,
    adds: bool,
    rows: torch.Tensor | None,
) -> None:
    dtypes = {dtype: name for name, dtype in TORCH.items()}
    args = NormArgs(
        input=x.data_ptr(),
        input_stride=x.stride(0),
        num_rows=output.shape[0],
        width=len(gain),
        gain=gain.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        epsilon=EPSILON,
        is_layer_norm=is_layer_norm,
        adds=adds,
        input_dtype=dtypes[x.dtype],
        output_dtype=dtypes[output.dtype],
        output=output.data_ptr(),
        output_stride=output.stride(0),
        row_index=None if rows is None else rows.data_ptr(),
    )
    library.call("pdm_norm", pool.handle, isa, ctypes.byref(args))


@pytest.mark.parametrize("is_layer_norm", [False, True], ids=["rms_norm", "layer_norm"])
@pytest.mark.parametrize(("input_dtype", "output_dtype"), [(a, b) for a in TORCH for b in TORCH])
def test_norms_equal_their_references(
    library: Library,
    pool: Pool,
    isa: Isa,
    input_dtype: DType,
    output_dtype: DType,
    is_layer_norm: bool,
) -> None:
    for (num_rows, width), is_indexed in itertools.product(SIZES, (False, True)):
        # Far from zero, which only a norm that centres may take away.
        x = (torch.randn(num_rows, width) + 3).to(TORCH[input_dtype])
        gain, bias = torch.randn(width), torch.randn(width) if is_layer_norm else None
        rows = torch.randint(num_rows, (2 * num_rows,)) if is_indexed else None
        source = x if rows is None else x[rows]
        # A row more, and columns beside it, show what is written beyond.
        output = torch.full((len(source) + 1, width + 3), POISON, dtype=TORCH[output_dtype])
        norm_cpu(library, pool, isa, x, gain, bias, output[:-1], is_layer_norm=is_layer_norm, adds=False, rows=rows)
        wide = source.float()
        wanted = (
            layer_norm_reference(wide, gain, bias, EPSILON)
            if is_layer_norm
            else rms_norm_reference(wide, gain, EPSILON)
        )
        error = (output[:-1, :width].float() - wanted).abs().max()
        assert error <= TOLERANCE[output_dtype] * max(float(wanted.abs().max()), 1.0)
        assert (output[-1] == POISON).all()
        assert (output[:, width:] == POISON).all()


@pytest.mark.parametrize("is_layer_norm", [False, True], ids=["rms_norm", "layer_norm"])
def test_norms_add_to_what_is_there(library: Library, pool: Pool, isa: Isa, is_layer_norm: bool) -> None:
    x, gain, there = torch.randn(5, 33), torch.randn(33), torch.randn(5, 33)
    output = there.clone()
    norm_cpu(library, pool, isa, x, gain, None, output, is_layer_norm=is_layer_norm, adds=True, rows=None)
    alone = layer_norm_reference(x, gain, None, EPSILON) if is_layer_norm else rms_norm_reference(x, gain, EPSILON)
    torch.testing.assert_close(output, there + alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.I8, Format.Q8])
def test_tokens_become_rows_of_the_table(library: Library, pool: Pool, isa: Isa, format: Format) -> None:
    for (num_tokens, width), (scale, rounds) in itertools.product(SIZES, ((1.0, 0), (8.5, 0), (8.6, 1))):
        table = pack_values(library, format, torch.randn(37, width), group=32 if format is Format.Q8 else 0)
        ids = torch.randint(37, (num_tokens,))
        rows = torch.from_numpy(np.stack([unpack_row(library, table, int(each)) for each in ids]))
        output = torch.full((num_tokens, width + 3), POISON)
        args = EmbedArgs(
            table=ctypes.pointer(table.structure()),
            token_ids=ids.data_ptr(),
            num_rows=num_tokens,
            scale=scale,
            output=output.data_ptr(),
            output_stride=output.stride(0),
            rounds=rounds,
        )
        library.call("pdm_embed", pool.handle, isa, ctypes.byref(args))
        factor = torch.tensor(scale).bfloat16().float() if rounds else torch.tensor(scale)
        wanted = (rows * factor).bfloat16().float() if rounds else rows * factor
        torch.testing.assert_close(output[:, :width], wanted, atol=0, rtol=0)
        assert (output[:, width:] == POISON).all()


def test_angles_are_cosines_and_sines_of_any_position(library: Library, pool: Pool) -> None:
    """Up to a million positions: what rounds the product of position and frequency is float32, as transformers has it."""
    positions = np.array([0, 1, 31, 4096, 131071, 1 << 20], dtype=np.int64)
    frequencies = (10000.0 ** -(np.arange(24) / 24)).astype(np.float32)
    angles = np.full((len(positions), 48), np.nan, dtype=np.float32)
    library.call(
        "pdm_angles",
        pool.handle,
        positions.ctypes.data,
        len(positions),
        frequencies.ctypes.data,
        48,
        1.25,
        angles.ctypes.data,
    )
    product = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    wanted = 1.25 * np.concatenate([np.cos(product), np.sin(product)], axis=1)
    np.testing.assert_allclose(angles, wanted, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_equals_its_reference(dtype: torch.dtype) -> None:
    x = (torch.randn(33, 65) + 3).to(dtype)
    for gain, bias in ((torch.randn(65), torch.randn(65)), (torch.randn(65), None)):
        found, wanted = layer_norm(x, gain, bias, EPSILON), layer_norm_reference(x, gain, bias, EPSILON)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_layer_norm_refuses_vectors_that_do_not_fit() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(KernelArgumentError, match="layer_norm: weight must be"):
        layer_norm(x, torch.ones(7), None, EPSILON)
    with pytest.raises(KernelArgumentError, match=r"layer_norm: bias is torch\.float16"):
        layer_norm(x, torch.ones(8), torch.ones(8).half(), EPSILON)
