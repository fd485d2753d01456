"""Reads several delta streams at once, one per prompt, through one bounded queue; leaving it ends them all.

A single stream, which is what nearly all answers have, is read as it is: a task and a queue more would cost each token as much
as all else that happens to it here.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdmesh.openai.generator import Generator, TokenRequest
from pdmesh.protocol.messages import ChoiceDelta

NOTHING_TO_GENERATE = "nothing_to_generate"
"""Reason in the debug header of a request that no engine has to see."""
# Deltas that may wait for a slow client here; then the generator is no longer read and its own bound applies.
MAX_WAITING_DELTAS = 64


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None = None


def wants_engine(request: TokenRequest) -> bool:
    """Echoing a prompt without its logprobs and without a token takes no model."""
    return request.sampling.max_tokens > 0 or request.sampling.prompt_logprobs is not None


def merged(
    generator: Generator, requests: list[TokenRequest]
) -> AbstractAsyncContextManager[AsyncIterator[tuple[int, ChoiceDelta]]]:
    """Read the deltas of all requests as (index, delta). The first failure of any stream is raised; leaving ends them all."""
    return MergedDeltas(generator, requests) if len(requests) > 1 else aclosing(_single(generator, requests[0]))


async def _single(generator: Generator, request: TokenRequest) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
    async with aclosing(_generate(generator, request)) as deltas:  # type: ignore[type-var]
        async for delta in deltas:
            yield 0, delta


def _generate(generator: Generator, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
    return generator.generate(request) if wants_engine(request) else _end_at_once(request)


class MergedDeltas:
    """Async context manager and iterator over (prompt index, delta). The first failure of any stream is raised."""

    def __init__(self, generator: Generator, requests: list[TokenRequest]) -> None:
        self._generator = generator
        self._requests = requests
        self._queue: asyncio.Queue[tuple[int, ChoiceDelta | _Ended]] = asyncio.Queue(MAX_WAITING_DELTAS)
        self._tasks: list[asyncio.Task[None]] = []
        self._num_running = len(requests)

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(len(self._requests))]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        # Waiting here is what guarantees that every request is aborted before its answer is over.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, ChoiceDelta]:
        while self._num_running:
            index, item = await self._queue.get()
            if not isinstance(item, _Ended):
                return index, item
            if item.error is not None:
                raise item.error
            self._num_running -= 1
        raise StopAsyncIteration

    async def _read(self, index: int) -> None:
        ended = _Ended()
        try:
            async with aclosing(_generate(self._generator, self._requests[index])) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    await self._queue.put((index, delta))
        except Exception as exc:
            # Not handled here but carried to whoever iterates.
            ended = _Ended(exc)
        await self._queue.put((index, ended))


async def _end_at_once(request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
    request.trace.reason = NOTHING_TO_GENERATE
    for choice in range(request.sampling.n):
        yield ChoiceDelta(request_id=request.request_id, choice=choice, finish_reason="length")
