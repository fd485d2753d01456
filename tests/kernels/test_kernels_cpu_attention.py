"""The CPU library's attention against plain sums in double precision, on every instruction set of this machine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import Library, LibraryError
from support.cpu_attention import Step, make_layout, make_step

TOLERANCES = {"float32": 2e-6, "bfloat16": 6e-3, "int8": 6e-3}
"""Of the error's norm, relative to the answer's. int8 is compared with what its codes stand for."""
MIXED = ((1, 0), (1, 511), (40, 0), (1, 255), (33, 230), (1, 700), (5, 256), (1, 31))


def assert_is_right(found: torch.Tensor, step: Step) -> None:
    wanted = step.wanted()
    assert wanted.isfinite().all()
    assert found.isfinite().all()
    error_TH = (found.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(wanted.norm(dim=-1).mean() * 0.2)
    assert error_TH.max() < 2 * TOLERANCES[step.layout.item_type]
    assert error_TH.square().mean().sqrt() < TOLERANCES[step.layout.item_type]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("item_type", TOLERANCES)
def test_decode_and_chunks_of_prompts_mix(library: Library, isa: Isa, item_type: str) -> None:
    step = make_step(MIXED, make_layout(item_type))
    assert_is_right(step.attend(library, isa), step)


@pytest.mark.parametrize("item_type", TOLERANCES)
@pytest.mark.parametrize("window", [1, 20, 33, 300])
def test_windows(library: Library, isa: Isa, item_type: str, window: int) -> None:
    step = make_step(MIXED, make_layout(item_type), window=window)
    assert_is_right(step.attend(library, isa), step)


@pytest.mark.parametrize("item_type", TOLERANCES)
def test_capped_scores(library: Library, isa: Isa, item_type: str) -> None:
    step = make_step(((1, 300), (37, 20)), make_layout(item_type), soft_cap=2.0)
    found = step.attend(library, isa)
    assert_is_right(found, step)
    assert not torch.allclose(found, replace(step, soft_cap=0.0).attend(library, isa), atol=1e-2)


@pytest.mark.parametrize("item_type", TOLERANCES)
@pytest.mark.parametrize(
    ("head_dim", "group_size", "block_size"),
    [(2, 1, 32), (30, 2, 64), (66, 7, 32), (80, 4, 96), (128, 1, 128), (192, 3, 32), (256, 5, 64), (16, 64, 32)],
)
def test_sizes(library: Library, isa: Isa, item_type: str, head_dim: int, group_size: int, block_size: int) -> None:
    step = make_step(((1, 290), (9, 60)), make_layout(item_type, head_dim, block_size), group_size=group_size)
    assert_is_right(step.attend(library, isa), step)


@pytest.mark.parametrize("item_type", TOLERANCES)
def test_large_scores_stay_finite(library: Library, isa: Isa, item_type: str) -> None:
    step = make_step(((1, 600), (20, 10)), make_layout(item_type), spread=30.0)
    found = step.attend(library, isa)
    assert found.isfinite().all()
    # One key has all the weight nearly everywhere, so the answers have the size of single values.
    assert (found.double() - step.wanted()).norm() / step.wanted().norm() < 2 * TOLERANCES[item_type]


@pytest.mark.parametrize("item_type", TOLERANCES)
@pytest.mark.parametrize("window", [0, 290])
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_number_of_threads(
    library: Library, isa: Isa, item_type: str, window: int
) -> None:
    whole = make_step(((600, 0), (1, 700), (1, 300)), make_layout(item_type), window=window)
    together = whole.attend(library, isa)
    for num_threads in (2, 3):
        assert same_bits(whole.attend(library, isa, num_threads), together)
    # The first sequence in pieces, alone: the same keys, other tiles, and on 2 threads splits that are shared.
    for begin, end in ((0, 1), (1, 30), (30, 257), (257, 599), (599, 600)):
        part = replace(whole, sequences=((end - begin, begin),), queries=whole.queries[begin:end].contiguous())
        for num_threads in (1, 2):
            assert same_bits(part.attend(library, isa, num_threads), together[begin:end])
    for index in (1, 2):
        token = 599 + index
        alone = replace(
            whole,
            sequences=(whole.sequences[index],),
            tables=whole.tables[index : index + 1],
            queries=whole.queries[token : token + 1],
        )
        for num_threads in (1, 4):
            assert same_bits(alone.attend(library, isa, num_threads), together[token : token + 1])


@pytest.mark.parametrize("item_type", TOLERANCES)
def test_a_sequence_of_nan_does_not_touch_the_others(library: Library, isa: Isa, item_type: str) -> None:
    step = make_step(((3, 40), (1, 300), (3, 40)), make_layout(item_type))
    healthy = step.attend(library, isa)
    queries = step.queries.clone()
    queries[3] = torch.nan
    queries[0, 1] = torch.inf
    ill = replace(step, queries=queries).attend(library, isa)
    assert ill[3].isnan().all()
    assert same_bits(ill[4:], healthy[4:])
    assert same_bits(ill[1:3], healthy[1:3])
    assert same_bits(ill[0, 2:], healthy[0, 2:])


def test_a_missing_block_is_an_error(library: Library) -> None:
    step = make_step(((1, 300),), make_layout("bfloat16"))
    tables = step.tables.copy()
    tables[0, 3] = -1
    with pytest.raises(LibraryError, match="a needed block is missing"):
        replace(step, tables=tables).attend(library, library.isas[0])
    tables[0, 3] = len(step.pool)
    with pytest.raises(LibraryError, match="not of the pool"):
        replace(step, tables=tables).attend(library, library.isas[0])


@pytest.mark.parametrize("wrong", [0.0, -0.125, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_an_error(library: Library, wrong: float) -> None:
    step = make_step(((1, 40),), make_layout("bfloat16"))
    with pytest.raises(LibraryError, match="scale: not a number above 0"):
        replace(step, scale=wrong).attend(library, library.isas[0])


@pytest.mark.parametrize("wrong", [-2.0, float("nan"), float("inf")])
def test_a_soft_cap_below_0_or_not_finite_is_an_error(library: Library, wrong: float) -> None:
    step = make_step(((1, 40),), make_layout("bfloat16"))
    with pytest.raises(LibraryError, match="soft_cap: neither 0 nor a number above it"):
        replace(step, soft_cap=wrong).attend(library, library.isas[0])


def test_instruction_sets_agree(library: Library) -> None:
    for item_type, tolerance in TOLERANCES.items():
        step = make_step(MIXED, make_layout(item_type))
        answers = torch.stack([step.attend(library, isa).double() for isa in library.isas])
        spread = (answers - answers[0]).norm(dim=-1).max() / np.sqrt(step.layout.head_dim)
        assert spread < tolerance
