"""Turns a body's sampling fields into SamplingParams, or says which field is out of range.

Ranges are vLLM 0.32's. What an engine gets is resolved: no null, no "off" in two spellings, a seed always.
"""

import math
import secrets
from dataclasses import dataclass

import msgspec

from pdmesh.openai.generator import ModelCard
from pdmesh.openai.intake.extra_args import resolve_extra_args
from pdmesh.openai.intake.refusal import refuse
from pdmesh.openai.intake.repetition import resolve_repetition
from pdmesh.openai.intake.thinking import ThinkingTokens, resolve_thinking
from pdmesh.openai.schemas.generation import GenerationBody
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import SamplingParams

MAX_CHOICES = 16384
MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 4096
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
INT64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the ranges depend on besides constants."""

    card: ModelCard
    max_logprobs: int
    thinking: ThinkingTokens | None = None
    """None: a thinking section is not configured."""


def resolve_sampling(
    body: GenerationBody,
    *,
    text: TextModel,
    limits: Limits,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Check and resolve all but what depends on a prompt's length, see `for_prompt`. Raises InvalidRequest with `param`."""
    check_stops(body)
    temperature = _temperature(body.temperature)
    greedy = temperature == 0.0
    top_p = _range("top_p", body.top_p, 1.0, 0.0, 1.0, low_open=True)
    top_k = _top_k(body.top_k, limits.card.vocab_size)
    min_p = _range("min_p", body.min_p, 0.0, 0.0, 1.0)
    return SamplingParams(
        n=_choices(body.n, greedy),
        temperature=temperature,
        # Greedy takes the top token whatever the others are allowed to weigh.
        top_p=1.0 if greedy else top_p,
        top_k=0 if greedy else top_k,
        min_p=0.0 if greedy else min_p,
        presence_penalty=_range("presence_penalty", body.presence_penalty, 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=_range("frequency_penalty", body.frequency_penalty, 0.0, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=_range("repetition_penalty", body.repetition_penalty, 1.0, 0.0, math.inf, low_open=True),
        seed=_seed(body.seed),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body.min_tokens, max_tokens),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids or [], limits, MAX_STOP_TOKEN_IDS),
        logprobs=check_logprobs("logprobs", logprobs, limits),
        prompt_logprobs=check_logprobs("prompt_logprobs", prompt_logprobs, limits),
        logit_bias=_logit_bias(body.logit_bias, limits),
        allowed_token_ids=_allowed(body.allowed_token_ids, limits),
        bad_words_token_ids=_bad_words(body.bad_words or [], text),
        repetition_detection=resolve_repetition(body.repetition_detection),
        thinking=resolve_thinking(body.thinking_token_budget, limits.thinking),
        extra_args=resolve_extra_args(body.vllm_xargs),
    )


def for_prompt(sampling: SamplingParams, body: GenerationBody, max_tokens: int) -> SamplingParams:
    """Fit `sampling` to what one prompt leaves of the context; without a seed of the client's each prompt has its own."""
    return msgspec.structs.replace(
        sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens), seed=_seed(body.seed)
    )


def check_logprobs(name: str, value: int | None, limits: Limits) -> int | None:
    """Check a number of alternatives; -1 asks for the whole vocabulary."""
    if value is None:
        return None
    if value < -1:
        refuse(name, f"{name} must be non-negative or -1, got {value}.", value)
    wanted = limits.card.vocab_size if value == -1 else value
    if wanted > limits.max_logprobs:
        refuse(name, f"Requested {name} of {wanted}, which is greater than max allowed: {limits.max_logprobs}", value)
    return wanted


def check_stops(body: GenerationBody) -> None:
    if len(body.stops) > MAX_STOPS:
        refuse("stop", f"stop must have at most {MAX_STOPS} strings, got {len(body.stops)}.")
    for stop in body.stops:
        if not stop:
            refuse("stop", "stop cannot contain an empty string.")
        if len(stop) > MAX_STOP_CHARS:
            refuse("stop", f"a stop string must have at most {MAX_STOP_CHARS} characters, got {len(stop)}.")


def check_int64(name: str, value: int | None) -> int:
    value = value or 0
    if not -INT64 <= value < INT64:
        refuse(name, f"{name} must be a 64-bit integer.", value)
    return value


