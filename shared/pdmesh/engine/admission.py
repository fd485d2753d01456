"""What the core accepts: every request is checked once, here, so that nothing behind it meets data it cannot work with."""

from dataclasses import dataclass

import numpy as np

from pdmesh.engine.messages import AddRequest
from pdmesh.engine.sampling_limits import check_sampling
from pdmesh.errors import InvalidRequest

# The noise counts choices in 32 bits.
CHOICE_RANGE = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler must keep to; resolved from configuration, model and pool."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_num_active_seqs: int = 0
    """0: as many as `max_num_seqs`."""
    long_prefill_token_threshold: int = 0
    """0 is off."""
    is_threshold_adaptive: bool = False
    max_num_partial_prefills: int = 0
    """0 is off."""
    by_priority: bool = False
    priority_aging_s: float = 0.0
    """0: strict."""
    watermark_blocks: int = 0
    max_num_queued_reqs: int = 4096
    """Requests, each choice counted."""
    max_num_queued_tokens: int = 0
    """Prompt tokens of requests whose prompt is not computed; 0: no limit."""
    stream_interval: int = 1


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
