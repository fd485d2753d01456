"""Quantised weights of the CPU library: what is packed, what is multiplied, on every instruction set of this machine."""

import ctypes

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdmesh_kernels.cpu.abi import DType, Epilogue, Format, Isa, LinearArgs
from pdmesh_kernels.cpu.library import Library, LibraryError, Pool
from pdmesh_kernels.cpu.packing import PackedWeight, pack_codes, pack_values, unpack_row
from pdmesh_kernels.linear import int8_rows_reference

FOUR_BITS = (Format.Q4, Format.Q4_WIDE)
GROUPED = (Format.Q4, Format.Q4_WIDE, Format.Q8)
# Outputs, inputs, group: ends inside panels, steps and groups.
SHAPES = ((1, 32, 32), (65, 96, 32), (40, 320, 128), (33, 40, 64))
NUM_ROWS = (1, 3, 16, 17, 33, 300)


def linear(
    library: Library,
    isa: Isa,
    weight: PackedWeight,
    input: torch.Tensor,
    *,
    epilogue: Epilogue = Epilogue.STORE,
    num_threads: int = 1,
    int8_rows: bool = False,
) -> torch.Tensor:
    structure = weight.structure(int8_rows=int8_rows)
    num_rows = input.shape[0]
    width = weight.num_outputs // 2 if weight.is_gated else weight.num_outputs
    output = torch.full((num_rows, width), torch.nan)
    scratch = np.full(library.functions.pdm_linear_scratch_bytes(ctypes.byref(structure), num_rows), 0x5A, np.uint8)
    args = LinearArgs(
        weight=ctypes.pointer(structure),
        input=input.data_ptr(),
        input_stride=input.stride(0),
        num_rows=num_rows,
        epilogue=epilogue,
        output=output.data_ptr(),
        output_stride=width,
        output_dtype=DType.F32,
        scratch=scratch.ctypes.data,
    )
    pool = Pool(library, num_threads)
    try:
        library.call("pdm_linear", pool.handle, isa, ctypes.byref(args))
    finally:
        pool.close()
    return output


