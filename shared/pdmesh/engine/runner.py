"""Runs one step on the backend: schedule to arrays, arrays to logits, logits to tokens and log-probabilities."""

import torch

from pdmesh.engine.backend import Backend
from pdmesh.engine.batch import LogitsSpan, build_step
from pdmesh.engine.progress import RowResult
from pdmesh.engine.sampler import Sampler, row_failure
from pdmesh.engine.scheduler import Schedule
from pdmesh.engine.token_logprobs import raw_logprobs, report_logprobs
from pdmesh.protocol.messages import TokenLogprobs


class Runner:
    """Joins a backend and a sampler."""

    def __init__(self, backend: Backend, eos_token_ids: frozenset[int]) -> None:
        self._backend = backend
        self._sampler = Sampler(eos_token_ids)

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> list[RowResult]:
        """Compute a schedule and return one result per row. Raises whatever the backend raises."""
        step = build_step(schedule)
        logits_RV = self._backend.forward(step.batch)
        results = [_begin_result(logits_RV, span) for span in step.spans]
        sampling = [
            (span, result)
            for span, result in zip(step.spans, results, strict=True)
            if span.has_sample and result.error is None
        ]
        if not sampling:
            return results
        indices = [span.sample_index for span, _ in sampling]
        rows_RV = logits_RV if len(indices) == len(logits_RV) else logits_RV[indices]
        sampled = self._sampler.sample(rows_RV, [span.sequence for span, _ in sampling])
        for (_, result), sample in zip(sampling, sampled, strict=True):
            result.error, result.is_nan = sample.error, sample.is_nan
            if sample.error is None:
                result.token_id, result.logprobs = sample.token_id, sample.logprobs
        return results


def _begin_result(logits_RV: torch.Tensor, span: LogitsSpan) -> RowResult:
    try:
        return RowResult(prompt_logprobs=_prompt_logprobs(logits_RV, span))
    except Exception as exc:  # one row's parameters must not end the others of its step
        return RowResult(error=row_failure(span.sequence, exc))


def _prompt_logprobs(logits_RV: torch.Tensor, span: LogitsSpan) -> list[TokenLogprobs]:
    if span.num_prompt == 0:
        return []
    sequence = span.sequence
    targets = sequence.tokens.view(span.first_position, span.first_position + span.num_prompt).tolist()
    logprobs = raw_logprobs(logits_RV[span.start : span.start + span.num_prompt])
    return report_logprobs(logprobs, targets, sequence.request.sampling.prompt_logprobs or 0)
