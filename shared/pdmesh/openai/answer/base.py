"""What completions and chat answers share: who they are, and how updates become chunks or one whole answer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.choice import ChoiceUpdate
from pdmesh.openai.run.logprobs import LogprobSpeller, PositionLogprobs, prompt_entry
from pdmesh.openai.schemas.answers import ChatChunk, Completion, PromptLogprobs, Usage, encode
from pdmesh.openai.schemas.generation import GenerationBody
from pdmesh.openai.text import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """Repeated on every chunk."""

    id: str
    created: int
    model: str
    fingerprint: str


class Answer(ABC):
    """Shapes one request's answer. Updates go to `chunks` when it is streamed, else to `collect` and then `whole`."""

    chunk_type: ClassVar[type[ChatChunk] | type[Completion]]
    """What a stream of this answer is made of."""
    empty_text: ClassVar[bytes]
    """Where a chunk has its text, as JSON without any. No other value can look like it: quotes inside strings are escaped."""

    def __init__(self, head: AnswerHead, body: GenerationBody, run: AnswerRun, text: TextModel) -> None:
        self.head = head
        self.body = body
        self.run = run
        self.text = text
        self._is_text_only = not (body.continuous_usage or body.return_token_ids or self._has_logprobs)
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What stands before and behind the text in a choice's events."""
        self._begun: set[int] = set()
        self._num_ended = 0
        self._prompts: dict[int, list[PositionLogprobs | None]] = {}
        self._prompt_entries: dict[int, PromptLogprobs] = {}

    @abstractmethod
    def chunks(self, update: ChoiceUpdate) -> list[msgspec.Struct]:
        """Return the chunks to send for an update."""

    def closing_chunk(self, transfer_params: dict[str, Any] | None) -> msgspec.Struct:
        """Return the extra chunk without choices: the usage if asked for, the transfer parameters if there are any."""
        return self.chunk_type(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[],
            system_fingerprint=self.head.fingerprint,
            usage=self.run.usage() if self.body.include_usage else UNSET,
            kv_transfer_params=UNSET if transfer_params is None else transfer_params,
        )

    @abstractmethod
    def collect(self, update: ChoiceUpdate) -> None:
        """Add an update to the whole answer."""

    @abstractmethod
    def whole(self, transfer_params: dict[str, Any] | None) -> msgspec.Struct:
        """Return the answer once every choice has ended."""

    def events(self, update: ChoiceUpdate) -> bytes:
        """Return an update's chunks as server-sent events. Those of one choice that only have text differ in nothing else."""
        if update.finish_reason is not None or not self._is_text_only or update.index not in self._begun:
            return b"".join(event(chunk) for chunk in self.chunks(update))
        frame = self._frames.get(update.index)
        if frame is None:
            [chunk] = self.chunks(msgspec.structs.replace(update, text=""))
            before, after = event(chunk).split(self.empty_text)
            frame = self._frames[update.index] = (before + self.empty_text[:-2], after)
        return frame[0] + encode(update.text) + frame[1]

    @property
    @abstractmethod
    def _has_logprobs(self) -> bool:
        """Whether each chunk tells log-probabilities."""

    def _begins(self, index: int) -> bool:
        """Tell, once per choice, that this is its first update."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True

    def _fingerprint_for(self, update: ChoiceUpdate) -> str | UnsetType:
        """Give the fingerprint to the chunk that ends the answer, unless a usage chunk follows that carries it."""
        self._num_ended += update.finish_reason is not None
        is_last = update.finish_reason is not None and self._num_ended == self.run.num_choices
        return self.head.fingerprint if is_last and not self.body.include_usage else UNSET

    def _usage_for_chunk(self) -> Usage | UnsetType:
        return self.run.usage() if self.body.continuous_usage else UNSET

    def _spelled_prompt(self, prompt_index: int) -> list[PositionLogprobs | None]:
        """Spell the prompt's logprobs: one entry per token, the first None as nothing came before it."""
        if prompt_index in self._prompts:
            return self._prompts[prompt_index]
        prompt = self.run.prompts[prompt_index]
        speller = LogprobSpeller(self.text, None, bool(self.body.return_tokens_as_token_ids))
        spelled = self._prompts[prompt_index] = []
        for token_id, position in zip(prompt.request.token_ids, prompt.prompt_logprobs or [], strict=False):
            if position is None:
                speller.skip(token_id)
                spelled.append(None)
            else:
                spelled.append(speller.spell(position))
        return spelled

    def _prompt_logprobs(self, prompt_index: int) -> PromptLogprobs | None:
        """vLLM's form, when the client asked for it by name; made once for all choices of a prompt."""
        if self.body.prompt_logprobs is None:
            return None
        if prompt_index not in self._prompt_entries:
            self._prompt_entries[prompt_index] = [
                None if entry is None else prompt_entry(entry) for entry in self._spelled_prompt(prompt_index)
            ]
        return self._prompt_entries[prompt_index]


def event(chunk: msgspec.Struct) -> bytes:
    """Frame a chunk as a server-sent event."""
    return b"data: " + encode(chunk) + b"\n\n"
