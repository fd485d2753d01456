"""One accepted request to the API, from its token requests to its answer; it ends exactly once."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from pdmesh.errors import DeadlineExceeded, MeshError
from pdmesh.openai.answer.base import Answer, event
from pdmesh.openai.generator import Generator, Trace

log = logging.getLogger(__name__)

OK = "ok"
CLIENT_GONE = "client_gone"
CANCELLED = "cancelled"


class Job:
    """`deadline` is on the event loop's clock."""

    def __init__(self, *, answer: Answer, generator: Generator, deadline: float, on_end: Callable[[str], None]) -> None:
        self.answer = answer
        self.deadline = deadline
        self._generator = generator
        self._on_end = on_end
        self._started = time.monotonic()
        self._is_over = False

    @property
    def traces(self) -> list[Trace]:
        return [prompt.request.trace for prompt in self.answer.run.prompts]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events, without the terminator; closing it aborts what runs. Raises MeshError."""
        async with aclosing(self.answer.run.updates()) as updates:
            async for update in updates:
                yield self.answer.events(update)
        transfer_params = self._transfer_params()
        if self.answer.body.include_usage or transfer_params is not None:
            yield event(self.answer.closing_chunk(transfer_params))

    async def whole(self) -> msgspec.Struct:
        """Return the answer in one piece; cancelling aborts what runs. Raises MeshError."""
        try:
            async with asyncio.timeout_at(self.deadline), aclosing(self.answer.run.updates()) as updates:
                async for update in updates:
                    self.answer.collect(update)
        except TimeoutError:
            raise DeadlineExceeded("the request took longer than it may") from None
        return self.answer.whole(self._transfer_params())

    def ended(self, error: MeshError | None = None, *, outcome: str = "") -> None:
        """Note the end, once: the request's one log line and counter."""
        if self._is_over:
            return
        self._is_over = True
        usage = self.answer.run.usage()
        outcome = outcome or (OK if error is None else error.code)
        self._on_end(outcome)
        log.info(
            "%s %s: prompt %d (cached %d), completion %d tokens, %.3f s, %s",
            self.answer.head.id,
            outcome,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            time.monotonic() - self._started,
            ", ".join(trace.reason for trace in self.traces if trace.reason) or "no route",
        )

    def _transfer_params(self) -> dict[str, Any] | None:
        return self._generator.transfer_params(self.answer.run.prompts[0].request.request_id)
