"""Runs many prompts on one engine at a time: a bounded number at once, in order, each prompt's failure its own."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdmesh.errors import InternalError, MeshError
from pdmesh.offline.engine import OfflineEngine
from pdmesh.offline.outputs import CompletionOutput, LogprobsOnePosition, RequestOutput, one_position
from pdmesh.offline.prompts import GivenPrompt, check_text
from pdmesh.offline.sampling_params import Resolved
from pdmesh.openai.generator import TokenRequest
from pdmesh.openai.intake.prompts import Prompt, check_prompt, encode_texts
from pdmesh.openai.intake.size import check_size
from pdmesh.openai.run.answer import AnswerRun
from pdmesh.openai.run.choice import ChoiceUpdate
from pdmesh.openai.run.logprobs import LogprobSpeller
from pdmesh.protocol.messages import TokenLogprobs

log = logging.getLogger(__name__)

# Enough that the engine always has a full batch and more to choose from; the rest waits as text.
MIN_AT_ONCE = 2048
# A prompt waits for all that came before it, which may take days.
NO_DEADLINE_S = 1e8

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Generic[ResultT]):
    """One prompt and what is to be done with its token ids."""

    prompt: GivenPrompt
    do: Callable[[str, Prompt], Awaitable[ResultT]]
    """Given the request's id and the tokenised prompt."""
    priority: int = 0


class Runs:
    """Request ids and the bound on what is under way, for one engine."""

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._num_at_once = max(MIN_AT_ONCE, 4 * engine.config.max_num_seqs)

    async def all(
        self, works: list[Work[ResultT]], on_done: Callable[[ResultT], None], *, limit: int | None = None
    ) -> list[ResultT | MeshError]:
        """Do everything and return results, or what each failed of, in the order of `works`.

        Prompts are submitted lowest priority number first where the scheduler heeds it. Cancelling it aborts all.
        """
        results: list[ResultT | MeshError | None] = [None] * len(works)
        slots = asyncio.Semaphore(limit or self._num_at_once)

        async def run(index: int, prompt: Prompt) -> None:
            try:
                result = await works[index].do(str(next(self._ids)), prompt)
            except Exception as exc:
                results[index] = _failure(exc)
            else:
                results[index] = result
                on_done(result)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for index in self._order(works):
                await slots.acquire()
                try:
                    prompt = await self._tokenise(works[index].prompt)
                except Exception as exc:  # whatever a prompt holds, the others go on
                    results[index] = _failure(exc)
                    slots.release()
                else:
                    tasks.create_task(run(index, prompt))
        return [result for result in results if result is not None]

    def _order(self, works: list[Work[ResultT]]) -> list[int]:
        indices = list(range(len(works)))
        if self._engine.config.scheduling_policy == "priority":
            indices.sort(key=lambda index: works[index].priority)
        return indices

    async def _tokenise(self, given: GivenPrompt) -> Prompt:
        token_ids = given.token_ids
        check_text("prompt", given.text)
        if token_ids is None:
            [token_ids] = await encode_texts(
                [given.text or ""],
                text=self._engine.text,
                card=self._engine.card,
                add_special_tokens=given.add_special_tokens,
                param="prompt",
            )
        check_prompt(token_ids, self._engine.card)
        return Prompt(token_ids=token_ids, text=given.text)


def _failure(exc: Exception) -> MeshError:
    """What one prompt failed of."""
    if isinstance(exc, MeshError):
        return exc
    log.error("a prompt made the program fail", exc_info=exc)
    return InternalError(f"this prompt made the program fail: {type(exc).__name__}: {exc}")


@dataclass(slots=True)
class _Growing:
    """One answer while it comes."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsOnePosition] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    last: ChoiceUpdate | None = None

    def add(self, update: ChoiceUpdate) -> None:
        self.text.append(update.text)
        self.token_ids += update.token_ids
        for position in update.logprobs or []:
            self.logprobs.append(one_position(position))
            self.cumulative_logprob += position.chosen.logprob
        self.last = update


async def generate(
    engine: OfflineEngine, request_id: str, prompt: Prompt, resolved: Resolved, *, cache_salt: str, priority: int
) -> RequestOutput:
    """Generate all answers to one prompt. Cancelling it aborts them. Raises MeshError."""
    sampling = resolved.for_prompt(len(prompt.token_ids), engine.card)
    check_size([prompt.token_ids], sampling)
    request = TokenRequest(
        request_id=request_id,
        token_ids=prompt.token_ids,
        sampling=sampling,
        cache_salt=cache_salt,
        priority=priority,
        deadline_s=NO_DEADLINE_S,
    )
    run = AnswerRun(
        generator=engine.generator, text=engine.text, prompts=[prompt], requests=[request], options=resolved.options
    )
    growing = [_Growing() for _ in range(sampling.n)]
    async with aclosing(run.updates()) as updates:
        async for update in updates:
            growing[update.index].add(update)
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=_prompt_logprobs(engine, prompt.token_ids, run.prompts[0].prompt_logprobs),
        outputs=[_output(index, each, resolved) for index, each in enumerate(growing)],
        finished=True,
        num_cached_tokens=run.prompts[0].cached_tokens or 0,
    )


def _output(index: int, growing: _Growing, resolved: Resolved) -> CompletionOutput:
    wants_logprobs = resolved.options.logprobs
    return CompletionOutput(
        index=index,
        text="".join(growing.text) if resolved.params.detokenize else "",
        token_ids=growing.token_ids,
        cumulative_logprob=growing.cumulative_logprob if wants_logprobs else None,
        logprobs=growing.logprobs if wants_logprobs else None,
        finish_reason=growing.last.finish_reason if growing.last is not None else None,
        stop_reason=growing.last.stop_reason if growing.last is not None else None,
    )


def _prompt_logprobs(
    engine: OfflineEngine, token_ids: list[int], positions: list[TokenLogprobs | None] | None
) -> list[LogprobsOnePosition | None] | None:
    if positions is None:
        return None
    speller = LogprobSpeller(engine.text, None, as_token_ids=False)
    spelled: list[LogprobsOnePosition | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        if position is None:
            speller.skip(token_id)
            spelled.append(None)
        else:
            spelled.append(one_position(speller.spell(position)))
    return spelled
