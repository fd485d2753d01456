"""Token log-probabilities as text: what each chosen token and its alternatives say at their place in the output."""

import math
from dataclasses import dataclass

from pdmesh.errors import InternalError
from pdmesh.openai.schemas.answers import PromptLogprob
from pdmesh.openai.text import Detokenizer, TextModel
from pdmesh.protocol.messages import TokenLogprobs

# JSON has no infinity; OpenAI and vLLM send this for a token that cannot occur.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token at one position."""

    token_id: int
    text: str
    logprob: float
    rank: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token and the most likely ones, best first (the chosen may be among them)."""

    chosen: Candidate
    top: list[Candidate]


class LogprobSpeller:
    """Follows one choice and spells its tokens so that they, joined, are its text (special tokens written out)."""

    def __init__(self, text: TextModel, context: list[int] | None, as_token_ids: bool) -> None:
        self._text = text
        self._detokenizer: Detokenizer = text.detokenizer(context=context, skip_special_tokens=False)
        self._as_token_ids = as_token_ids

    def spell(self, position: TokenLogprobs) -> PositionLogprobs:
        """Take the next position. Raises InternalError for NaN: the numbers behind the request are wrong."""
        chosen_id = position.token_ids[0]
        # The alternatives are spelled before the chosen token moves the state on.
        top = [
            self._candidate(token_id, logprob, rank, self._detokenizer.peek(token_id))
            for token_id, logprob, rank in _ranked(position)
        ]
        said = self._detokenizer.push(chosen_id)
        return PositionLogprobs(self._candidate(chosen_id, position.logprobs[0], position.rank, said), top)

    def skip(self, token_id: int) -> Candidate:
        """Take a token without logprobs (a prompt's first)."""
        return self._candidate(token_id, 0.0, 0, self._detokenizer.push(token_id))

    def _candidate(self, token_id: int, logprob: float, rank: int, said: str) -> Candidate:
        if math.isnan(logprob):
            raise InternalError("the model produced NaN log-probabilities for this request")
        shown = f"token_id:{token_id}" if self._as_token_ids else said
        return Candidate(token_id, shown, max(logprob, LOWEST_LOGPROB), rank, self._text.vocabulary.bytes_of(token_id))


def prompt_entry(position: PositionLogprobs) -> dict[int, PromptLogprob]:
    """Shape one prompt position as vLLM's `prompt_logprobs` has it."""
    return {
        candidate.token_id: PromptLogprob(logprob=candidate.logprob, rank=candidate.rank, decoded_token=candidate.text)
        for candidate in [position.chosen, *position.top]
    }


def _ranked(position: TokenLogprobs) -> list[tuple[int, float, int]]:
    """Give the alternatives (id, logprob, rank), best first; the chosen token counts where its rank puts it."""
    others = list(zip(position.token_ids[1:], position.logprobs[1:], strict=True))
    chosen = (position.token_ids[0], position.logprobs[0])
    num_asked = len(others)
    if chosen[0] not in position.token_ids[1:] and position.rank <= num_asked:
        others.insert(position.rank - 1, chosen)
    return [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(others[:num_asked], start=1)]
