"""Executes plans: rows to arrays, arrays to logits, logits to tokens and log-probabilities.

It owns the rows and is the only one that touches the backend; one thread calls it, plan after plan.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.backend import Backend
from pdmesh.engine.batch import Gatherer, PromptSpan, Step
from pdmesh.engine.logits_processors import LogitsProcessor
from pdmesh.engine.plan import NO_TOKEN, StepPlan, StepResult
from pdmesh.engine.row_failures import NAN_FAILURE, row_failure
from pdmesh.engine.rows import Rows
from pdmesh.engine.sampler import Sampler
from pdmesh.engine.step_logits import StepLogits, on_host
from pdmesh.engine.token_logprobs import describe_token, raw_logprobs
from pdmesh_kernels.sample_scan import Scanner

# Prompt positions whose log-probabilities are in memory at the same time, beside the logits.
PROMPT_CHUNK = 64


class Runner:
    """Joins a backend, the rows and a sampler."""

    def __init__(
        self,
        backend: Backend,
        *,
        num_rows: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        eos_token_ids: frozenset[int],
        processors: Sequence[LogitsProcessor] = (),
        scanner: Scanner | None = None,
    ) -> None:
        self._backend = backend
        self._rows = Rows(
            num_rows, max_model_len, num_groups, block_size, eos_token_ids=eos_token_ids, processors=processors
        )
        self._gatherer = Gatherer(self._rows)
        self._sampler = Sampler(self._rows, scanner)

    def run(self, plan: StepPlan, on_begin: Callable[[], None] | None = None) -> StepResult:
        """Execute a plan; `on_begin` is called when its input is ready and the model begins.

        What goes wrong with one row is in the result; raises whatever the backend raises.
        """
        self._rows.apply(plan)
        if plan.copies:
            self._backend.copy_blocks(plan.copies)
        if not plan.rows:
            return StepResult(token_ids=[])
        step = self._gatherer.gather(plan)
        if on_begin is not None:
            on_begin()
        return self._finish(plan, step, on_host(self._backend.forward(step.batch)))

    def _finish(self, plan: StepPlan, step: Step, outcome: StepLogits) -> StepResult:
        logits_RV, best_ids = outcome.logits_RV, outcome.best_ids
        result = StepResult(token_ids=[NO_TOKEN] * len(plan.rows), logprobs={}, prompt_logprobs={}, failures={})
        result.failures.update(self._rows.take_failures(plan.rows))
        for span in step.prompts:
            self._describe_prompt(plan, span, logits_RV, result)
        if len(step.sampled) == 0:
            return result
        if step.prompts:
            logits_RV = logits_RV[step.logits_rows]
            best_ids = None if best_ids is None else best_ids[step.logits_rows]
        samples = self._sampler.sample(logits_RV, step.rows, step.lengths, best_ids)
        if len(step.sampled) == len(plan.rows):
            result.token_ids = samples.token_ids.tolist()
            result.logprobs.update(samples.logprobs)
            result.failures.update(samples.failures)
            return result
        sampled = step.sampled.tolist()
        for index, token_id in zip(sampled, samples.token_ids.tolist(), strict=True):
            result.token_ids[index] = token_id
        result.logprobs.update((sampled[index], logprobs) for index, logprobs in samples.logprobs.items())
        result.failures.update((sampled[index], failure) for index, failure in samples.failures.items())
        return result

    def _describe_prompt(
        self, plan: StepPlan, span: PromptSpan, logits_RV: NDArray[np.float32], result: StepResult
    ) -> None:
        row, described = plan.rows[span.index], []
        num_top = self._rows.new_of(row).sampling.prompt_logprobs or 0
        try:
            for first in range(0, len(span.token_ids), PROMPT_CHUNK):
                token_ids = span.token_ids[first : first + PROMPT_CHUNK].tolist()
                start = span.start + first
                logprobs_RV = raw_logprobs(logits_RV[start : start + len(token_ids)])
                if np.isnan(logprobs_RV).any():
                    result.failures[span.index] = NAN_FAILURE
                    break
                described += [
                    describe_token(raw_V, token_id, num_top)
                    for raw_V, token_id in zip(logprobs_RV, token_ids, strict=True)
                ]
            else:
                result.prompt_logprobs[span.index] = described
                return
        except Exception as exc:  # one row's parameters must not end the others of its step
            result.failures[span.index] = row_failure(exc)
        self._rows.fail(row)
