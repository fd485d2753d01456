"""Turns a schedule into a `StepBatch` of flat arrays, and remembers whose each row of the logits will be."""

from dataclasses import dataclass

import numpy as np

from pdmesh.engine.backend import StepBatch
from pdmesh.engine.request import Sequence
from pdmesh.engine.scheduler import Schedule, ScheduledRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsSpan:
    """The rows of a step's logits that belong to one scheduled row."""

    sequence: Sequence
    start: int
    num_prompt: int
    """Rows from `start` that predict prompt tokens; only when their log-probabilities are wanted."""
    first_position: int
    """Position of the first predicted prompt token."""
    has_sample: bool
    """Whether one more row follows them, to sample the next token from."""

    @property
    def sample_index(self) -> int:
        return self.start + self.num_prompt


@dataclass(frozen=True, slots=True)
class Step:
    """A step's input, and one span per scheduled row."""

    batch: StepBatch
    spans: list[LogitsSpan]


def build_step(schedule: Schedule) -> Step:
    """Gather the rows' tokens, positions and block tables. Costs O(tokens of the step), whatever lies behind them."""
    rows = schedule.rows
    query_start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([row.num_tokens for row in rows], out=query_start[1:])
    context_len = np.array([row.sequence.num_computed for row in rows], dtype=np.int64)
    token_ids = np.empty(int(query_start[-1]), dtype=np.int64)
    for row, start in zip(rows, query_start.tolist(), strict=False):
        token_ids[start : start + row.num_tokens] = row.sequence.tokens.view(row.sequence.num_computed, row.end)
    # Row i's positions count from its context length.
    lengths = np.diff(query_start)
    positions = np.arange(len(token_ids)) - np.repeat(query_start[:-1] - context_len, lengths)
    spans, logits_index = _plan_logits(rows, query_start.tolist())
    num_groups = len(rows[0].sequence.blocks)
    batch = StepBatch(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        block_tables=[[row.sequence.blocks[group] for row in rows] for group in range(num_groups)],
        logits_index=np.array(logits_index, dtype=np.int64),
    )
    return Step(batch, spans)


def _plan_logits(rows: list[ScheduledRow], starts: list[int]) -> tuple[list[LogitsSpan], list[int]]:
    spans: list[LogitsSpan] = []
    index: list[int] = []
    for row, start in zip(rows, starts, strict=False):
        sequence, num_prompt = row.sequence, 0
        if sequence.wants_prompt_logprobs:
            # The last prompt token predicts the first output token, which is sampled.
            num_prompt = max(min(row.end, sequence.request.num_prompt - 1) - sequence.num_computed, 0)
        spans.append(
            LogitsSpan(
                sequence=sequence,
                start=len(index),
                num_prompt=num_prompt,
                first_position=sequence.num_computed + 1,
                has_sample=row.needs_token,
            )
        )
        index.extend(range(start, start + num_prompt))
        if row.needs_token:
            index.append(start + row.num_tokens - 1)
    return spans, index