def make_codes(
    format: Format, num_outputs: int, num_inputs: int, group: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]:
    """Codes, scales and offsets as a checkpoint may have them: f16 but for the wide format, some below the normal range."""
    random = np.random.default_rng(num_inputs)
    shape = (num_outputs, -(-num_inputs // group))
    scales = (random.standard_normal(shape) * 0.01).astype(np.float32)
    scales[0, 0] = 2.0**-23
    offsets = random.standard_normal(shape).astype(np.float32)
    if format is not Format.Q4_WIDE:
        scales, offsets = scales.astype(np.float16).astype(np.float32), offsets.astype(np.float16).astype(np.float32)
    codes = random.integers(0, 256 if format is Format.Q8 else 16, (num_outputs, num_inputs), dtype=np.uint8)
    return codes, scales, None if format is Format.Q8 else offsets


def expanded(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], offsets: NDArray[np.float32] | None, group: int
) -> torch.Tensor:
    """What the checkpoint means, in bf16 (held as float32)."""
    num_inputs = codes.shape[1]
    wide_scales = np.repeat(scales.astype(np.float64), group, axis=1)[:, :num_inputs]
    if offsets is None:
        values = (codes.astype(np.float64) - 128) * wide_scales
    else:
        values = codes * wide_scales + np.repeat(offsets.astype(np.float64), group, axis=1)[:, :num_inputs]
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("format", GROUPED, ids=lambda format: format.name)
@pytest.mark.parametrize("is_gated", [False, True])
def test_rows_are_the_checkpoints_own_in_bf16(
    library: Library, format: Format, shape: tuple[int, int, int], is_gated: bool
) -> None:
    num_outputs, num_inputs, group = shape
    codes, scales, offsets = make_codes(format, num_outputs * 2, num_inputs, group)
    weight = pack_codes(library, format, codes, scales, offsets, group=group, is_gated=is_gated)
    found = np.stack([unpack_row(library, weight, row) for row in range(num_outputs * 2)])
    np.testing.assert_array_equal(found, expanded(codes, scales, offsets, group).numpy())


@pytest.mark.parametrize("format", GROUPED, ids=lambda format: format.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_those_of_bf16_weights_made_of_them(
    library: Library, isa: Isa, format: Format, shape: tuple[int, int, int]
) -> None:
    num_outputs, num_inputs, group = shape
    codes, scales, offsets = make_codes(format, num_outputs, num_inputs, group)
    quantised = pack_codes(library, format, codes, scales, offsets, group=group)
    values = expanded(codes, scales, offsets, group)
    plain = pack_values(library, Format.BF16, values)
    for num_rows in NUM_ROWS:
        input = torch.randn(num_rows, num_inputs).bfloat16()
        found = linear(library, isa, quantised, input)
        assert torch.equal(found, linear(library, isa, plain, input)), num_rows
        assert relative_error(found, input.double() @ values.double().T) < 1e-6


@pytest.mark.parametrize("format", FOUR_BITS, ids=lambda format: format.name)
@pytest.mark.parametrize("shape", [*SHAPES, (40, 1240, 64)], ids=str)
def test_four_bits_times_rows_in_eight_are_their_integers_scaled(
    library: Library, isa: Isa, format: Format, shape: tuple[int, int, int]
) -> None:
    num_outputs, num_inputs, group = shape
    codes, scales, offsets = make_codes(format, num_outputs, num_inputs, group)
    assert offsets is not None
    weight = pack_codes(library, format, codes, scales, offsets, group=group)
    wide = [torch.from_numpy(np.repeat(each, group, axis=1)[:, :num_inputs]).double() for each in (scales, offsets)]
    values = torch.from_numpy(codes).double() * wide[0] + wide[1]
    for num_rows in (*NUM_ROWS, 2, 5, 6, 7):
        # Groups of a row that differ in size, one of them zero.
        input = (torch.randn(num_rows, num_inputs) * torch.logspace(-3, 3, num_inputs)).bfloat16()
        if num_inputs > 32:
            input[0, :32] = 0
        found = linear(library, isa, weight, input, int8_rows=True)
        assert relative_error(found, int8_rows_reference(input).double() @ values.T) < 1e-6, num_rows
        assert found.equal(linear(library, Isa.AVX2, weight, input, int8_rows=True)), num_rows


@pytest.mark.parametrize("format", FOUR_BITS, ids=lambda format: format.name)
def test_the_largest_codes_of_weights_and_rows_overflow_nothing(library: Library, isa: Isa, format: Format) -> None:
    codes, ones = np.full((33, 640), 15, np.uint8), np.ones((33, 20), np.float32)
    weight = pack_codes(library, format, codes, ones, ones, group=32)
    for sign in (1.0, -1.0):
        for num_rows in (1, 7):
            input = torch.full((num_rows, 640), sign).bfloat16()
            found = linear(library, isa, weight, input, int8_rows=True)
            torch.testing.assert_close(found, torch.full((num_rows, 33), sign * 16 * 640), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("format", "int8_rows"),
    [*((format, False) for format in (*GROUPED, Format.I8)), *((format, True) for format in FOUR_BITS)],
    ids=str,
)
def test_a_row_does_not_depend_on_others_or_on_threads(
    library: Library, isa: Isa, format: Format, int8_rows: bool
) -> None:
    # More steps than are unpacked at a time.
    num_inputs = 192 if not int8_rows else 704
    if format is Format.I8:
        weight = pack_values(library, format, torch.randn(70, num_inputs), is_gated=True)
    else:
        weight = pack_codes(library, format, *make_codes(format, 70, num_inputs, 64), group=64, is_gated=True)
    input = torch.randn(77, num_inputs).bfloat16()
    input[5, 3], input[40, 7] = torch.nan, torch.inf

    def product(rows: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
        gate = Epilogue.SILU_MUL
        return linear(library, isa, weight, rows, epilogue=gate, num_threads=num_threads, int8_rows=int8_rows)

    found = product(input)
    assert found.isnan().any(dim=1).nonzero().flatten().tolist() == [5, 40]
    assert product(input, num_threads=2).nan_to_num(7.0).equal(found.nan_to_num(7.0))
    for start, count in ((0, 1), (4, 1), (6, 3), (31, 1), (32, 2), (39, 1), (41, 20), (73, 4), (76, 1)):
        rows = slice(start, start + count)
        assert product(input[rows].clone()).equal(found[rows]), start


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 40), (70, 1000)])
def test_int8_is_its_integers_scaled(library: Library, isa: Isa, num_outputs: int, num_inputs: int) -> None:
    values = torch.randn(num_outputs, num_inputs)
    values[-1] *= 1e-30
    weight = pack_values(library, Format.I8, values)
    weight_scales = values.abs().amax(dim=1) / torch.tensor(127.0)
    weight_codes = torch.round(values / weight_scales[:, None]).double()
    rows = np.stack([unpack_row(library, weight, row) for row in range(num_outputs)])
    torch.testing.assert_close(
        torch.from_numpy(rows), (weight_codes * weight_scales[:, None]).float(), rtol=1e-6, atol=0.0
    )
    for num_rows in NUM_ROWS:
        input = torch.randn(num_rows, num_inputs).bfloat16()
        input[-1] = 0
        maxima = input.float().abs().amax(dim=1)
        factors = torch.from_numpy(
            np.divide(np.float32(127), maxima.numpy(), where=maxima.numpy() > 0, out=np.zeros_like(maxima))
        )
        codes = torch.round(input.float() * factors[:, None]).double()
        sums = (codes @ weight_codes.T).float()
        wanted = sums * (maxima / torch.tensor(127.0))[:, None] * weight_scales
        assert torch.equal(linear(library, isa, weight, input), wanted), num_rows


