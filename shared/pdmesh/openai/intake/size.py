"""Bounds one request as a whole: fields that are each within range can still, multiplied, be gigabytes of work."""

from pdmesh.errors import InvalidRequest
from pdmesh.openai.intake.sampling import MAX_CHOICES
from pdmesh.protocol.messages import SamplingParams
from pdmesh.protocol.wire import encode_extra_args

MAX_REQUEST_TOKENS = 1 << 22
"""Token ids that one request may make the proxy or an engine hold at once."""
ALTERNATIVE_TOKENS = 4
"""What a reported prompt alternative counts as: 350 bytes as objects and JSON and 4.5 µs to spell were measured for one,
so the limit is some 350 MB and 5 s."""

BYTES_PER_TOKEN = 4


def check_size(prompts: list[list[int]], sampling: SamplingParams) -> None:
    """Refuse what a small body blows up: choices over all prompts, and what each of them carries. Raises InvalidRequest."""
    num_choices = sampling.n * len(prompts)
    if num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"n × prompts must be at most {MAX_CHOICES} choices, got {sampling.n} × {len(prompts)} = {num_choices}.",
            param="n",
        )
    lists = num_listed_ids(sampling)
    # Each choice's answer has the prompt's alternatives.
    num_alternatives = 0 if sampling.prompt_logprobs is None else 1 + sampling.prompt_logprobs
    per_token = 1 + ALTERNATIVE_TOKENS * num_alternatives
    num_tokens = sampling.n * sum(per_token * len(token_ids) + lists for token_ids in prompts)
    if num_tokens > MAX_REQUEST_TOKENS:
        raise InvalidRequest(
            f"The request is too large: n × (prompt tokens + {ALTERNATIVE_TOKENS} for each prompt logprob + token ids in "
            f"logit_bias, allowed_token_ids, stop_token_ids and bad_words + a quarter of the bytes of vllm_xargs), summed over "
            f"all prompts, must be at most "
            f"{MAX_REQUEST_TOKENS}, got {num_tokens}. Please reduce n, the prompts, or the lists.",
            param="n" if sampling.n > 1 else "prompt",
        )


def num_listed_ids(sampling: SamplingParams) -> int:
    """Count the ids that travel with every choice beside its prompt."""
    return (
        len(sampling.logit_bias)
        + len(sampling.allowed_token_ids or ())
        + len(sampling.stop_token_ids)
        + sum(map(len, sampling.bad_words_token_ids))
        + (len(encode_extra_args(sampling.extra_args)) // BYTES_PER_TOKEN if sampling.extra_args else 0)
    )
