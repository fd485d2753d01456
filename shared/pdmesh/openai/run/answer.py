"""Runs the token requests of one answer and follows all their choices, in whatever order tokens come."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from pdmesh.errors import InternalError, MeshError, from_code
from pdmesh.openai.generator import Generator, TokenRequest
from pdmesh.openai.intake.prompts import Prompt
from pdmesh.openai.run.choice import ChoiceText, ChoiceUpdate, TextOptions
from pdmesh.openai.run.merge import merged
from pdmesh.openai.schemas.answers import PromptTokensDetails, Usage
from pdmesh.openai.text import TextModel
from pdmesh.protocol.messages import ChoiceDelta, TokenLogprobs

log = logging.getLogger(__name__)

# The client has all its text by then; only the answer's last bytes wait.
END_TIMEOUT_S = 5.0


@dataclass(slots=True)
class PromptRun:
    """One prompt of the answer while it runs."""

    prompt: Prompt
    request: TokenRequest
    choices: list[ChoiceText]
    cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    waiting: list[ChoiceDelta] = field(default_factory=list)
    """Deltas of other choices that came before the prompt's logprobs, which every choice's answer begins with."""


class AnswerRun:
    """All prompts × n choices of one request to the API."""

    def __init__(
        self,
        *,
        generator: Generator,
        text: TextModel,
        prompts: list[Prompt],
        requests: list[TokenRequest],
        options: TextOptions,
    ) -> None:
        self._generator = generator
        n = requests[0].sampling.n
        self.prompts = [
            PromptRun(
                prompt,
                request,
                [
                    ChoiceText(
                        index=number * n + choice, prompt_index=number, request=request, text=text, options=options
                    )
                    for choice in range(n)
                ],
            )
            for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        ]
        self.num_choices = n * len(self.prompts)
        # Counted as they come: with usage on every chunk, adding up all choices each time would be n² work per step.
        self._num_prompt_tokens = sum(len(request.token_ids) for request in requests)
        self._num_completion_tokens = 0
        self._num_open = self.num_choices

    def usage(self) -> Usage:
        """Count so far: each prompt once, every generated token."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(run.cached_tokens or 0 for run in self.prompts)
            ),
        )

    async def updates(self) -> AsyncGenerator[ChoiceUpdate, None]:
        """Yield until every choice has ended; closing it aborts what still runs. Raises MeshError."""
        async with merged(self._generator, [run.request for run in self.prompts]) as deltas:
            async for prompt_index, delta in deltas:
                run = self.prompts[prompt_index]
                for ready in self._in_order(run, delta):
                    choice = run.choices[ready.choice]
                    if choice.ended:
                        continue
                    update = choice.feed(ready)
                    self._num_open -= choice.ended
                    self._num_completion_tokens += len(update.token_ids)
                    if update.stopped_here:
                        await self._generator.abort_choice(run.request.request_id, ready.choice)
                    yield update
                if not self._num_open:
                    await _let_end(deltas)
                    return
        raise InternalError("the engine ended the request before all of its choices had ended")

    def _in_order(self, run: PromptRun, delta: ChoiceDelta) -> list[ChoiceDelta]:
        """Note what the delta says of the whole request; return the deltas that may be answered now."""
        if delta.finish_reason == "error":
            raise from_code(
                delta.error_code or "InternalError",
                delta.error_message or "the engine failed",
                delta.error_param or None,
                run.request.request_id,
            )
        if not 0 <= delta.choice < len(run.choices):
            raise InternalError(f"the engine answered for choice {delta.choice}, which was not asked for")
        self._trace(run, delta)
        if run.request.sampling.prompt_logprobs is None:
            return [delta]
        if delta.prompt_logprobs is not None:
            run.prompt_logprobs = delta.prompt_logprobs
        if run.prompt_logprobs is None:
            run.waiting.append(delta)
            return []
        ready, run.waiting = [*run.waiting, delta], []
        return ready

    def _trace(self, run: PromptRun, delta: ChoiceDelta) -> None:
        trace = run.request.trace
        if run.cached_tokens is None and delta.choice == 0:
            # The first delta tells what the prefill did not compute; on a later leg everything counts as cached.
            run.cached_tokens = min(delta.cached_tokens, len(run.request.token_ids))
            trace.cached_tokens = trace.cached_tokens or run.cached_tokens
        trace.kv_source = trace.kv_source or delta.kv_source
        trace.kv_bytes = trace.kv_bytes or delta.kv_bytes


async def _let_end(deltas: AsyncIterator[object]) -> None:
    """Let generators come to their own end, which is not an abort: an engine then hands over what it made."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in deltas:
                pass
    except (MeshError, TimeoutError) as exc:
        # The answer is complete; what failed is whatever the generator still had to do.
        log.warning("a request did not end cleanly after its last token: %r", exc)
