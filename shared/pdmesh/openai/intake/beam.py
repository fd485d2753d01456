"""What a request with `use_beam_search` may ask for, and how its fields become a search.

Fields that say how a token is drawn (temperature, top_p, top_k, min_p, seed) are checked and have no effect, as in vLLM: a
beam search draws nothing. Those that change what is likely, or when text ends, cannot be honoured and are refused by name.
"""

import msgspec

from pdmesh.engine.sampling_limits import MAX_LOGPROBS
from pdmesh.errors import InvalidRequest
from pdmesh.openai.intake.sampling import Limits, resolve_sampling
from pdmesh.openai.schemas.generation import GenerationBody
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""A step needs twice as many alternatives of each beam, and engines report no more than MAX_LOGPROBS."""
MAX_LENGTH_PENALTY = 16.0
"""Lengths to this power are still numbers."""

# SamplingParams field -> the request's, for all that a search cannot take into account.
_NOT_SEARCHED = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words_token_ids": "bad_words",
    "repetition_detection": "repetition_detection",
    "thinking": "thinking_token_budget",
    "extra_args": "vllm_xargs",
}
_NEUTRAL = SamplingParams()


def check_beam_fields(body: GenerationBody) -> None:
    """Refuse what does not go together, before the prompt is looked at. Raises InvalidRequest."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise InvalidRequest("length_penalty has no effect without use_beam_search", param="length_penalty")
        return
    if body.stream:
        raise InvalidRequest("`stream` is not available with use_beam_search.", param="stream")
    if body.stops:
        raise _refused("stop")
    if body.kv_transfer_params is not None:
        raise _refused("kv_transfer_params")
    check_length_penalty(body.length_penalty)
    check_beam_width("n", body.n)


def resolve_beam(
    body: GenerationBody,
    *,
    text: TextModel,
    limits: Limits,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Check the rest as `resolve_sampling` does; the result's `n` is the beam width. Raises InvalidRequest."""
    resolved = resolve_sampling(
        # A width is not bound by what sampling makes of n.
        body.model_copy(update={"n": 1}),
        text=text,
        limits=limits,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    for name, shown in _NOT_SEARCHED.items():
        if getattr(resolved, name) != getattr(_NEUTRAL, name):
            raise _refused(shown)
    return msgspec.structs.replace(resolved, n=body.n or 1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def check_beam_width(name: str, width: int | None) -> None:
    if width is not None and not 1 <= width <= MAX_BEAM_WIDTH:
        raise InvalidRequest(
            f"{name} must be between 1 and {MAX_BEAM_WIDTH} with beam search, got {width}.", param=name
        )


def check_length_penalty(value: float | None) -> None:
    # Nothing compares with NaN.
    if value is not None and not abs(value) <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"length_penalty must be in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}], got {value}.",
            param="length_penalty",
        )


def _refused(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is not supported with use_beam_search", param=name)
