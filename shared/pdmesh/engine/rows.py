"""The worker's tables: for each row its tokens, its block tables and what its next token is sampled with.

Rows are fixed places that the scheduler hands out. A plan's deltas are applied here, and a step's input is gathered from here.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.logits_processors import LogitsProcessor, active_processors
from pdmesh.engine.plan import NO_BLOCK, NewRow, RowFailure, StepPlan
from pdmesh.engine.row_failures import row_failure
from pdmesh.engine.sampling_state import SamplingState, needs_state
from pdmesh_kernels.sample_scan import DRAW

# Below this temperature the division overflows before the distribution differs from greedy.
MIN_TEMPERATURE = 1e-5
# More than any vocabulary: all of it.
MAX_TOP_K = 1 << 32


class Rows:
    """Tables of `num_rows` rows. Memory of tokens is taken as it is first written."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        # One column more than tokens: a row that has ended by length may run once more, in vain, and samples a token.
        self.tokens: NDArray[np.uint32] = np.zeros((num_rows, max_model_len + 1), dtype=np.uint32)
        self.block_size = block_size
        width = -(-(max_model_len + 1) // block_size)
        self.tables: list[NDArray[np.int32]] = [
            np.full((num_rows, width), NO_BLOCK, dtype=np.int32) for _ in range(num_groups)
        ]
        self.num_table_changes = 0
        """Plans so far that changed a table."""
        self.is_greedy = np.zeros(num_rows, dtype=np.bool_)
        self.is_stateful = np.zeros(num_rows, dtype=np.bool_)
        """Whether something changes the logits; these rows have a `state`."""
        self.wants_logprobs = np.zeros(num_rows, dtype=np.bool_)
        self.has_failed = np.zeros(num_rows, dtype=np.bool_)
        """Whether the choice has ended by an error: it may still run where it was planned before, but samples no more."""
        self.is_plain = np.zeros(num_rows, dtype=np.bool_)
        """Whether the next token is the one with the largest logit, and nothing else is to be done or told."""
        self.told_prompt = np.zeros(num_rows, dtype=np.int64)
        """Length of the prompt where its log-probabilities are wanted, else 0."""
        self.draws: NDArray[np.void] = np.zeros(num_rows, dtype=DRAW)
        """How each row that is not greedy draws; what changes with each token is filled in by the sampler."""
        self._new: list[NewRow | None] = [None] * num_rows
        self._states: list[SamplingState | None] = [None] * num_rows
        self._active: list[list[LogitsProcessor]] = [[]] * num_rows
        """The processors that each row's request asks for."""
        self._failures: dict[int, RowFailure] = {}
        """What went wrong with rows as they were taken, not told yet."""
        self._eos_token_ids = eos_token_ids
        self._processors = processors

    def apply(self, plan: StepPlan) -> None:
        """Take in what changed since the plan before."""
        for row in plan.freed:
            self._new[row] = self._states[row] = None
            self._failures.pop(row, None)
        for new in plan.new:
            self._take(new)
        if plan.new or plan.updates:
            self.num_table_changes += 1
        for update in plan.updates:
            end = update.first + len(update.block_ids)
            self.tables[update.group][update.row, update.first : end] = update.block_ids

    def take_failures(self, rows: list[int]) -> dict[int, RowFailure]:
        """Return, by index into `rows`, what went wrong as they were taken; once."""
        if not self._failures:
            return {}
        return {index: self._failures.pop(row) for index, row in enumerate(rows) if row in self._failures}

    def new_of(self, row: int) -> NewRow:
        """Return what the row began with."""
        new = self._new[row]
        assert new is not None, "a plan names a row that no sequence has"
        return new

    def state_of(self, row: int, length: int) -> SamplingState:
        """Return the sampling state of a row of `length` tokens; the first time it is made by replaying them."""
        state = self._states[row]
        if state is None:
            tokens = self.tokens[row]
            state = SamplingState(self.new_of(row), tokens, length, self._eos_token_ids, self._active[row])
            self._states[row] = state
        return state

    def fail(self, rows: int | NDArray[np.int64]) -> None:
        """Note that choices have ended by an error."""
        self.has_failed[rows] = True
        self.is_plain[rows] = False

    def put(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append a token to each of `rows`, which have `lengths` tokens."""
        self.tokens[rows, np.minimum(lengths, self.tokens.shape[1] - 1)] = token_ids

    def put_one(self, row: int, length: int, token_id: int) -> None:
        """Append a token to one row, which has `length` tokens."""
        self.tokens[row, min(length, self.tokens.shape[1] - 1)] = token_id

    def _take(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        token_ids = np.frombuffer(new.token_ids, dtype="<u4")
        self.tokens[row, : len(token_ids)] = token_ids
        for table, blocks in zip(self.tables, new.blocks, strict=True):
            table[row] = NO_BLOCK
            table[row, : len(blocks)] = blocks
        self._new[row], self._states[row] = new, None
        self.has_failed[row] = False
        self._failures.pop(row, None)
        try:
            self._active[row] = active_processors(self._processors, sampling)
        except Exception as exc:  # one row's parameters must not end the others of its step
            self._active[row], self._failures[row] = [], row_failure(exc)
            self.fail(row)
        self.is_greedy[row] = sampling.temperature < MIN_TEMPERATURE
        log_min_p = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self.draws[row] = (
            *(0, 0, sampling.temperature, min(sampling.top_k, MAX_TOP_K), sampling.top_p, log_min_p),
            *(sampling.seed, new.choice, 0),
        )
        self.is_stateful[row] = bool(self._active[row]) or needs_state(sampling)
        self.wants_logprobs[row] = sampling.logprobs is not None
        self.is_plain[row] = (
            self.is_greedy[row] and not self.is_stateful[row] and sampling.logprobs is None and not self.has_failed[row]
        )
        self.told_prompt[row] = new.num_prompt if new.wants_prompt_logprobs else 0
