"""What the sampler keeps of one sequence: its edits to the logits, prepared once, and its counts, kept token by token.

The edits, in this order: allowed ids, bad words, min_tokens (no stop id before it), logit bias, repetition penalty (over
prompt and output), frequency and presence penalties (over output). They are rebuilt by replaying the tokens, so a resumed
or preempted sequence goes on as if it had never stopped.
"""

import torch

from pdmesh.engine.request import Sequence
from pdmesh.engine.token_counts import TokenCounts

MAX_FLOAT32 = torch.finfo(torch.float32).max


class SamplingState:
    """Edits and counts of one sequence."""

    def __init__(self, sequence: Sequence, eos_token_ids: frozenset[int]) -> None:
        sampling = sequence.request.sampling
        self.sequence = sequence
        self.sampling = sampling
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
        self._stop_ids = _ids(sorted(stops))
        self._allowed_ids = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self._bad_ids = _ids([word[0] for word in sampling.bad_words_token_ids if len(word) == 1])
        self._bad_words = [word for word in sampling.bad_words_token_ids if len(word) > 1]
        self._bias_ids = _ids(list(sampling.logit_bias))
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._seen = TokenCounts() if sampling.repetition_penalty != 1.0 else None
        has_count_penalty = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._output = TokenCounts() if has_count_penalty else None
        self._replay()

    @property
    def edits_logits(self) -> bool:
        """Whether `edit` would do anything now."""
        return (
            self._allowed_ids is not None
            or len(self._bad_ids) > 0
            or bool(self._bad_words)
            or self._is_too_short
            or len(self._bias_ids) > 0
            or self._seen is not None
            or self._output is not None
        )

    def observe(self, token_id: int) -> None:
        """Count a generated token."""
        if self._seen is not None:
            self._seen.add(token_id)
        if self._output is not None:
            self._output.add(token_id)

    def edit(self, logits_V: torch.Tensor) -> None:
        """Change one row of logits in place."""
        if self._allowed_ids is not None:
            allowed = self._allowed_ids.to(logits_V.device)
            kept = logits_V[allowed]
            logits_V.fill_(-torch.inf)
            logits_V[allowed] = kept
        self._ban(logits_V, self._bad_ids)
        self._ban(logits_V, _ids([word[-1] for word in self._bad_words if self._follows(word[:-1])]))
        if self._is_too_short:
            self._ban(logits_V, self._stop_ids)
        if len(self._bias_ids):
            logits_V[self._bias_ids.to(logits_V.device)] += self._bias.to(logits_V.device)
        self._penalise(logits_V)

    def _penalise(self, logits_V: torch.Tensor) -> None:
        device, sampling = logits_V.device, self.sampling
        if self._seen is not None:
            ids = self._seen.ids.to(device)
            # What overflows to infinity would make NaN of a logit of zero.
            seen, penalty = logits_V[ids], min(sampling.repetition_penalty, MAX_FLOAT32)
            logits_V[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._output is not None:
            counts = self._output.counts.to(device)
            # Every id that is listed has occurred, so presence counts for each.
            logits_V[self._output.ids.to(device)] -= sampling.frequency_penalty * counts + sampling.presence_penalty

    @property
    def _is_too_short(self) -> bool:
        return self.sequence.num_output < self.sampling.min_tokens

    def _follows(self, prefix: list[int]) -> bool:
        """Whether the output ends with `prefix`."""
        sequence, length = self.sequence, len(prefix)
        if length > sequence.num_output:
            return False
        return bool((sequence.tokens.view(sequence.num_tokens - length, sequence.num_tokens) == prefix).all())

    def _ban(self, logits_V: torch.Tensor, ids: torch.Tensor) -> None:
        if len(ids):
            logits_V[ids.to(logits_V.device)] = -torch.inf

    def _replay(self) -> None:
        sequence = self.sequence
        if self._seen is not None:
            for token_id in sequence.tokens.view(0, sequence.request.num_prompt).tolist():
                self._seen.add(token_id)
        for token_id in sequence.tokens.view(sequence.request.num_prompt, sequence.num_tokens).tolist():
            self.observe(token_id)


def _ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