def test_int8_of_values_keeps_each_within_half_a_step(library: Library) -> None:
    # Of every size that bf16 weights may have; the smallest have scales below the normal range of f16.
    values = torch.randn(40, 200) * torch.logspace(-9, 3, 40)[:, None]
    weight = pack_values(library, Format.Q8, values, group=64)
    for row in range(40):
        found = torch.from_numpy(unpack_row(library, weight, row))
        for start in range(0, 200, 64):
            group = values[row, start : start + 64]
            # Half a step, another half of the least f16 where the scale was rounded up to it, and bf16's own rounding.
            allowed = group.abs().max() * (0.505 / 127 + 2.0**-8) + 2.0**-25
            assert (found[start : start + 64] - group).abs().max() <= allowed


def test_what_a_format_cannot_hold_is_refused(library: Library) -> None:
    codes, scales, offsets = make_codes(Format.Q4, 3, 64, 32)
    assert offsets is not None
    with pytest.raises(LibraryError, match=r"not in 0 \.\.\. 15"):
        pack_codes(library, Format.Q4, codes + 16, scales, offsets, group=32)
    for wrong in (np.float32(0.1), np.float32(1e6), np.float32(np.nan)):
        with pytest.raises(LibraryError, match="not exact in f16"):
            pack_codes(library, Format.Q4, codes, np.full_like(scales, wrong), offsets, group=32)
        with pytest.raises(LibraryError, match="not exact in f16"):
            pack_codes(library, Format.Q4, codes, scales, np.full_like(offsets, wrong), group=32)
    with pytest.raises(LibraryError, match="not finite"):
        pack_codes(library, Format.Q4_WIDE, codes, scales, np.full_like(offsets, np.inf), group=32)
    with pytest.raises(LibraryError, match="multiple of 32"):
        pack_codes(library, Format.Q4, codes, np.repeat(scales, 2, 1), np.repeat(offsets, 2, 1), group=16)
    with pytest.raises(ValueError, match=r"must be \(3, 2\)"):
        pack_codes(library, Format.Q4, codes, scales[:, :1], offsets, group=32)
    with pytest.raises(LibraryError, match="4 bits are packed from"):
        pack_values(library, Format.Q4, torch.ones(3, 64), group=32)
    for format, group in ((Format.I8, 0), (Format.Q8, 32)):
        with pytest.raises(LibraryError, match="not finite"):
            pack_values(library, format, torch.tensor([[1.0, torch.nan]]), group=group)
    with pytest.raises(LibraryError, match="too large"):
        pack_values(library, Format.Q8, torch.tensor([[1e8]]), group=32)
