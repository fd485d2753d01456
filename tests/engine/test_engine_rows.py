"""The worker's tables: deltas go in, a step's arrays come out."""

import numpy as np
import pytest

from pdmesh.engine.batch import Gatherer, gather
from pdmesh.engine.plan import NO_BLOCK, BlockUpdate, NewRow, StepPlan
from pdmesh.engine.rows import Rows
from pdmesh.protocol.messages import SamplingParams


def new_row(row: int, tokens: list[int], blocks: list[list[int]], *, num_prompt: int = 0, told: bool = False) -> NewRow:
    return NewRow(
        row=row,
        choice=0,
        token_ids=np.array(tokens, dtype="<u4").tobytes(),
        num_prompt=num_prompt or len(tokens),
        sampling=SamplingParams(temperature=0.0, prompt_logprobs=0 if told else None),
        wants_prompt_logprobs=told,
        blocks=blocks,
    )


def step_plan(rows: list[tuple[int, int, int, bool]], **deltas: object) -> StepPlan:
    plan = StepPlan(**deltas)  # type: ignore[arg-type]
    plan.rows, plan.starts, plan.counts, plan.samples = (list(column) for column in zip(*rows, strict=True))  # type: ignore[assignment]
    return plan


def applied(rows: Rows, plan: StepPlan) -> StepPlan:
    rows.apply(plan)
    return plan


def test_chunks_and_single_tokens_are_gathered_in_the_plans_order() -> None:
    rows = Rows(4, 20, 1, 4)
    new = [new_row(2, [10, 11, 12, 13, 14, 15], [[7, 8]]), new_row(0, [20, 21, 22], [[5]])]
    step = gather(rows, applied(rows, step_plan([(0, 2, 1, True), (2, 1, 4, False)], new=new)))
    batch = step.batch
    assert batch.token_ids.tolist() == [22, 11, 12, 13, 14]
    assert batch.positions.tolist() == [2, 1, 2, 3, 4]
    assert batch.query_start.tolist() == [0, 1, 5]
    assert batch.context_len.tolist() == [2, 1]
    assert [table.tolist() for table in batch.block_tables] == [[[5, NO_BLOCK], [7, 8]]]
    assert batch.logits_index.tolist() == [0]
    assert (step.sampled.tolist(), step.rows.tolist(), step.lengths.tolist()) == ([0], [0], [3])
    assert (batch.token_ids.dtype, batch.positions.dtype, batch.block_tables[0].dtype) == (np.int64, np.int64, np.int32)


def test_a_step_of_single_tokens_is_gathered_like_any_other() -> None:
    rows = Rows(4, 20, 2, 4)
    new = [new_row(row, list(range(row, row + 9)), [[row, row + 10, row + 20]] * 2) for row in range(4)]
    step = gather(rows, applied(rows, step_plan([(3, 8, 1, True), (1, 4, 1, False), (0, 0, 1, True)], new=new)))
    assert step.batch.token_ids.tolist() == [11, 5, 0]
    assert step.batch.positions.tolist() == [8, 4, 0]
    assert step.batch.query_start.tolist() == [0, 1, 2, 3]
    assert [table.tolist() for table in step.batch.block_tables] == [[[3, 13, 23], [1, 11, 21], [0, 10, 20]]] * 2
    assert step.batch.logits_index.tolist() == [0, 2]
    assert step.rows.tolist() == [3, 0]


def test_updates_grow_a_table_and_take_blocks_out_of_it() -> None:
    rows = Rows(2, 20, 2, 4)
    rows.apply(StepPlan(new=[new_row(1, [1] * 8, [[5, 6], [7, 8]])]))
    updates = [BlockUpdate(1, 0, 2, [9]), BlockUpdate(1, 1, 0, [NO_BLOCK]), BlockUpdate(1, 1, 2, [3])]
    step = gather(rows, applied(rows, step_plan([(1, 8, 2, False)], updates=updates)))
    assert [table.tolist() for table in step.batch.block_tables] == [[[5, 6, 9]], [[NO_BLOCK, 8, 3]]]


def test_a_row_that_is_freed_and_taken_in_one_plan_has_nothing_of_the_one_before() -> None:
    rows = Rows(1, 20, 1, 4)
    rows.apply(StepPlan(new=[new_row(0, list(range(16)), [[1, 2, 3, 4]], told=True)]))
    plan = step_plan([(0, 0, 2, True)], freed=[0], new=[new_row(0, [30, 31], [[9]])])
    step = gather(rows, applied(rows, plan))
    assert step.batch.token_ids.tolist() == [30, 31]
    assert step.batch.block_tables[0].tolist() == [[9]]
    assert step.prompts == []
    assert rows.tables[0][0].tolist() == [9, *[NO_BLOCK] * 5]


