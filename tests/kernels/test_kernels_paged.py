"""kv_write and paged_attention against their definitions, on shuffled blocks full of other sequences' NaN."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh_kernels.checks import KernelArgumentError
from pdmesh_kernels.kv_write import kv_write, kv_write_reference
from pdmesh_kernels.paged_attention import (
    MAX_GROUP_KEYS,
    AttentionRows,
    paged_attention,
    paged_attention_reference,
    plan_attention,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
LENGTHS = [1, 15, 16, 17, 31, 33, 63]


def make_rows(
    queries: list[int], contexts: list[int], block_size: int, window: int | None = None
) -> tuple[AttentionRows, torch.Tensor]:
    """Build rows over a shuffled pool. Blocks of nobody are NaN; slots behind a row's end are large but finite.

    What a window has passed has no block, and tables are as wide as the longest row and one more.
    """
    rng = np.random.default_rng(len(queries) + sum(queries) + sum(contexts))
    needed = [-(-(query + context) // block_size) for query, context in zip(queries, contexts, strict=True)]
    num_blocks = sum(needed) + 5
    order = rng.permutation(num_blocks).tolist()
    tables = np.full((len(needed), max(needed) + 1), -1, dtype=np.int32)
    pool = torch.full((num_blocks, NUM_KV_HEADS, 2, block_size, HEAD_DIM), torch.nan)
    for row, count in enumerate(needed):
        passed = 0 if window is None else max(contexts[row] + 1 - window, 0) // block_size
        blocks, order = order[: count - passed], order[count - passed :]
        tables[row, passed:count] = blocks
        count -= passed
        pool[blocks] = torch.randn(count, NUM_KV_HEADS, 2, block_size, HEAD_DIM)
        used = (queries[row] + contexts[row]) % block_size
        if used:
            pool[blocks[-1], :, :, used:] = 1e4
    rows = AttentionRows(
        query_start=np.cumsum([0, *queries]),
        context_len=np.array(contexts),
        block_tables=tables,
        block_size=block_size,
        sliding_window=window,
    )
    return rows, pool


def assert_equals_reference(rows: AttentionRows, pool: torch.Tensor, soft_cap: float | None = None) -> None:
    q = torch.randn(rows.num_tokens, NUM_HEADS, HEAD_DIM) * 2
    wanted = paged_attention_reference(q, pool, rows, HEAD_DIM**-0.5, soft_cap)
    found = paged_attention(q, pool, plan_attention(rows, q.dtype), HEAD_DIM**-0.5, soft_cap)
    assert wanted.isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
@pytest.mark.parametrize("block_size", [16, 32])
def test_decode_rows_of_all_lengths(block_size: int, window: int | None) -> None:
    rows, pool = make_rows([1] * len(LENGTHS), [length - 1 for length in LENGTHS], block_size, window)
    assert_equals_reference(rows, pool)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("length", LENGTHS)
def test_whole_prompts(length: int, window: int | None) -> None:
    assert_equals_reference(*make_rows([length, 3], [0, 0], 16, window))


@pytest.mark.parametrize("window", [None, 50, 200])
def test_prompt_longer_than_a_tile_after_context(window: int | None) -> None:
    assert_equals_reference(*make_rows([300], [45], 32, window))


def test_mixed_rows_in_any_order() -> None:
    assert_equals_reference(*make_rows([1, 17, 1, 33, 1], [0, 31, 63, 0, 200], 16))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 70)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 30),
    soft_cap=st.none() | st.sampled_from([0.5, 50.0]),
)
def test_any_mix(rows: list[tuple[int, int]], block_size: int, window: int | None, soft_cap: float | None) -> None:
    made = make_rows([q for q, _ in rows], [c for _, c in rows], block_size, window)
    assert_equals_reference(*made, soft_cap)


@pytest.mark.parametrize("window", [None, 1, 40])
def test_capped_scores(window: int | None) -> None:
    rows, pool = make_rows([1, 150, 1, 1, 3], [5, 33, 63, 0, 200], 16, window)
    assert_equals_reference(rows, pool, 2.0)
    q = torch.randn(rows.num_tokens, NUM_HEADS, HEAD_DIM) * 2
    capped, free = (paged_attention(q, pool, plan_attention(rows, q.dtype), 1.0, cap) for cap in (2.0, None))
    assert torch.allclose(capped, free, atol=1e-2) == (window == 1)


def test_a_missing_block_inside_the_window_is_no_index_from_behind() -> None:
    for queries, contexts in (([1], [40]), ([5], [40])):
        rows, _ = make_rows(queries, contexts, 16, window=20)
        rows.block_tables[0, 1] = -1
        with pytest.raises(KernelArgumentError, match="lacks a block"):
            plan_attention(rows, torch.float32)


@pytest.mark.parametrize("window", [None, 20])
def test_a_plan_moves_to_other_tables(window: int | None) -> None:
    rows, pool = make_rows([1, 9, 1, 1], [40, 30, 3, 90], 16, window)
    # The same keys at the other end of a larger pool.
    other = torch.cat([torch.full_like(pool, torch.nan), pool])
    moved = np.where(rows.block_tables < 0, -1, rows.block_tables + len(pool))[:, :-1]
    q = torch.randn(rows.num_tokens, NUM_HEADS, HEAD_DIM)
    plan = plan_attention(rows, q.dtype)
    assert torch.equal(paged_attention(q, other, plan.in_tables(moved), 1.0), paged_attention(q, pool, plan, 1.0))
    with pytest.raises(KernelArgumentError, match=r"block tables are \[4, 5\], the rows need \[4, 6\]"):
        plan.in_tables(moved[:, :-1])
    moved[3, -1] = -1
    with pytest.raises(KernelArgumentError, match="lacks a block"):
        plan.in_tables(moved)


def test_tables_that_are_too_small_are_named() -> None:
    rows, _ = make_rows([1, 2], [40, 10], 16)
    for table in (rows.block_tables[:, :2], rows.block_tables[:1]):
        with pytest.raises(KernelArgumentError, match=r"the rows need \[2, 3\]"):
            plan_attention(dataclasses.replace(rows, block_tables=table), torch.float32)


def test_groups_of_decode_rows_gather_a_bounded_number_of_keys() -> None:
    rows, _ = make_rows([1] * 9, [MAX_GROUP_KEYS // 4 - 1] * 8 + [MAX_GROUP_KEYS + 5], 16)
    plan = plan_attention(rows, torch.float32)
    assert [len(group.tokens_R) for group in plan.decode_groups] == [4, 4, 1]


def test_bfloat16() -> None:
    rows, pool = make_rows([1, 9, 1], [30, 5, 2], 16)
    q, pool = torch.randn(11, NUM_HEADS, HEAD_DIM).bfloat16(), pool.bfloat16()
    wanted = paged_attention_reference(q, pool, rows, 0.25)
    found = paged_attention(q, pool, plan_attention(rows, q.dtype), 0.25)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_a_window_reads_only_its_blocks() -> None:
    rows, pool = make_rows([1, 4], [200, 200], 16, window=20)
    assert (rows.block_tables[:, :11] == -1).all()
    plan = plan_attention(rows, torch.float32)
    assert plan.decode_groups[0].num_blocks == 2
    # Whatever lies outside the window is another's, even where a table still names it.
    rows.block_tables[:, :11] = int((pool.isnan().flatten(1).all(dim=1)).nonzero()[0])
    assert_equals_reference(rows, pool)


def test_padding_is_bounded_by_grouping_rows_of_like_length() -> None:
    rows, _ = make_rows([1] * 4, [2000, 3, 1500, 20], 16)
    plan = plan_attention(rows, torch.float32)
    assert [(group.tokens_R.tolist(), group.num_blocks) for group in plan.decode_groups] == [([1, 3], 2), ([2, 0], 126)]


@pytest.mark.parametrize("num_tokens", [1, 15, 33])
def test_kv_write_equals_reference_and_touches_nothing_else(num_tokens: int) -> None:
    layered = torch.full((6, 2, NUM_KV_HEADS, 2, 16, HEAD_DIM), torch.nan)
    wanted = layered.clone()
    fused = torch.randn(num_tokens, 3 * NUM_KV_HEADS, HEAD_DIM)
    key, value = fused[:, NUM_KV_HEADS : 2 * NUM_KV_HEADS], fused[:, 2 * NUM_KV_HEADS :]
    slots = torch.randperm(6 * 16)[:num_tokens]
    kv_write(layered[:, 1], key, value, slots // 16, slots % 16)
    kv_write_reference(wanted[:, 1], key, value, slots // 16, slots % 16)
    assert torch.equal(layered.nan_to_num(nan=9e9), wanted.nan_to_num(nan=9e9))


def test_wrong_arguments_are_named() -> None:
    rows, pool = make_rows([2], [3], 16)
    plan = plan_attention(rows, torch.float32)
    q = torch.randn(2, NUM_HEADS, HEAD_DIM)
    with pytest.raises(KernelArgumentError, match=r"q must be \[2, 6, 16\]"):
        paged_attention(torch.randn(3, NUM_HEADS, HEAD_DIM), pool, plan, 1.0)
    with pytest.raises(KernelArgumentError, match="soft_cap must be more than 0"):
        paged_attention(q, pool, plan, 1.0, 0.0)
    with pytest.raises(KernelArgumentError, match="no multiple"):
        paged_attention(torch.randn(2, 5, HEAD_DIM), pool, plan, 1.0)
    with pytest.raises(KernelArgumentError, match=r"kv is torch\.bfloat16"):
        paged_attention(q, pool.bfloat16(), plan, 1.0)
    key = torch.randn(2, NUM_KV_HEADS, HEAD_DIM)
    with pytest.raises(KernelArgumentError, match="must be int64"):
        kv_write(pool, key, key, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
