"""From logits to tokens.

The order of operations, per row: log-probabilities to report (raw); edits (see `sampling_state`: allowed ids, bad words,
min_tokens, logit bias, penalties); then greedy rows take the largest logit, and the others go through temperature, top_k,
top_p, min_p, and take the largest of logit plus Gumbel noise, which draws from the softmax. The noise is Philox of (seed,
choice, absolute position, token id), so that a row's token depends on nothing but its own sequence: not on the batch, the
step, the process or the device.
"""

import math
from dataclasses import dataclass

import torch

from pdmesh.engine.philox import gumbel_noise, gumbel_noise_of_all
from pdmesh.engine.request import Sequence
from pdmesh.engine.sampling_state import SamplingState
from pdmesh.engine.token_logprobs import raw_logprobs, report_logprobs
from pdmesh.errors import InternalError, InvalidRequest, MeshError
from pdmesh.protocol.messages import SamplingParams, TokenLogprobs

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
        states = [self._state_of(sequence) for sequence in sequences]
        reporting = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        raw_RV = raw_logprobs(logits_RV[reporting]) if reporting else logits_RV
        largest, greedy = (values.tolist() for values in logits_RV.max(dim=-1))
        results = [_pick(logits_RV[row], state, largest[row], greedy[row]) for row, state in enumerate(states)]
        for place, row in enumerate(reporting):
            if results[row].error is None:
                num_top = states[row].sampling.logprobs or 0
                results[row].logprobs = report_logprobs(raw_RV[place : place + 1], [results[row].token_id], num_top)[0]
        for state, result in zip(states, results, strict=True):
            if result.error is None:
                state.observe(result.token_id)
        return results

    def _state_of(self, sequence: Sequence) -> SamplingState:
        if sequence.sampling_state is None:
            sequence.sampling_state = SamplingState(sequence, self._eos_token_ids)
        return sequence.sampling_state


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
