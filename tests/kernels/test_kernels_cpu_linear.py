"""linear by the CPU library against its definition: odd sizes, every fused ending, every instruction set of this machine."""

from collections.abc import Callable, Iterator

import pytest
import torch

from pdmesh_kernels.checks import KernelArgumentError
from pdmesh_kernels.cpu.abi import Epilogue, Format, Isa
from pdmesh_kernels.cpu.library import Library, Pool
from pdmesh_kernels.cpu.packing import pack_values, unpack_row
from pdmesh_kernels.linear import Gate, LinearRuntime, linear, linear_reference
from pdmesh_kernels.linear.cpu import PanelLogits, logits_cpu, run

DTYPES = {Format.F32: torch.float32, Format.BF16: torch.bfloat16}
# Rows, inputs, outputs: ends inside tiles, panels and blocks; one, few and many rows.
SIZES = [
    (1, 1, 2),
    (2, 31, 34),
    (15, 576, 96),
    (16, 64, 16),
    (33, 100, 130),
    (63, 33, 30),
    (300, 1600, 66),
    (3, 9000, 32),
]
# Error allowed relative to the answer's size: of a sum in float32 one term after the other, whose roundings add up as the square
# root of their number, and of one rounding to bf16.
TOLERANCE = {torch.float32: max(2e-6, max(size[1] for size in SIZES) ** 0.5 * 2**-24), torch.bfloat16: 4e-3}


@pytest.fixture
def runtime(isa: Isa, library: Library) -> Iterator[LinearRuntime]:
    pool = Pool(library, 1)
    yield LinearRuntime(library, pool, isa)
    pool.close()


@pytest.fixture
def nan_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    empty: Callable[..., torch.Tensor] = torch.empty

    def poisoned(*shape: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = empty(*shape, dtype=dtype)
        return made.fill_(torch.nan) if dtype.is_floating_point else made.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)


