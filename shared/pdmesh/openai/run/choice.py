"""The text of one choice: deltas of token ids in, text out, until a stop string or the engine ends it."""

from dataclasses import dataclass, field

import msgspec

from pdmesh.openai.generator import TokenRequest
from pdmesh.openai.run.logprobs import LogprobSpeller, PositionLogprobs
from pdmesh.openai.text import StopScanner, StopStrings, TextModel
from pdmesh.protocol.messages import ChoiceDelta

REPETITION_DETECTED = "repetition_detected"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text in an answer."""

    stops: StopStrings = field(default_factory=lambda: StopStrings([]))
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False
    tokens_as_ids: bool = False


class ChoiceUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What one delta added to one choice of the answer."""

    index: int
    """Among all choices of the answer: prompt × n + choice."""
    prompt_index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stopped_here: bool = False
    """A stop string ended it, which the engine does not know."""


class ChoiceText:
    """State of one running choice."""

    def __init__(
        self, *, index: int, prompt_index: int, request: TokenRequest, text: TextModel, options: TextOptions
    ) -> None:
        self._index = index
        self._prompt_index = prompt_index
        self._min_tokens = request.sampling.min_tokens
        self._options = options
        self._include_stop = options.include_stop
        self._detokenizer = text.detokenizer(context=request.token_ids, skip_special_tokens=options.skip_special_tokens)
        self._scanner = StopScanner(options.stops, options.include_stop)
        self._speller = LogprobSpeller(text, request.token_ids, options.tokens_as_ids) if options.logprobs else None
        self.num_tokens = 0
        self.ended = False

    def feed(self, delta: ChoiceDelta) -> ChoiceUpdate:
        """Take a delta. After an update with a finish_reason the choice is over."""
        if len(delta.token_ids) == 1 and not delta.finish_reason and not self._options.stops.automata:
            return self._feed_one(delta, delta.token_ids)
        pieces: list[str] = []
        stop: str | None = None
        num_used = 0
        # The token that ended a choice is not text, unless asked for like a stop string.
        silent_last = delta.finish_reason == "stop" and not self._include_stop
        for position, token_id in enumerate(delta.token_ids):
            num_used += 1
            self.num_tokens += 1
            if silent_last and position == len(delta.token_ids) - 1:
                break
            scanned = self._scanner.push(self._detokenizer.push(token_id), self.num_tokens > self._min_tokens)
            pieces.append(scanned.text)
            if scanned.stop is not None:
                stop = scanned.stop
                break
        if stop is None and delta.finish_reason:
            pieces.append(self._scanner.flush())
        self.ended = stop is not None or bool(delta.finish_reason)
        spelled = [self._speller.spell(position) for position in delta.logprobs[:num_used]] if self._speller else None
        return ChoiceUpdate(
            index=self._index,
            prompt_index=self._prompt_index,
            text="".join(pieces),
            token_ids=delta.token_ids[:num_used],
            logprobs=spelled,
            finish_reason="stop" if stop is not None else delta.finish_reason or None,
            stop_reason=stop if stop is not None else _stop_reason(delta),
            stopped_here=stop is not None and not delta.finish_reason,
        )

    def _feed_one(self, delta: ChoiceDelta, token_ids: list[int]) -> ChoiceUpdate:
        """Take a token that ends nothing and can complete no stop string: nearly all are such."""
        self.num_tokens += 1
        return ChoiceUpdate(
            index=self._index,
            prompt_index=self._prompt_index,
            text=self._detokenizer.push(token_ids[0]),
            token_ids=token_ids,
            logprobs=[self._speller.spell(position) for position in delta.logprobs[:1]] if self._speller else None,
        )


def _stop_reason(delta: ChoiceDelta) -> int | str | None:
    """What the engine says ended a choice, as vLLM has it."""
    return REPETITION_DETECTED if delta.finish_reason == "repetition" else delta.stop_token_id
