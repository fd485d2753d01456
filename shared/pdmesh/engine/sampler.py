"""From logits to tokens.

The order of operations, per row: log-probabilities to report (raw); edits (see `sampling_state`); then greedy rows take the
largest logit, and the others go through temperature, top_k, top_p, min_p, and take the largest of logit plus Gumbel noise
(see `draw`). The noise is Philox of (seed, choice, absolute position, token id), so that a row's token depends on nothing but
its own sequence: not on the batch, the step, the process or the device.

It works on the host. The CPU library, where there is one, draws the same tokens by scans of the logits, in one call for all rows.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.draw import Candidates, Stream, draw, find_candidates
from pdmesh.engine.plan import NO_TOKEN, RowFailure
from pdmesh.engine.row_failures import NAN_FAILURE, row_failure
from pdmesh.engine.rows import Rows
from pdmesh.engine.token_logprobs import describe_token, raw_logprobs
from pdmesh.protocol.messages import TokenLogprobs
from pdmesh_kernels.sample_scan import UNDECIDED, Scanner


@dataclass(frozen=True, slots=True)
class Samples:
    """What was sampled for R rows. The dictionaries have entries, by index into them, only where there is something."""

    token_ids: NDArray[np.int64]
    """[R] NO_TOKEN where there is none: the row has failed, now or earlier."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: dict[int, RowFailure] = field(default_factory=dict)


class Sampler:
    """Samples one token for each of some rows, and puts it there. With a scanner it draws what it draws without one, faster."""

    def __init__(self, rows: Rows, scanner: Scanner | None = None) -> None:
        self._rows = rows
        self._scanner = scanner

    def sample(
        self,
        logits_RV: NDArray[np.float32],
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        best_ids: NDArray[np.int64] | None = None,
    ) -> Samples:
        """Sample the token behind the `lengths[i]` tokens of row `rows[i]` from row i of the logits, changed in place.

        `best_ids`: see `StepLogits`; taken over.
        """
        table = self._rows
        if best_ids is not None and len(rows) == 1 and self._put_if_plain(logits_RV[0], rows, lengths, best_ids):
            return Samples(best_ids)
        token_ids = logits_RV.argmax(axis=-1) if best_ids is None else best_ids
        # The maximum of a row with a NaN is NaN, and argmax finds it.
        is_sound = np.isfinite(logits_RV[np.arange(len(rows)), token_ids]) & (token_ids >= 0)
        if table.is_plain[rows].all() and is_sound.all():
            table.put(rows, lengths, token_ids)
            return Samples(token_ids)
        is_live = ~table.has_failed[rows]
        samples = Samples(token_ids)
        for index in np.flatnonzero(is_live & ~is_sound).tolist():
            samples.failures[index] = NAN_FAILURE
        is_going = is_live & is_sound
        reporting = np.flatnonzero(is_going & table.wants_logprobs[rows])
        raw_RV = raw_logprobs(logits_RV[reporting]) if len(reporting) else logits_RV
        special = is_going & (table.is_stateful[rows] | ~table.is_greedy[rows])
        drawing: list[int] = []
        for index in np.flatnonzero(special).tolist():
            try:
                if self._choose(logits_RV[index], int(rows[index]), int(lengths[index]), samples, index):
                    drawing.append(index)
            except Exception as exc:  # one row's parameters must not end the others of its step
                samples.failures[index] = row_failure(exc)
        if drawing and self._scanner is not None:
            drawing = self._scan(self._scanner, drawing, logits_RV, rows, lengths, samples)
        if drawing:
            self._draw(drawing, logits_RV, rows, lengths, samples)
        self._report(samples, reporting, raw_RV, rows)
        self._keep(samples, is_live, rows, lengths)
        return samples

    def _put_if_plain(
        self,
        logits_V: NDArray[np.float32],
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        best_ids: NDArray[np.int64],
    ) -> bool:
        """Put the largest logit's token into the only row, if that is all there is to it; whether it was. As for many rows, in a
        third of the time: nothing computes meanwhile."""
        row, best = rows.item(), best_ids.item()
        if not self._rows.is_plain.item(row) or best < 0 or not math.isfinite(logits_V.item(best)):
            return False
        self._rows.put_one(row, lengths.item(), best)
        return True

    def _choose(self, logits_V: NDArray[np.float32], row: int, length: int, samples: Samples, index: int) -> bool:
        """Edit one row; False when `samples` has its token already, True when it is to be drawn."""
        table, token_ids = self._rows, samples.token_ids
        if table.is_stateful[row]:
            state = table.state_of(row, length)
            if (forced := state.forced) is not None:
                token_ids[index] = forced
                return False
            if state.edits_logits:
                token_ids[index] = state.edit(logits_V)
        return not table.is_greedy[row]

    def _scan(
        self,
        scanner: Scanner,
        drawing: list[int],
        logits_RV: NDArray[np.float32],
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        samples: Samples,
    ) -> list[int]:
        """Draw in one call for all rows; return those that it left undecided."""
        indices = np.array(drawing)
        draws = self._rows.draws[rows[indices]]
        draws["row"], draws["best"], draws["position"] = indices, samples.token_ids[indices], lengths[indices]
        drawn = scanner.draw_tokens(logits_RV, draws)
        is_decided = drawn != UNDECIDED
        samples.token_ids[indices[is_decided]] = drawn[is_decided]
        undecided: list[int] = indices[~is_decided].tolist()
        return undecided

    def _draw(
        self,
        drawing: list[int],
        logits_RV: NDArray[np.float32],
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        samples: Samples,
    ) -> None:
        candidates: dict[int, Candidates] = {}
        for index in drawing:
            new = self._rows.new_of(int(rows[index]))
            stream = Stream(new.sampling.seed, new.choice, int(lengths[index]))
            try:
                best = int(samples.token_ids[index])
                candidates[index] = find_candidates(logits_RV[index], best, new.sampling, stream)
            except Exception as exc:  # one row's parameters must not end the others of its step
                samples.failures[index] = row_failure(exc)
        if candidates:
            samples.token_ids[list(candidates)] = draw(list(candidates.values()))

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
        table.fail(rows[~is_live])
        kept = np.flatnonzero(is_live)
        table.put(rows[kept], lengths[kept], token_ids[kept])
        for index in kept[table.is_stateful[rows[kept]]].tolist():
            table.state_of(int(rows[index]), int(lengths[index])).observe(int(token_ids[index]))
