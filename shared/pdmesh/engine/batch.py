"""Gathers a step's input from the rows, and remembers whose each row of the logits will be."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.backend import StepBatch
from pdmesh.engine.plan import StepPlan
from pdmesh.engine.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Consecutive rows of the logits that predict prompt tokens whose log-probabilities are wanted."""

    index: int
    """Of the plan's row."""
    start: int
    """First row of the logits."""
    token_ids: NDArray[np.uint32]
    """The predicted tokens, one for each row of the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's input, and what to do with its logits. S of the plan's N rows are sampled.

    Its arrays are the gatherer's: the next step may be in them.
    """

    batch: StepBatch
    sampled: NDArray[np.int64]
    """[S] indices into the plan's rows."""
    rows: NDArray[np.int64]
    """[S] their rows."""
    lengths: NDArray[np.int64]
    """[S] tokens they have, which is the position of the sampled one."""
    logits_rows: NDArray[np.int64]
    """[S] rows of the logits to sample from."""
    prompts: list[PromptSpan]


class Gatherer:
    """Gathers step after step. Nearly all have the rows of the one before, with a token more each, and reuse what they can."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._last: Step | None = None
        self._row_ids: list[int] = []
        """Those of the last step when the next one may reuse it, else empty."""
        self._num_table_changes = 0
        """Of the rows when the last step's tables were copied."""
        self._ones: list[int] = []
        self._trues: list[bool] = []

    def gather(self, plan: StepPlan) -> Step:
        """Gather the input of a plan with at least one row, which the rows have applied."""
        is_same = plan.rows == self._row_ids and plan.counts == self._ones and plan.samples == self._trues
        if is_same and not plan.new and self._last is not None:
            return self._go_on(plan, self._last)
        step = gather(self._rows, plan)
        self._last, self._row_ids, self._num_table_changes = step, [], self._rows.num_table_changes
        if len(step.sampled) == len(plan.rows) == len(step.batch.token_ids) and not step.prompts:
            self._row_ids = list(plan.rows)
            self._ones, self._trues = [1] * len(plan.rows), [True] * len(plan.rows)
        return step

    def _go_on(self, plan: StepPlan, last: Step) -> Step:
        """Make the last step the next one, in place: between two steps every microsecond is one in which nothing computes."""
        rows, batch = self._rows, last.batch
        # Of rows with one token each these are the positions, too.
        batch.context_len[:] = plan.starts
        np.add(batch.context_len, 1, out=last.lengths)
        batch.token_ids[:] = rows.tokens[last.rows, batch.context_len]
        width = -(-(max(plan.starts) + 1) // rows.block_size)
        if rows.num_table_changes == self._num_table_changes and width == batch.block_tables[0].shape[1]:
            return last
        tables = [table[last.rows, :width] for table in rows.tables]
        self._num_table_changes = rows.num_table_changes
        self._last = replace(last, batch=replace(batch, block_tables=tables))
        return self._last


def gather(rows: Rows, plan: StepPlan) -> Step:
    """Gather tokens, positions and block tables of a plan with at least one row."""
    places = np.array(plan.rows, dtype=np.int64)
    starts = np.array(plan.starts, dtype=np.int64)
    counts = np.array(plan.counts, dtype=np.int64)
    query_start = np.zeros(len(places) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start[1:])
    if query_start[-1] == len(places):
        # One token each: nearly all steps.
        row_of_token, positions = places, starts
    else:
        row_of_token = np.repeat(places, counts)
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
    ends = starts + counts
    width = -(-int(ends.max()) // rows.block_size)
    sampled = np.flatnonzero(np.array(plan.samples, dtype=np.bool_))
    logits_index = query_start[1:][sampled] - 1
    prompts: list[PromptSpan] = []
    logits_rows = np.arange(len(sampled))
    # The last prompt token predicts the first output token, which is sampled.
    num_told = np.minimum(ends, rows.told_prompt[places] - 1) - starts
    if num_told.max() > 0:
        prompts, logits_index, logits_rows = _plan_prompts(rows, plan, query_start, num_told.tolist())
    batch = StepBatch(
        token_ids=rows.tokens[row_of_token, positions].astype(np.int64),
        positions=positions,
        query_start=query_start,
        context_len=starts,
        block_tables=[table[places, :width] for table in rows.tables],
        logits_index=logits_index,
    )
    return Step(
        batch=batch,
        sampled=sampled,
        rows=places[sampled],
        lengths=ends[sampled],
        logits_rows=logits_rows,
        prompts=prompts,
    )


def _plan_prompts(
    rows: Rows, plan: StepPlan, query_start: NDArray[np.int64], num_told: list[int]
) -> tuple[list[PromptSpan], NDArray[np.int64], NDArray[np.int64]]:
    """Return the spans, `logits_index` and `logits_rows` of a step whose logits are not of samples alone."""
    spans: list[PromptSpan] = []
    index: list[int] = []
    logits_rows: list[int] = []
    first_tokens = query_start.tolist()
    for place, (row, start, has_sample) in enumerate(zip(plan.rows, plan.starts, plan.samples, strict=True)):
        count = num_told[place]
        if count > 0:
            token_ids = rows.tokens[row, start + 1 : start + 1 + count].copy()
            spans.append(PromptSpan(index=place, start=len(index), token_ids=token_ids))
            index.extend(range(first_tokens[place], first_tokens[place] + count))
        if has_sample:
            logits_rows.append(len(index))
            index.append(first_tokens[place + 1] - 1)
    return spans, np.array(index, dtype=np.int64), np.array(logits_rows, dtype=np.int64)