def random_input(format: Format, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPES[format])


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.usefixtures("nan_for_empty")
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_every_ending_equals_the_reference(
    runtime: LinearRuntime, format: Format, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    values, bias = random_input(format, num_outputs, num_inputs), torch.randn(num_outputs)
    x, residual = random_input(format, num_rows, num_inputs), torch.randn(num_rows, num_outputs)
    plain = pack_values(runtime.library, format, values)
    gated = pack_values(runtime.library, format, values, is_gated=True)
    for given in (bias, None):
        found = linear(x, plain, given, runtime=runtime)
        assert found.dtype == x.dtype
        assert relative_error(found, linear_reference(x, values, given)) < TOLERANCE[x.dtype]
        added = linear(x, plain, given, residual=residual, runtime=runtime)
        assert relative_error(added, linear_reference(x, values, given, residual=residual)) < TOLERANCE[torch.float32]
        for gate in Gate:
            found = linear(x, gated, given, gate=gate, runtime=runtime)
            assert relative_error(found, linear_reference(x, values, given, gate=gate)) < TOLERANCE[x.dtype], gate


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("gate", [None, *Gate])
def test_a_row_depends_on_itself_alone(runtime: LinearRuntime, format: Format, gate: Gate | None) -> None:
    # 1,100 inputs: several blocks whose sums are stored between, and a rest.
    values, x = random_input(format, 70, 1100), random_input(format, 301, 1100)
    weight = pack_values(runtime.library, format, values, is_gated=gate is not None)
    x[5, 3], x[299, 7] = torch.nan, torch.inf
    found = linear(x, weight, gate=gate, runtime=runtime)
    strange = [row for row in range(301) if not found[row].isfinite().all()]
    assert strange == [5, 299]
    for start, count in [(0, 1), (4, 1), (6, 26), (31, 2), (64, 33), (256, 40), (298, 1), (300, 1)]:
        part = linear(x[start : start + count].clone(), weight, gate=gate, runtime=runtime)
        for row in range(start, start + count):
            if row not in strange:
                assert torch.equal(part[row - start], found[row]), (start, count, row)


@pytest.mark.parametrize("format", DTYPES)
def test_any_number_of_threads_gives_the_same_bits(runtime: LinearRuntime, format: Format) -> None:
    weight, x = pack_values(runtime.library, format, random_input(format, 200, 96)), random_input(format, 600, 96)
    wanted = linear(x, weight, runtime=runtime)
    for num_threads in (2, 5):
        pool = Pool(runtime.library, num_threads)
        try:
            assert torch.equal(linear(x, weight, runtime=LinearRuntime(runtime.library, pool, runtime.isa)), wanted)
        finally:
            pool.close()


@pytest.mark.parametrize("format", DTYPES)
def test_inputs_may_be_rows_of_a_wider_buffer(runtime: LinearRuntime, format: Format) -> None:
    weight = pack_values(runtime.library, format, random_input(format, 40, 70))
    wide = random_input(format, 21, 128)
    wide[:, 70:] = torch.nan
    assert torch.equal(
        linear(wide[:, :70], weight, runtime=runtime), linear(wide[:, :70].clone(), weight, runtime=runtime)
    )


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("num_outputs", [40, 96, 130])
@pytest.mark.parametrize("is_gated", [False, True])
def test_zeros_follow_the_outputs_and_nothing_else_is_written(
    runtime: LinearRuntime, format: Format, num_outputs: int, is_gated: bool
) -> None:
    weight = pack_values(runtime.library, format, random_input(format, num_outputs, 64), is_gated=is_gated)
    width = num_outputs // 2 if is_gated else num_outputs
    for room in (0, 5, 200):
        output = torch.full((35, width + room), torch.nan, dtype=DTYPES[format])
        epilogue = Epilogue.SILU_MUL if is_gated else Epilogue.STORE
        run(runtime, random_input(format, 35, 64), weight, output, epilogue, None)
        end = min(-(-width // 64) * 64, width + room)
        assert output[:, :width].isfinite().all()
        assert (output[:, width:end] == 0).all()
        assert output[:, end:].isnan().all()
    # The residual stream is longer than what is added to it, where the buffer has room: that stays.
    if not is_gated:
        output = torch.ones(35, width + 70)
        run(runtime, random_input(format, 35, 64), weight, output, Epilogue.ADD, None)
        assert (output[:, width:] == 1).all()


@pytest.mark.usefixtures("nan_for_empty")
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("format", DTYPES)
def test_logits_are_capped_and_their_best_known(runtime: LinearRuntime, format: Format, soft_cap: float) -> None:
    values, x = random_input(format, 75, 40), random_input(format, 18, 40)
    # The same logit twice within a panel and once in another.
    values[40], values[50], values[3] = values[9], values[40], values[9]
    weight = pack_values(runtime.library, format, values)
    found = logits_cpu(runtime, x, weight, soft_cap=soft_cap)
    wanted = x.float() @ values.float().T
    if soft_cap:
        wanted = soft_cap * torch.tanh(wanted / soft_cap)
    assert relative_error(found.values, wanted) < TOLERANCE[torch.float32]
    check_best(found)


@pytest.mark.parametrize("format", DTYPES)
def test_a_logit_that_is_no_number_is_told(runtime: LinearRuntime, format: Format) -> None:
    values, x = random_input(format, 70, 40), random_input(format, 3, 40)
    values[37, 0], values[69, 2] = torch.nan, -torch.inf
    x[:, 2] = 1.0
    x[1, 0] = torch.inf
    found = logits_cpu(runtime, x, pack_values(runtime.library, format, values))
    check_best(found)
    assert found.best_value[:, 1].isnan().all()
    assert found.best_value[0, 0].isfinite()
    assert found.values[0, 69] == -torch.inf


def check_best(found: PanelLogits) -> None:
    for panel in range(found.best_id.shape[1]):
        logits = found.values[:, 32 * panel : 32 * (panel + 1)]
        best_value, best_id = found.best_value[:, panel], found.best_id[:, panel]
        has_nan = logits.isnan().any(dim=1)
        assert torch.equal(best_value.isnan(), has_nan)
        for row in (~has_nan).nonzero().flatten().tolist():
            assert best_value[row] == logits[row].max()
            assert best_id[row] == 32 * panel + (logits[row] == logits[row].max()).nonzero()[0]


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(2, 1), (66, 33), (96, 64)])
def test_rows_come_back_as_they_were_packed(
    library: Library, format: Format, num_outputs: int, num_inputs: int, is_gated: bool
) -> None:
    values = random_input(format, num_outputs, num_inputs)
    values[0, 0], values[-1, -1] = torch.inf, -0.0
    weight = pack_values(library, format, values, is_gated=is_gated)
    found = torch.stack([torch.from_numpy(unpack_row(library, weight, row)) for row in range(num_outputs)])
    assert torch.equal(found, values.float())


def test_packing_rounds_to_the_nearest_even_bf16(library: Library) -> None:
    values = torch.randn(33, 50) * torch.logspace(-38, 38, 50)
    values[0, :4] = torch.tensor([1.00390625, 1.01171875, torch.finfo(torch.float32).max, torch.nan])
    weight = pack_values(library, Format.BF16, values)
    found = torch.stack([torch.from_numpy(unpack_row(library, weight, row)) for row in range(33)])
    assert torch.equal(found.nan_to_num(7.0), values.bfloat16().float().nan_to_num(7.0))


def test_wrong_arguments_are_refused(library: Library) -> None:
    pool = Pool(library, 1)
    runtime = LinearRuntime(library, pool, library.isas[0])
    weight = pack_values(library, Format.BF16, torch.randn(34, 40))
    x = torch.randn(3, 40).bfloat16()
    cases: list[tuple[str, Callable[[], object]]] = [
        ("x has 39 inputs, weight 40", lambda: linear(x[:, :39], weight, runtime=runtime)),
        ("x must be torch.bfloat16", lambda: linear(x.float(), weight, runtime=runtime)),
        ("needs a runtime", lambda: linear(x, weight)),
        ("for a gate, or for none", lambda: linear(x, weight, gate=Gate.SILU_MUL, runtime=runtime)),
        ("bias must be", lambda: linear(x, weight, torch.zeros(33), runtime=runtime)),
        ("residual must be", lambda: linear(x, weight, residual=torch.zeros(3, 33), runtime=runtime)),
        ("exclude each other", lambda: linear(x, weight, gate=Gate.SILU_MUL, residual=torch.zeros(3, 34))),
        ("weight is torch.float32, x torch.bfloat16", lambda: linear(x, torch.zeros(34, 40))),
    ]
    try:
        for message, call in cases:
            with pytest.raises(KernelArgumentError, match=message):
                call()
    finally:
        pool.close()
