"""What the offline API returns, under vLLM's names; and how it says that some of many prompts failed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdmesh.errors import MeshError
from pdmesh.openai.run.logprobs import Candidate, PositionLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position."""

    logprob: float
    rank: int | None = None
    """In the vocabulary, from 1."""
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
"""Token id to its log-probability: the chosen token first, then the most likely ones."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the tokens, when `logprobs` were asked for."""
    logprobs: list[LogprobsOnePosition] | None
    finish_reason: str | None = None
    """stop, length, repetition or abort."""
    stop_reason: int | str | None = None
    """The stop string or stop token id; None for EOS and for what did not stop."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None
    """None when token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOnePosition | None] | None
    """One per prompt token, the first None."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """Prompt and generated tokens, the one that ended it included."""
    text: str
    """Of prompt and generated tokens."""
    cum_logprob: float
    """Of the generated tokens."""
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    """One per generated token: it and the most likely ones there, 2 × beam_width."""
    finish_reason: str = "length"
    """stop or length."""
    stop_reason: int | None = None
    """The token that ended it."""


@dataclass(slots=True, kw_only=True)
class BeamSearchOutput:
    """The beams of one prompt."""

    sequences: list[BeamSearchSequence]
    """At most beam_width, best first."""


class PromptsFailed(MeshError):
    """Some prompts of a call failed; the others were finished first, and nothing of them is lost."""

    def __init__(
        self, outputs: Sequence[RequestOutput | BeamSearchOutput | None], errors: dict[int, MeshError]
    ) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(outputs)} prompts failed; prompt {first}: {errors[first].message} "
            "(.outputs has the others' answers, .errors each failure)"
        )
        self.outputs = outputs
        """One per prompt, in order; None where it failed."""
        self.errors = errors
        """Prompt index to what went wrong."""


def one_position(position: PositionLogprobs) -> LogprobsOnePosition:
    """Shape a spelled position as vLLM has it."""
    return {each.token_id: _logprob(each) for each in (position.chosen, *position.top)}


def _logprob(candidate: Candidate) -> Logprob:
    return Logprob(candidate.logprob, candidate.rank, candidate.text)
