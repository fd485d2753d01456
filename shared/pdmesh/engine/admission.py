"""What the core accepts: every request is checked once, here, so that nothing behind it meets data it cannot work with."""

import time
from collections.abc import Callable

import numpy as np

from pdmesh.engine.engine_state import EngineState
from pdmesh.engine.limits import Limits
from pdmesh.engine.messages import AddRequest, TransferEnded
from pdmesh.engine.sampling_limits import check_sampling
from pdmesh.errors import RETRY_AFTER_S, InvalidRequest, MeshError, Overloaded
from pdmesh.protocol.messages import ChoiceDelta, SamplingParams

# The noise counts choices in 32 bits.
CHOICE_RANGE = 1 << 32


class Admission:
    """Decides what may join the queue, and where in the order it stands."""

    def __init__(self, state: EngineState, check_extra: Callable[[SamplingParams], None] | None = None) -> None:
        """`check_extra` knows what custom logits processors want; it raises MeshError."""
        self._state = state
        self._limits = state.limits
        self._check_extra = check_extra

    def check(self, add: AddRequest) -> None:
        """Raise InvalidRequest for a request that can never be served, Overloaded for one that finds the queue full."""
        request, state, limits = add.request, self._state, self._limits
        if request.request_id in state.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        check_request(add, limits)
        if self._check_extra is not None:
            self._check_extra(request.sampling)
        num_queued, most = state.num_queued, limits.max_num_queued_reqs
        if num_queued + len(request.choices) > most:
            raise Overloaded(
                f"{num_queued} requests and choices are waiting already, at most {most} may (max-num-queued-reqs)",
                param="max_num_queued_reqs",
                retry_after_s=RETRY_AFTER_S,
            )
        num_tokens, most = state.num_uncomputed_tokens, limits.max_num_queued_tokens
        # A prompt that is longer than the limit is served when it is alone.
        if most and num_tokens and num_tokens + len(request.token_ids) > most:
            raise Overloaded(
                f"prompts of {num_tokens} tokens wait already, at most {most} may (max-num-queued-tokens)",
                param="max_num_queued_tokens",
                retry_after_s=RETRY_AFTER_S,
            )

    def rank(self, add: AddRequest) -> float:
        """Return what orders requests before their arrival does.

        With aging, a request that came `priority_aging_s` later is worth one step of priority less: all age alike, so that
        the order never changes, and what may come before a request is bounded.
        """
        if not self._limits.by_priority:
            return 0.0
        if self._limits.priority_aging_s:
            return time.monotonic() + add.request.priority * self._limits.priority_aging_s
        return float(add.request.priority)

    def refuse(self, add: AddRequest, error: MeshError) -> None:
        """Answer a request that is not taken in: an error for each choice, and an end for its source."""
        outbox = self._state.outbox
        for choice in add.request.choices:
            outbox.deltas.append(
                ChoiceDelta(
                    request_id=add.request.request_id,
                    choice=choice,
                    finish_reason="error",
                    error_code=error.code,
                    error_message=error.message,
                    error_param=error.param or "",
                )
            )
        if add.source is not None:
            outbox.transfers.append(
                TransferEnded(
                    transfer_id=add.source.transfer_id,
                    peer_id=add.source.peer_id,
                    request_id=add.request.request_id,
                    committed=False,
                    reason="refused",
                )
            )


def check_request(add: AddRequest, limits: Limits) -> None:
    """Raise InvalidRequest, naming field, value and limit, for a request that can never be served."""
    request, sampling = add.request, add.request.sampling
    _check_choices(add, limits)
    check_sampling(sampling)
    _check_length(add, limits)
    _check_ids("prompt", request.token_ids, limits)
    for tokens in request.emitted:
        _check_ids("emitted", tokens, limits)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits)
    _check_ids("logit_bias", list(sampling.logit_bias), limits)
    _check_ids("allowed_token_ids", sampling.allowed_token_ids or [], limits)
    for word in sampling.bad_words_token_ids:
        _check_ids("bad_words", word, limits)
    if sampling.thinking is not None:
        _check_ids("thinking_token_budget", sampling.thinking.start_token_ids, limits)
        _check_ids("thinking_token_budget", sampling.thinking.end_token_ids, limits)


def _check_length(add: AddRequest, limits: Limits) -> None:
    num_prompt, sampling = len(add.request.token_ids), add.request.sampling
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
    if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
        raise InvalidRequest("max_tokens is 0; it must be at least 1", param="max_tokens")
    room = limits.max_model_len - (1 if sampling.max_tokens > 0 else 0)
    if num_prompt > room:
        raise InvalidRequest(
            f"the prompt has {num_prompt} tokens, but the context of {limits.max_model_len} tokens holds at most {room}",
            param="prompt",
        )


def _check_choices(add: AddRequest, limits: Limits) -> None:
    choices, emitted = add.request.choices, add.request.emitted
    if len(choices) > limits.max_num_queued_reqs:
        # Waiting would not help: it does not fit an empty queue either.
        raise InvalidRequest(
            f"the request has {len(choices)} choices, but this engine's queue holds at most "
            f"{limits.max_num_queued_reqs} (max-num-queued-reqs)",
            param="n",
        )
    if not choices or len(set(choices)) != len(choices) or not 0 <= min(choices) <= max(choices) < CHOICE_RANGE:
        raise InvalidRequest(f"choices {choices[:8]} must be distinct and in 0…{CHOICE_RANGE - 1}", param="n")
    if emitted and len(emitted) != len(choices):
        raise InvalidRequest(f"emitted has {len(emitted)} lists for {len(choices)} choices", param="emitted")


def _check_ids(field: str, token_ids: list[int], limits: Limits) -> None:
    if not token_ids:
        return
    try:
        array = np.array(token_ids, dtype=np.int64)
        low, high = int(array.min()), int(array.max())
    except OverflowError:
        low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"{field}: token id {wrong} is outside 0…{limits.vocab_size - 1}", param=field)
