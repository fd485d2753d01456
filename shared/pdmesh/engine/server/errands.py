"""Short calls to other services, and waits for the core's word, that no request owns: they end with the server, done or not."""

import asyncio
from types import TracebackType
from typing import Self

# As long as one call that tells an owner of a transfer's end may take.
LAST_CALLS_S = 2.0


class Errands:
    """Tasks of a group that none of them keeps open: an async context manager, to be left once nothing reads the core's messages.

    What still waits for such a message then waits for ever. Nobody needs it: what the core holds ends with its process.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=LAST_CALLS_S)
        while self._running:
            # The end of one may begin another.
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    def create_task(self, coro: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        """Run it until it is done or the context is left. An exception out of it ends the group."""
        task = self._tasks.create_task(coro)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task