def test_a_plan_that_names_a_row_without_a_sequence_is_our_own_error() -> None:
    rows = Rows(2, 20, 1, 4)
    with pytest.raises(AssertionError, match="no sequence"):
        rows.new_of(1)


def test_a_full_row_that_runs_in_vain_stays_inside_its_table() -> None:
    rows = Rows(2, 4, 1, 4)
    rows.apply(StepPlan(new=[new_row(0, [1, 2, 3, 4], [[0]]), new_row(1, [5, 6, 7, 8], [[1]])]))
    for length in (4, 5, 6):
        rows.put(np.array([0]), np.array([length]), np.array([9]))
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 9], [5, 6, 7, 8, 0]]


def test_told_prompts_have_logits_of_their_own_before_the_sample() -> None:
    rows = Rows(3, 20, 1, 4)
    new = [
        new_row(0, [10, 11, 12, 13, 14], [[0, 1]], told=True),
        new_row(1, [20, 21], [[2]]),
        # Prompt and two tokens of output.
        new_row(2, [30, 31, 32, 33, 34], [[3, 4]], num_prompt=3, told=True),
    ]
    plan = step_plan([(0, 0, 3, False), (1, 0, 2, True), (2, 0, 5, True)], new=new)
    step = gather(rows, applied(rows, plan))
    assert [(span.index, span.start, span.token_ids.tolist()) for span in step.prompts] == [
        (0, 0, [11, 12, 13]),
        (2, 4, [31, 32]),
    ]
    assert step.batch.logits_index.tolist() == [0, 1, 2, 4, 5, 6, 9]
    assert step.logits_rows.tolist() == [3, 6]
    # The last prompt token predicts the first of the output.
    step = gather(rows, step_plan([(0, 3, 2, True)]))
    assert [span.token_ids.tolist() for span in step.prompts] == [[14]]
    assert step.batch.logits_index.tolist() == [0, 1]
    assert gather(rows, step_plan([(0, 4, 1, True)])).prompts == []


def test_a_gatherer_that_goes_on_gathers_what_a_fresh_one_would() -> None:
    """Rows join, leave, change places, get blocks and chunks between steps of one token each."""
    rows, source = Rows(4, 60, 1, 4), np.random.default_rng(0)
    gatherer, lengths = Gatherer(rows), dict.fromkeys(range(4), 0)
    num_reused = 0
    for _ in range(200):
        if source.random() < 0.1:
            # A plan may have no rows, which are then not gathered.
            changed = BlockUpdate(int(source.integers(4)), 0, int(source.integers(2)), [int(source.integers(99))])
            rows.apply(StepPlan(updates=[changed]))
        new: list[NewRow] = []
        chosen = source.permutation(4)[: source.integers(1, 5)].tolist() if source.random() < 0.2 else list(lengths)
        for row in chosen:
            if lengths[row] == 0 or lengths[row] > 50 or source.random() < 0.02:
                lengths[row] = int(source.integers(1, 9))
                tokens = source.integers(0, 99, lengths[row]).tolist()
                new.append(new_row(row, tokens, blocks=[list(range(row * 15, row * 15 + 15))]))
        fresh = {each.row for each in new}
        plan = step_plan(
            [(row, 0, lengths[row], True) if row in fresh else (row, lengths[row] - 1, 1, True) for row in chosen],
            new=new,
        )
        expected, step = gather(rows, applied(rows, plan)), gatherer.gather(plan)
        num_reused += bool(gatherer._row_ids) and not new
        for name in ("token_ids", "positions", "query_start", "context_len", "logits_index"):
            assert (getattr(step.batch, name) == getattr(expected.batch, name)).all(), name
        assert all((a == b).all() for a, b in zip(step.batch.block_tables, expected.batch.block_tables, strict=True))
        for name in ("sampled", "rows", "lengths", "logits_rows"):
            assert (getattr(step, name) == getattr(expected, name)).all(), name
        rows.put(step.rows, step.lengths, source.integers(0, 99, len(chosen)))
        for row in chosen:
            lengths[row] += 1
    assert num_reused > 80
