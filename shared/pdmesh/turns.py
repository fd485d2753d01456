"""Turns by key: who does something with one key waits for whoever does it now, and nobody for another key's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """Of one event loop. Nothing is kept of a key that nobody is at; who has a turn bounds it."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[None]] = {}
        """By key: done when the turn has ended."""

    def __len__(self) -> int:
        return len(self._under_way)

    @contextlib.asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Wait until nobody else is at a key, and be at it."""
        while (other := self._under_way.get(key)) is not None:
            await asyncio.wait([other])
        done = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._under_way[key]
            done.set_result(None)
