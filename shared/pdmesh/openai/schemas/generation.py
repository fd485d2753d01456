"""What completions and chat completions have in common: OpenAI's sampling fields and vLLM's additions."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pdmesh.openai.schemas.fields import Flag, Integer, Number, RequestBody, Text


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    include_usage: Flag | None = False
    """One more chunk at the end with the usage."""
    continuous_usage_stats: Flag | None = False
    """With include_usage: the usage so far on every chunk."""


class RepetitionBody(BaseModel):
    """When an output ends because it repeats itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_pattern_size: Integer | None = 0
    """Tokens of the longest pattern looked for; 0 is off."""
    min_pattern_size: Integer | None = 0
    """Tokens of the shortest; 0 stands for 1."""
    min_count: Integer | None = 0
    """How often it must come in a row, at least 2."""


class GenerationBody(RequestBody):
    """Fields of every generating endpoint. `null` means the default."""

    frequency_penalty: Number | None = 0.0
    presence_penalty: Number | None = 0.0
    logit_bias: dict[Text, Number] | None = None
    """Token id to bias, clamped to ±100."""
    max_tokens: Integer | None = None
    n: Integer | None = 1
    seed: Integer | None = None
    stop: Text | list[Text] | None = None
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    temperature: Number | None = 1.0
    top_p: Number | None = 1.0
    user: Text | None = None
    """Accepted; has no effect."""

    top_k: Integer | None = 0
    min_p: Number | None = 0.0
    repetition_penalty: Number | None = 1.0
    stop_token_ids: list[Integer] | None = None
    include_stop_str_in_output: Flag | None = False
    ignore_eos: Flag | None = False
    use_beam_search: Flag | None = False
    """The `n` most likely answers found, best first, instead of `n` drawn ones."""
    length_penalty: Number | None = 1.0
    """With beam search: a beam's log-probability is divided by its length to this power."""
    min_tokens: Integer | None = 0
    skip_special_tokens: Flag | None = True
    spaces_between_special_tokens: Flag | None = True
    """Accepted; has no effect with fast tokenizers (in vLLM neither)."""
    truncate_prompt_tokens: Integer | None = None
    """Keep this many of the prompt's tokens; -1: as many as fit beside max_tokens."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are dropped; default left."""
    allowed_token_ids: list[Integer] | None = None
    bad_words: list[Text] | None = None
    prompt_logprobs: Integer | None = None
    repetition_detection: RepetitionBody | None = None
    thinking_token_budget: Integer | None = None
    """Most tokens of a thinking section, after which its end is forced; -1: no limit."""
    vllm_xargs: dict[Text, Any] | None = None
    """For custom logits processors: names to numbers, strings, true and false, or lists of numbers and strings."""
    priority: Integer | None = 0
    request_id: Text | None = None
    session_id: Text | None = None
    """Accepted; has no effect yet."""
    cache_salt: Text | None = None
    """Keeps this request's prefix cache apart from others', at most 128 characters."""
    return_tokens_as_token_ids: Flag | None = False
    return_token_ids: Flag | None = False
    kv_transfer_params: dict[str, Any] | None = None
    """vLLM's P/D parameters; engine ports only."""

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)
