"""The ranges of sampling parameters that the core works with: vLLM's, see `openai/intake/sampling.py`, once resolved.

The HTTP edge has clients' values resolved and refused already; this is for whoever speaks to an engine directly, and for a
release that knows other ranges.
"""

import math

from pdmesh.errors import InvalidRequest
from pdmesh.protocol.messages import ExtraArgs, RepetitionDetection, SamplingParams, ThinkingBudget
from pdmesh.protocol.wire import MAX_EXTRA_ARGS_BYTES, encode_extra_args

MAX_CHOICES = 16384
MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
# The most that `max-logprobs` can be set to, whatever it is set to on the port that a client used.
MAX_LOGPROBS = 1000
INT31 = (1 << 31) - 1
INT64 = 1 << 63


def check_sampling(sampling: SamplingParams) -> None:
    """Raise InvalidRequest, naming field, value and range. Token ids are for `admission`, which knows the vocabulary."""
    _check_count("n", sampling.n, 1, MAX_CHOICES)
    _check("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _check("top_p", sampling.top_p, 0.0, 1.0, is_low_open=True)
    # -1 and 0 are off.
    _check_count("top_k", sampling.top_k, -1)
    _check("min_p", sampling.min_p, 0.0, 1.0)
    _check("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, is_low_open=True)
    _check_count("seed", sampling.seed, -INT64, INT64 - 1)
    _check_count("max_tokens", sampling.max_tokens, 0)
    _check_count("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    for name, value in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if value is not None:
            _check_count(name, value, 0, MAX_LOGPROBS)
    for bias in sampling.logit_bias.values():
        _check("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    if sampling.allowed_token_ids == []:
        raise InvalidRequest("allowed_token_ids is empty, so no token could follow", param="allowed_token_ids")
    if [] in sampling.bad_words_token_ids:
        raise InvalidRequest("bad_words: a word has no tokens", param="bad_words")
    _check_repetition(sampling.repetition_detection)
    _check_thinking(sampling.thinking)
    _check_extra_args(sampling.extra_args)


def _check_repetition(detection: RepetitionDetection | None) -> None:
    if detection is None:
        return
    name = "repetition_detection"
    _check_count(name, detection.max_pattern_size, 0, INT31, part="max_pattern_size")
    _check_count(name, detection.min_pattern_size, 0, detection.max_pattern_size, part="min_pattern_size")
    if detection.max_pattern_size:
        _check_count(name, detection.min_count, 2, INT31, part="min_count")


def _check_thinking(thinking: ThinkingBudget | None) -> None:
    if thinking is None:
        return
    _check_count("thinking_token_budget", thinking.budget, 0, INT31)
    if not thinking.start_token_ids or not thinking.end_token_ids:
        raise InvalidRequest(
            "thinking_token_budget: what opens and what closes a thinking section must have tokens",
            param="thinking_token_budget",
        )


def _check_extra_args(args: ExtraArgs) -> None:
    size = len(encode_extra_args(args)) if args else 0
    if size > MAX_EXTRA_ARGS_BYTES:
        raise InvalidRequest(
            f"vllm_xargs must take at most {MAX_EXTRA_ARGS_BYTES} bytes as MessagePack, got {size}", param="vllm_xargs"
        )


def _check(name: str, value: float, low: float, high: float, *, is_low_open: bool = False) -> None:
    # Nothing compares with NaN.
    if math.isfinite(value) and (low < value if is_low_open else low <= value) and value <= high:
        return
    shown = f"{'(' if is_low_open else '['}{low:g}, {high:g}{']' if math.isfinite(high) else ')'}"
    raise InvalidRequest(f"{name} must be in {shown}, got {value}", param=name)


def _check_count(name: str, value: int, low: int, high: int | None = None, *, part: str = "") -> None:
    if value < low or (high is not None and value > high):
        shown = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name}{part and '.' + part} must be {shown}, got {value}", param=name)