def _temperature(value: float | None) -> float:
    temperature = _range("temperature", value, 1.0, 0.0, MAX_TEMPERATURE)
    if temperature < GREEDY_BELOW:
        return 0.0
    return max(temperature, MIN_TEMPERATURE)


def _range(name: str, value: float | None, default: float, low: float, high: float, *, low_open: bool = False) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or value < low or value > high or (low_open and value == low):
        shown = f"{'(' if low_open else '['}{low:g}, {high:g}]" if math.isfinite(high) else f"above {low:g} and finite"
        refuse(name, f"{name} must be in {shown}, got {value}.".replace("in above", "above"), value)
    return value


def _choices(n: int | None, greedy: bool) -> int:
    n = 1 if n is None else n
    if not 1 <= n <= MAX_CHOICES:
        refuse("n", f"n must be at least 1 and at most {MAX_CHOICES}, got {n}.", n)
    if greedy and n > 1:
        refuse("n", f"n must be 1 when using greedy sampling, got {n}.", n)
    return n


def _top_k(value: int | None, vocab_size: int) -> int:
    value = value or 0
    if value < -1:
        refuse("top_k", f"top_k must be 0 or -1 (off), or at least 1, got {value}.", value)
    return 0 if value == -1 else min(value, vocab_size)


def _seed(value: int | None) -> int:
    if value is not None and not -INT64 <= value < INT64:
        refuse("seed", "seed must be a 64-bit integer.", value)
    return secrets.randbits(63) if value is None or value == -1 else value


def _min_tokens(value: int | None, max_tokens: int) -> int:
    value = value or 0
    if value < 0:
        refuse("min_tokens", f"min_tokens must be at least 0, got {value}.", value)
    if value > max_tokens:
        refuse("min_tokens", f"min_tokens must be at most max_tokens={max_tokens}, got {value}.", value)
    return value


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        refuse(name, f"Token id {wrong} is out of vocabulary (0 … {vocab_size - 1}).", wrong)


def _token_ids(name: str, ids: list[int], limits: Limits, max_ids: int) -> list[int]:
    check_token_ids(name, ids, limits.card.vocab_size)
    if len(unique := list(dict.fromkeys(ids))) > max_ids:
        refuse(name, f"{name} must have at most {max_ids} different ids, got {len(unique)}.")
    return unique


def _allowed(ids: list[int] | None, limits: Limits) -> list[int] | None:
    if ids is None:
        return None
    if not ids:
        refuse("allowed_token_ids", "allowed_token_ids cannot be empty.")
    return _token_ids("allowed_token_ids", ids, limits, limits.card.vocab_size)


def _logit_bias(bias: dict[str, float] | None, limits: Limits) -> dict[int, float]:
    resolved: dict[int, float] = {}
    if len(bias or {}) > MAX_BIASED_TOKENS:
        refuse("logit_bias", f"logit_bias must have at most {MAX_BIASED_TOKENS} entries, got {len(bias or {})}.")
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.removeprefix("-").isdigit() or len(key) > 20:
            refuse("logit_bias", f"logit_bias keys must be token ids, got {key[:40]!r}.")
        if math.isnan(value):
            refuse("logit_bias", "logit_bias values must be numbers, got NaN.")
        resolved[int(key)] = max(-MAX_BIAS, min(MAX_BIAS, value))
    check_token_ids("logit_bias", list(resolved), limits.card.vocab_size)
    return resolved


def _bad_words(words: list[str], text: TextModel) -> list[list[int]]:
    """Both ways a word can appear: at the start of a text, and after a space."""
    if len(words) > MAX_BAD_WORDS:
        refuse("bad_words", f"bad_words must have at most {MAX_BAD_WORDS} entries, got {len(words)}.")
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        if not bare or len(bare) > MAX_STOP_CHARS:
            refuse("bad_words", f"a bad word must have 1 to {MAX_STOP_CHARS} characters besides leading spaces.")
        for form in (bare, " " + bare):
            ids = text.encode(form, add_special_tokens=False)
            if not ids:
                refuse("bad_words", f"bad word {word[:40]!r} has no tokens.")
            if ids not in found:
                found.append(ids)
    if len(found) > MAX_BAD_WORDS:
        refuse("bad_words", f"bad_words must give at most {MAX_BAD_WORDS} token sequences, got {len(found)}.")
    return found
