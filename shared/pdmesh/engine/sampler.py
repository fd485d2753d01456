"""From logits to tokens.

The order of operations, per row: log-probabilities to report (raw); edits (see `sampling_state`: allowed ids, bad words,
min_tokens, logit bias, penalties); then greedy rows take the largest logit, and the others go through temperature, top_k,
top_p, min_p, and take the largest of logit plus Gumbel noise, which draws from the softmax. The noise is Philox of (seed,
choice, absolute position, token id), so that a row's token depends on nothing but its own sequence: not on the batch, the
step, the process or the device.
"""

import logging
import math
from dataclasses import dataclass

import torch

from pdmesh.engine.philox import gumbel_noise, gumbel_noise_of_all
from pdmesh.engine.request import Sequence
from pdmesh.engine.sampling_state import SamplingState
from pdmesh.engine.token_logprobs import raw_logprobs, report_logprobs
from pdmesh.errors import InternalError, InvalidRequest, MeshError
from pdmesh.protocol.messages import SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)

# Below this temperature the division overflows before the distribution differs from greedy.
MIN_TEMPERATURE = 1e-5
# Nearly all of the mass of a trained model's distribution lies in its first thousand tokens.
TOP_P_FIRST_LOOK = 1024

Candidates = tuple[torch.Tensor, torch.Tensor]
"""Logits of the tokens that may be drawn, and their ids."""


@dataclass(slots=True)
class Sampled:
    """One row's token, or why there is none."""

    token_id: int = -1
    logprobs: TokenLogprobs | None = None
    error: MeshError | None = None
    is_nan: bool = False


class Sampler:
    """Samples one token for each sequence. Keeps its state in `Sequence.sampling_state`."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits_RV: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """Return the next token of `sequences[i]` from row i. Changes the logits, float32 [R, V], in place."""
        reporting = [row for row, each in enumerate(sequences) if each.request.sampling.logprobs is not None]
        places = {row: place for place, row in enumerate(reporting)}
        raw_RV = raw_logprobs(logits_RV[reporting]) if reporting else logits_RV
        largest, greedy = (values.tolist() for values in logits_RV.max(dim=-1))
        results: list[Sampled] = []
        for row, sequence in enumerate(sequences):
            try:
                result = _pick(logits_RV[row], self._state_of(sequence), largest[row], greedy[row])
                if result.error is None:
                    self._note(sequence, result, raw_RV[places[row]] if row in places else None)
            except Exception as exc:  # one row's parameters must not end the others of its step
                result = Sampled(error=row_failure(sequence, exc))
            results.append(result)
        return results

    def _note(self, sequence: Sequence, result: Sampled, raw_V: torch.Tensor | None) -> None:
        """Count the token and describe it, where its log-probabilities are wanted."""
        if raw_V is not None:
            num_top = sequence.request.sampling.logprobs or 0
            result.logprobs = report_logprobs(raw_V.unsqueeze(0), [result.token_id], num_top)[0]
        self._state_of(sequence).observe(result.token_id)

    def _state_of(self, sequence: Sequence) -> SamplingState:
        if sequence.sampling_state is None:
            sequence.sampling_state = SamplingState(sequence, self._eos_token_ids)
        return sequence.sampling_state


def row_failure(sequence: Sequence, exc: Exception) -> InternalError:
    """Log what failed for one row of a step, and return the error that ends its choice."""
    log.error("choice %r could not be sampled", sequence, exc_info=exc)
    return InternalError(f"the engine failed to sample: {type(exc).__name__}: {exc}")


def _pick(logits_V: torch.Tensor, state: SamplingState, largest: float, greedy: int) -> Sampled:
    """Choose one row's token. `largest` and `greedy` are the row's maximum and its place before any edit."""
    # The maximum of a row with a NaN is NaN.
    if not -torch.inf < largest < torch.inf:
        return Sampled(error=InternalError("the model returned logits that are not numbers"), is_nan=True)
    if state.edits_logits:
        state.edit(logits_V)
        top = logits_V.max(dim=-1)
        largest, greedy = top.values.item(), int(top.indices.item())
        if largest == -torch.inf:
            return Sampled(error=InvalidRequest("the sampling parameters leave no token that may follow"))
        if not largest < torch.inf:
            return Sampled(error=InvalidRequest("the sampling parameters make the logits overflow"))
    if state.sampling.temperature < MIN_TEMPERATURE:
        return Sampled(greedy)
    return Sampled(_draw(logits_V / state.sampling.temperature, state.sampling, state.sequence))


def _draw(logits_V: torch.Tensor, sampling: SamplingParams, sequence: Sequence) -> int:
    """Draw from the softmax of what top_k, top_p and min_p leave."""
    candidates = _truncate(logits_V, sampling)
    position = sequence.num_tokens
    if candidates is None:
        noise_V = gumbel_noise_of_all(sampling.seed, sequence.choice, position, len(logits_V), device=logits_V.device)
        return int((logits_V.double() + noise_V).argmax().item())
    values, ids = candidates
    noise = gumbel_noise(sampling.seed, sequence.choice, position, ids)
    return int(ids[(values.double() + noise).argmax()].item())


def _truncate(logits_V: torch.Tensor, sampling: SamplingParams) -> Candidates | None:
    """Return the logits and ids that may be drawn, or None when all may."""
    candidates: Candidates | None = None
    if 0 < sampling.top_k < len(logits_V):
        candidates = logits_V.topk(sampling.top_k)
    if sampling.top_p < 1.0:
        if candidates is None:
            candidates = _nucleus(logits_V, sampling.top_p)
        else:
            candidates = _cut_nucleus(*candidates, sampling.top_p, candidates[0].logsumexp(dim=-1))
    if sampling.min_p > 0.0:
        values, ids = candidates or (logits_V, torch.arange(len(logits_V), device=logits_V.device))
        # p >= min_p * p_max, in logits.
        kept = values >= values.max() + math.log(sampling.min_p)
        candidates = values[kept], ids[kept]
    return candidates


def _nucleus(logits_V: torch.Tensor, top_p: float) -> Candidates:
    """Return the most likely tokens that together reach `top_p`, without sorting the vocabulary where a look suffices."""
    total = logits_V.logsumexp(dim=-1)
    values, ids = logits_V.topk(min(TOP_P_FIRST_LOOK, len(logits_V)))
    if len(values) < len(logits_V) and torch.exp(values - total).sum() < top_p:
        values, ids = logits_V.sort(descending=True)
    return _cut_nucleus(values, ids, top_p, total)


def _cut_nucleus(values: torch.Tensor, ids: torch.Tensor, top_p: float, total: torch.Tensor) -> Candidates:
    """Keep the shortest beginning of `values` (descending) whose probability reaches `top_p`; at least one token."""
    probabilities = torch.exp(values - total)
    before = probabilities.cumsum(dim=-1) - probabilities
    count = max(int((before < top_p).sum().item()), 1)
    return values[:count], ids[:count]
