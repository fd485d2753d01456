"""Sampling and beam search parameters under vLLM's names; ranges are those of the HTTP API, checked by the same code."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Self

from pydantic import ValidationError
from tokenizers import Tokenizer, models

from pdmesh.errors import InvalidRequest
from pdmesh.offline.prompts import check_text
from pdmesh.openai.generator import ModelCard
from pdmesh.openai.intake.beam import check_beam_width, check_length_penalty
from pdmesh.openai.intake.prompts import resolve_max_tokens
from pdmesh.openai.intake.sampling import Limits, for_prompt, resolve_sampling
from pdmesh.openai.run.choice import TextOptions
from pdmesh.openai.schemas import GenerationBody
from pdmesh.openai.schemas.unsupported import refuse_unsupported
from pdmesh.openai.text import StopStrings, TextModel
from pdmesh.protocol import messages

# Before a model is known: ids and lengths up to here pass.
_ANY = 1 << 31


@dataclass(kw_only=True)
class RepetitionDetectionParams:
    """End an answer (finish reason `repetition`) that ends in `min_count` repeats of one pattern."""

    max_pattern_size: int
    """Tokens of the longest pattern looked for; 0 is off."""
    min_pattern_size: int = 0
    """Tokens of the shortest; 0 stands for 1."""
    min_count: int = 2


@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are drawn. Raises InvalidRequest, which names field, value and range."""

    n: int = 1
    """Answers per prompt; they share its prefill."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 are off."""
    min_p: float = 0.0
    seed: int | None = None
    """None: a random one for each prompt."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: all that the context leaves."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives to report for each token; 0: the token's own only."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """False: `text` is empty; stop strings need it."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """No effect, as in vLLM with fast tokenizers."""
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    extra_args: dict[str, Any] | None = None
    """For custom logits processors."""

    def __post_init__(self) -> None:
        if not self.detokenize and self.stop:
            raise InvalidRequest("stop strings are found in text, which detokenize=False does not make", param="stop")
        # What depends on a model, words above all, is checked again when there is one.
        body = _body(self).model_copy(update={"bad_words": None, "thinking_token_budget": None})
        max_tokens = _ANY if self.max_tokens is None else self.max_tokens
        _resolve(self, body, text=_no_text(), limits=_any_limits(), max_tokens=max_tokens)

    def clone(self) -> Self:
        """Return a copy."""
        return replace(self)


@dataclass(kw_only=True)
class BeamSearchParams:
    """What a beam search looks for. `temperature` has no effect, as in vLLM: beams are compared by the model's own numbers."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    """A beam's log-probability is divided by its number of tokens, prompt included, to this power."""
    include_stop_str_in_output: bool = False
    """Show the token that ended a beam in its text."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width)
        check_integer("max_tokens", self.max_tokens)
        check_beam_width("beam_width", self.beam_width)
        check_length_penalty(self.length_penalty)
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}.", param="max_tokens")
        SamplingParams(temperature=self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Parameters checked against a model, for any number of prompts."""

    params: SamplingParams
    body: GenerationBody
    sampling: messages.SamplingParams
    options: TextOptions

    def with_seed(self, seed: int) -> "Resolved":
        """Return the same with a seed, unless they have one."""
        return self if self.params.seed is not None else replace(self, body=self.body.model_copy(update={"seed": seed}))

    def for_prompt(self, num_prompt_tokens: int, card: ModelCard) -> messages.SamplingParams:
        """Fit them to what one prompt leaves of the context; each prompt has a seed of its own when none is given."""
        requested = self.params.max_tokens
        max_tokens = resolve_max_tokens(
            requested,
            name="max_tokens",
            num_prompt_tokens=num_prompt_tokens,
            card=card,
            # Scoring a prompt generates nothing.
            zero_allowed=self.params.prompt_logprobs is not None,
        )
        return for_prompt(self.sampling, self.body, max_tokens)


def check_integer(name: str, value: object) -> None:
    """Raise InvalidRequest for what is no int: a bool and a float are not."""
    if type(value) is not int:
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", param=name)


def resolve(params: SamplingParams, *, text: TextModel, limits: Limits) -> Resolved:
    """Check against a model. Raises InvalidRequest."""
    body = _body(params)
    requested = limits.card.max_model_len if params.max_tokens is None else params.max_tokens
    return Resolved(
        params=params,
        body=body,
        sampling=_resolve(params, body, text=text, limits=limits, max_tokens=requested),
        options=TextOptions(
            stops=StopStrings(body.stops),
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            logprobs=params.logprobs is not None,
        ),
    )


def _resolve(
    params: SamplingParams, body: GenerationBody, *, text: TextModel, limits: Limits, max_tokens: int
) -> messages.SamplingParams:
    if max_tokens < 1 and params.prompt_logprobs is None:
        raise InvalidRequest(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    return resolve_sampling(
        body,
        text=text,
        limits=limits,
        max_tokens=max_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _body(params: SamplingParams) -> GenerationBody:
    """The same parameters as a client would send them."""
    values = {name: value for name, value in asdict(params).items() if name not in ("detokenize", "logprobs")}
    values["vllm_xargs"] = values.pop("extra_args")
    if params.logit_bias is not None:
        values["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    for name in ("stop", "bad_words", "extra_args"):
        check_text(name, getattr(params, name))
    refuse_unsupported(values)
    try:
        return GenerationBody(**values)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{name}: {message} (got {first['input']!r})", param=name) from exc


@cache
def _no_text() -> TextModel:
    return TextModel(name="", tokenizer=Tokenizer(models.BPE()), eos_token_ids=[])


@cache
def _any_limits() -> Limits:
    card = ModelCard(name="", root="", max_model_len=_ANY, created_s=0, vocab_size=_ANY)
    return Limits(card=card, max_logprobs=_ANY)
