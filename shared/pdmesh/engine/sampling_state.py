"""What the sampler keeps of one row that changes its logits: its edits, prepared once, and its counts, kept token by token.

The edits, in this order: allowed ids, bad words, min_tokens (no stop id before it), logit bias, repetition penalty (over
prompt and output), frequency and presence penalties (over output), custom processors. A thinking section that has used up
its budget overrides them all. The state is a function of the row's tokens, so a resumed or preempted sequence goes on as if
it had never stopped.
"""

import logging
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.logits_processors import LogitsProcessor, RowView, apply_processor, name_of
from pdmesh.engine.plan import NewRow
from pdmesh.engine.row_failures import BrokenLogits
from pdmesh.engine.thinking import ThinkingState
from pdmesh.engine.token_counts import TokenCounts
from pdmesh.engine.truncation import Floats
from pdmesh.errors import InternalError, InvalidRequest
from pdmesh.protocol.messages import SamplingParams

log = logging.getLogger(__name__)

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def needs_state(sampling: SamplingParams) -> bool:
    """Whether a parameter may ever change this request's logits; of most requests there is no state to keep."""
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.bad_words_token_ids
        or sampling.min_tokens > 0
        or sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or has_count_penalty(sampling)
        or sampling.thinking is not None
    )


def has_count_penalty(sampling: SamplingParams) -> bool:
    return sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


class SamplingState:
    """Edits and counts of one row. `tokens` is the row's own memory, of which the first `length` are there; `processors` are
    those that its request asks for."""

    def __init__(
        self,
        new: NewRow,
        tokens: NDArray[np.uint32],
        length: int,
        eos_token_ids: frozenset[int],
        processors: Sequence[LogitsProcessor],
    ) -> None:
        sampling = self._sampling = new.sampling
        self._num_prompt, self._choice = new.num_prompt, new.choice
        self._tokens = tokens.view()
        self._tokens.flags.writeable = False
        self._length = length
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else eos_token_ids)
        self._stop_ids = _ids(stops)
        self._allowed_ids = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
        self._bad_ids = _ids({word[0] for word in sampling.bad_words_token_ids if len(word) == 1})
        self._bad_words = [(word[-1], np.array(word[:-1])) for word in sampling.bad_words_token_ids if len(word) > 1]
        self._bias_ids = _ids(sampling.logit_bias)
        self._bias = np.array([sampling.logit_bias[token_id] for token_id in self._bias_ids.tolist()], dtype=np.float32)
        self._seen = TokenCounts(self._tokens[:length]) if sampling.repetition_penalty != 1.0 else None
        self._output = TokenCounts(self._tokens[new.num_prompt : length]) if has_count_penalty(sampling) else None
        self._thinking: ThinkingState | None = None
        if sampling.thinking is not None:
            prompt, output = self._tokens[: new.num_prompt], self._tokens[new.num_prompt : length]
            self._thinking = ThinkingState(sampling.thinking, prompt, output)
        self._processors = processors

    @property
    def forced(self) -> int | None:
        """The token that must come next whatever the logits say."""
        return None if self._thinking is None else self._thinking.forced

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
            or bool(self._processors)
        )

    def observe(self, token_id: int) -> None:
        """Take in a generated token, which is in the row already."""
        self._length += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self._output is not None:
            self._output.add(token_id)
        if self._thinking is not None:
            self._thinking.observe(token_id)

    def edit(self, logits_V: Floats) -> int:
        """Change one row of logits in place; return the id of the largest, which is finite.

        Raises InvalidRequest where the request's parameters leave no token or make logits infinite, MeshError or
        BrokenLogits where a processor fails or does so.
        """
        if self._allowed_ids is not None:
            kept = logits_V[self._allowed_ids]
            logits_V.fill(-np.inf)
            logits_V[self._allowed_ids] = kept
        logits_V[self._bad_ids] = -np.inf
        for last, before in self._bad_words:
            if self._ends_with(before):
                logits_V[last] = -np.inf
        if self._is_too_short:
            logits_V[self._stop_ids] = -np.inf
        if len(self._bias_ids):
            logits_V[self._bias_ids] += self._bias
        self._penalise(logits_V)
        best = int(logits_V.argmax())
        _check(float(logits_V[best]))
        for processor in self._processors:
            apply_processor(processor, logits_V, self._view())
            # Looked at one by one, so that the one at fault is named.
            best = int(logits_V.argmax())
            self._check_processed(processor, float(logits_V[best]))
        return best

    # What overflows is found afterwards, in the largest logit. `where` also divides what it does not take.
    @np.errstate(over="ignore", divide="ignore", invalid="ignore")
    def _penalise(self, logits_V: Floats) -> None:
        sampling = self._sampling
        if self._seen is not None:
            ids = self._seen.ids
            # A penalty that is infinite as a float32 would make NaN of a logit of zero.
            seen, penalty = logits_V[ids], np.float32(min(sampling.repetition_penalty, MAX_FLOAT32))
            logits_V[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._output is not None:
            # Every id that is listed has occurred, so presence counts for each.
            penalties = np.float32(sampling.frequency_penalty) * self._output.counts
            logits_V[self._output.ids] -= penalties + np.float32(sampling.presence_penalty)

    def _check_processed(self, processor: LogitsProcessor, largest: float) -> None:
        if math.isfinite(largest):
            return
        name = name_of(type(processor))
        if largest != -math.inf:
            raise BrokenLogits(f"logits processor {name} makes logits {'NaN' if math.isnan(largest) else 'infinite'}")
        if self._allowed_ids is not None:
            raise InvalidRequest(
                f"logits processor {name} leaves none of the allowed_token_ids", param="allowed_token_ids"
            )
        message = f"logits processor {name} leaves no token that may follow"
        log.error("%s", message)
        raise InternalError(message)

    @property
    def _is_too_short(self) -> bool:
        return self._length - self._num_prompt < self._sampling.min_tokens

    def _ends_with(self, before: NDArray[np.int64]) -> bool:
        """Whether the output ends with `before`."""
        length = len(before)
        if length > self._length - self._num_prompt:
            return False
        return bool((self._tokens[self._length - length : self._length] == before).all())

    def _view(self) -> RowView:
        prompt, output = self._tokens[: self._num_prompt], self._tokens[self._num_prompt : self._length]
        return RowView(prompt, output, self._sampling, self._choice)


def _check(largest: float) -> None:
    if largest == -math.inf:
        raise InvalidRequest("the sampling parameters leave no token that may follow")
    if not largest < math.inf:
        raise InvalidRequest("the sampling parameters make the logits overflow")


def _ids(values: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(values), dtype=np.int64)
