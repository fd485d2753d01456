"""From logits to tokens.

The order of operations, per row: log-probabilities to report (raw); edits (see `sampling_state`); then greedy rows take the
largest logit, and the others go through temperature, top_k, top_p, min_p, and take the largest of logit plus Gumbel noise
(see `draw`). The noise is Philox of (seed, choice, absolute position, token id), so that a row's token depends on nothing but
its own sequence: not on the batch, the step, the process or the device.

It works on the host: logits on another device are copied there.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pdmesh.engine.draw import Candidates, Stream, draw, find_candidates
from pdmesh.engine.plan import NO_TOKEN, RowFailure
from pdmesh.engine.row_failures import NAN_FAILURE, row_failure
from pdmesh.engine.rows import Rows
from pdmesh.engine.token_logprobs import describe_token, raw_logprobs
from pdmesh.protocol.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Samples:
    """What was sampled for R rows. The dictionaries have entries, by index into them, only where there is something."""

    token_ids: NDArray[np.int64]
    """[R] NO_TOKEN where there is none: the row has failed, now or earlier."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)


class Sampler:
    """Samples one token for each of some rows, and puts it there."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def sample(self, logits_RV: NDArray[np.float32], rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> Samples:
        """Sample the token behind the `lengths[i]` tokens of row `rows[i]` from row i of the logits, changed in place."""
        table = self._rows
        token_ids = logits_RV.argmax(axis=-1)
        largest = logits_RV[np.arange(len(rows)), token_ids]
        # The maximum of a row with a NaN is NaN, and argmax finds it.
        is_live, is_sound = ~table.has_failed[rows], np.isfinite(largest)
        samples = Samples(token_ids)
        for index in np.flatnonzero(is_live & ~is_sound).tolist():
            samples.failures[index] = NAN_FAILURE
        is_going = is_live & is_sound
        reporting = np.flatnonzero(is_going & table.wants_logprobs[rows])
        raw_RV = raw_logprobs(logits_RV[reporting]) if len(reporting) else logits_RV
        special = is_going & (table.is_stateful[rows] | ~table.is_greedy[rows])
        candidates: dict[int, Candidates] = {}
        for index in np.flatnonzero(special).tolist():
            try:
                outcome = self._choose(logits_RV[index], int(rows[index]), int(lengths[index]), samples, index)
            except Exception as exc:  # one row's parameters must not end the others of its step
                samples.failures[index] = row_failure(exc)
                continue
            if outcome is not None:
                candidates[index] = outcome
        if candidates:
            token_ids[list(candidates)] = draw(list(candidates.values()))
        self._report(samples, reporting, raw_RV, rows)
        self._keep(samples, is_live, rows, lengths)
        return samples

    def _choose(
        self, logits_V: NDArray[np.float32], row: int, length: int, samples: Samples, index: int
    ) -> Candidates | None:
        """Edit one row; return what to draw from, or None when `samples` has its token already."""
        table, token_ids = self._rows, samples.token_ids
        if table.is_stateful[row]:
            state = table.state_of(row, length)
            if (forced := state.forced) is not None:
                token_ids[index] = forced
                return None
            if state.edits_logits:
                token_ids[index] = state.edit(logits_V)
        if table.is_greedy[row]:
            return None
        new = table.new_of(row)
        return find_candidates(
            logits_V, int(token_ids[index]), new.sampling, Stream(new.sampling.seed, new.choice, length)
        )

    def _report(
        self, samples: Samples, reporting: NDArray[np.int64], raw_RV: NDArray[np.float32], rows: NDArray[np.int64]
    ) -> None:
        for raw_V, index in zip(raw_RV, reporting.tolist(), strict=False):
            if index in samples.failures:
                continue
            num_top = self._rows.new_of(int(rows[index])).sampling.logprobs or 0
            try:
                samples.logprobs[index] = describe_token(raw_V, int(samples.token_ids[index]), num_top)
            except Exception as exc:  # one row's parameters must not end the others of its step
                samples.failures[index] = row_failure(exc)

    def _keep(
        self, samples: Samples, is_live: NDArray[np.bool_], rows: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """Put the tokens into the rows, so that the next plan finds them, and into what is kept of the rows."""
        table, token_ids = self._rows, samples.token_ids
        is_live[list(samples.failures)] = False
        token_ids[~is_live] = NO_TOKEN
        table.has_failed[rows[~is_live]] = True
        kept = np.flatnonzero(is_live)
        table.put(rows[kept], lengths[kept], token_ids[kept])
        for index in kept[table.is_stateful[rows[kept]]].tolist():
            table.state_of(int(rows[index]), int(lengths[index])).observe(int(token_ids[index]))


def on_host(logits_RV: torch.Tensor) -> NDArray[np.float32]:
    """Return the logits as an array, which shares their memory when they are on the host."""
    array: NDArray[np.float32] = logits_RV.contiguous().cpu().numpy()
    return array
