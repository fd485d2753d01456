"""The answer of /v1/completions, streamed or whole."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdmesh.openai.answer.base import Answer, AnswerHead
from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.choice import ChoiceUpdate
from pdmesh.openai.run.logprobs import Candidate, LogprobSpeller, PositionLogprobs
from pdmesh.openai.schemas.answers import Completion, CompletionChoice, CompletionLogprobs
from pdmesh.openai.schemas.completion import CompletionBody
from pdmesh.openai.text import TextModel


@dataclass(slots=True)
class _Choice:
    """One choice of a whole answer, growing."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    last: ChoiceUpdate | None = None


class CompletionAnswer(Answer):
    chunk_type = Completion
    empty_text = b'"text":""'
    body: CompletionBody

    def __init__(self, head: AnswerHead, body: CompletionBody, run: AnswerRun, text: TextModel) -> None:
        super().__init__(head, body, run, text)
        self._choices: dict[int, _Choice] = {}
        self._offsets: dict[int, int] = {}
        """Characters of each choice's tokens so far."""

    @property
    def _has_logprobs(self) -> bool:
        return self.body.logprobs is not None

    def chunks(self, update: ChoiceUpdate) -> list[msgspec.Struct]:
        choice = self._choice(update)
        return [
            Completion(
                id=self.head.id,
                created=self.head.created,
                model=self.head.model,
                choices=[choice],
                system_fingerprint=self._fingerprint_for(update),
                usage=self._usage_for_chunk(),
            )
        ]

    def collect(self, update: ChoiceUpdate) -> None:
        part = self._choice(update)
        whole = self._choices.setdefault(update.index, _Choice())
        whole.text.append(part.text)
        whole.token_ids += update.token_ids
        whole.last = update
        if part.logprobs is not None:
            if whole.logprobs is None:
                whole.logprobs = part.logprobs
            else:
                _extend(whole.logprobs, part.logprobs)

    def whole(self, transfer_params: dict[str, Any] | None) -> msgspec.Struct:
        return Completion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)],
            service_tier=None,
            system_fingerprint=self.head.fingerprint,
            usage=self.run.usage(),
            kv_transfer_params=transfer_params,
        )

    def _whole_choice(self, index: int, choice: _Choice) -> CompletionChoice:
        if choice.last is None:
            raise AssertionError("a choice without an update")
        prompt_index = choice.last.prompt_index
        return CompletionChoice(
            index=index,
            text="".join(choice.text),
            logprobs=choice.logprobs,
            finish_reason=choice.last.finish_reason,
            stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else None,
            prompt_logprobs=self._prompt_logprobs(prompt_index),
            prompt_token_ids=self.run.prompts[prompt_index].request.token_ids if self.body.return_token_ids else None,
        )

    def _choice(self, update: ChoiceUpdate) -> CompletionChoice:
        """Shape an update; a choice's first one begins with the prompt when it is echoed."""
        prompt = self.run.prompts[update.prompt_index]
        begins = self._begins(update.index)
        echoes = begins and bool(self.body.echo)
        text = (self._echoed_text(update.prompt_index) if echoes else "") + update.text
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = _no_logprobs()
            if echoes:
                self._add_prompt(logprobs, update)
            for position in update.logprobs or []:
                self._add(logprobs, update.index, position)
        return CompletionChoice(
            index=update.index,
            text=text,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            token_ids=update.token_ids if self.body.return_token_ids else None,
            prompt_token_ids=prompt.request.token_ids if begins and self.body.return_token_ids else None,
        )

    def _echoed_text(self, prompt_index: int) -> str:
        prompt = self.run.prompts[prompt_index]
        if prompt.prompt.text is not None:
            return prompt.prompt.text
        return self.text.decode(prompt.request.token_ids, bool(self.body.skip_special_tokens))

    def _add_prompt(self, logprobs: CompletionLogprobs, update: ChoiceUpdate) -> None:
        token_ids = self.run.prompts[update.prompt_index].request.token_ids
        for token_id, position in zip(token_ids, self._spelled_prompt(update.prompt_index), strict=False):
            if position is None:
                speller = LogprobSpeller(self.text, None, bool(self.body.return_tokens_as_token_ids))
                self._append(logprobs, update.index, speller.skip(token_id).text, None, None)
            else:
                self._add(logprobs, update.index, position)

    def _add(self, logprobs: CompletionLogprobs, index: int, position: PositionLogprobs) -> None:
        chosen = position.chosen
        top = {chosen.text: chosen.logprob}
        for candidate in position.top:
            top.setdefault(candidate.text, candidate.logprob)
        self._append(logprobs, index, chosen.text, chosen, top)

    def _append(
        self,
        logprobs: CompletionLogprobs,
        index: int,
        token: str,
        chosen: Candidate | None,
        top: dict[str, float] | None,
    ) -> None:
        offset = self._offsets.get(index, 0)
        logprobs.text_offset.append(offset)
        logprobs.tokens.append(token)
        logprobs.token_logprobs.append(None if chosen is None else chosen.logprob)
        logprobs.top_logprobs.append(top)
        self._offsets[index] = offset + len(token)


def _no_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])


def _extend(whole: CompletionLogprobs, part: CompletionLogprobs) -> None:
    whole.text_offset += part.text_offset
    whole.token_logprobs += part.token_logprobs
    whole.tokens += part.tokens
    whole.top_logprobs += part.top_logprobs
