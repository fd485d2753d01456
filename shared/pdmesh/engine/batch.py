"""Gathers a step's input from the rows, and remembers whose each row of the logits will be."""

from dataclasses import dataclass

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
    """A step's input, and what to do with its logits. S of the plan's N rows are sampled."""

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
        self._ones: list[int] = []
        self._trues: list[bool] = []

    def gather(self, plan: StepPlan) -> Step:
        """Gather the input of a plan with at least one row, which the rows have applied."""
        is_same = plan.rows == self._row_ids and plan.counts == self._ones and plan.samples == self._trues
        if is_same and not plan.new and self._last is not None:
            return self._go_on(plan, self._last)
        step = gather(self._rows, plan)
        self._last, self._row_ids = step, []
        if len(step.sampled) == len(plan.rows) == len(step.batch.token_ids) and not step.prompts:
            self._row_ids = list(plan.rows)
            self._ones, self._trues = [1] * len(plan.rows), [True] * len(plan.rows)
        return step

    def _go_on(self, plan: StepPlan, last: Step) -> Step:
        rows = self._rows
        starts = np.array(plan.starts, dtype=np.int64)
        lengths = starts + 1
        places, width = last.rows, -(-int(lengths.max()) // rows.block_size)
        batch = StepBatch(
            token_ids=rows.tokens[places, starts].astype(np.int64),
            positions=starts,
            query_start=last.batch.query_start,
            context_len=starts,
            block_tables=[table[places, :width] for table in rows.tables],
            logits_index=last.batch.logits_index,
        )
        return Step(
            batch=batch,
            sampled=last.sampled,
            rows=places,
            lengths=lengths,
            logits_rows=last.logits_rows,
            prompts=[],
        )


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
