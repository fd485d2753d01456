"""The answer of /v1/chat/completions, streamed or whole."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from pdmesh.openai.answer.base import Answer, AnswerHead
from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.choice import ChoiceUpdate
from pdmesh.openai.run.logprobs import Candidate, PositionLogprobs
from pdmesh.openai.schemas.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ContentLogprob,
    TopLogprob,
)
from pdmesh.openai.schemas.chat import ChatBody
from pdmesh.openai.text import TextModel


@dataclass(slots=True)
class _Choice:
    """One choice of a whole answer, growing."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ContentLogprob] = field(default_factory=list)
    last: ChoiceUpdate | None = None


class ChatAnswer(Answer):
    """`role` is who speaks; `opening` is text that every choice begins with (an echoed last message)."""

    chunk_type = ChatChunk
    empty_text = b'"content":""'
    body: ChatBody

    def __init__(
        self, head: AnswerHead, body: ChatBody, run: AnswerRun, text: TextModel, *, role: str, opening: str
    ) -> None:
        super().__init__(head, body, run, text)
        self._role = role
        self._opening = opening
        self._choices: dict[int, _Choice] = {}

    @property
    def _has_logprobs(self) -> bool:
        return bool(self.body.logprobs)

    def chunks(self, update: ChoiceUpdate) -> list[msgspec.Struct]:
        made: list[msgspec.Struct] = []
        if self._begins(update.index):
            first = self._chunk(ChatChunkChoice(index=update.index, delta=ChatDelta(role=self._role, content="")))
            first.prompt_token_ids = self._prompt_token_ids()
            first.prompt_text = self._prompt_text()
            made.append(first)
            if self._opening:
                opening = ChatDelta(content=self._opening)
                made.append(self._chunk(ChatChunkChoice(index=update.index, delta=opening)))
        choice = ChatChunkChoice(
            index=update.index,
            delta=ChatDelta(content=update.text),
            logprobs=self._logprobs(update),
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason if update.finish_reason is not None else UNSET,
            token_ids=update.token_ids if self.body.return_token_ids else None,
        )
        chunk = self._chunk(choice)
        chunk.system_fingerprint = self._fingerprint_for(update)
        made.append(chunk)
        return made

    def collect(self, update: ChoiceUpdate) -> None:
        whole = self._choices.setdefault(update.index, _Choice())
        whole.text.append(update.text)
        whole.token_ids += update.token_ids
        whole.last = update
        logprobs = self._logprobs(update)
        if logprobs is not None:
            whole.logprobs += logprobs.content

    def whole(self, transfer_params: dict[str, Any] | None) -> msgspec.Struct:
        return ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[self._whole_choice(index, self._choices[index]) for index in sorted(self._choices)],
            system_fingerprint=self.head.fingerprint,
            usage=self.run.usage(),
            prompt_logprobs=self._prompt_logprobs(0),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_text=self._prompt_text(),
            kv_transfer_params=transfer_params,
        )

    def _whole_choice(self, index: int, choice: _Choice) -> ChatChoice:
        if choice.last is None or choice.last.finish_reason is None:
            raise AssertionError("a choice that has not ended")
        return ChatChoice(
            index=index,
            message=ChatMessage(role=self._role, content=self._opening + "".join(choice.text)),
            logprobs=ChatLogprobs(content=choice.logprobs) if self.body.logprobs else None,
            finish_reason=choice.last.finish_reason,
            stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self.body.return_token_ids else None,
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[choice],
            usage=self._usage_for_chunk(),
        )

    def _logprobs(self, update: ChoiceUpdate) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return ChatLogprobs(content=[_content(position) for position in update.logprobs or []])

    def _prompt_token_ids(self) -> list[int] | None:
        return self.run.prompts[0].request.token_ids if self.body.return_token_ids else None

    def _prompt_text(self) -> str | None:
        return self.run.prompts[0].prompt.text if self.body.return_prompt_text else None


def _content(position: PositionLogprobs) -> ContentLogprob:
    chosen = position.chosen
    return ContentLogprob(
        token=chosen.text, logprob=chosen.logprob, bytes=list(chosen.raw), top_logprobs=[_top(c) for c in position.top]
    )


def _top(candidate: Candidate) -> TopLogprob:
    return TopLogprob(token=candidate.text, logprob=candidate.logprob, bytes=list(candidate.raw))
