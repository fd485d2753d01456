"""Writes on a gRPC stream, one at a time and each to its end, as gRPC fails whatever is started beside a write."""

import asyncio
from typing import Any

import grpc.aio

# A write ends when the message is with the kernel; one that does not is held up by a peer that has stopped reading.
SETTLE_S = 0.5


class OrderlyWrites:
    """Any task may `write` and may be cancelled in it; `settle` before the stream is finished."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self._sending: asyncio.Task[None] | None = None

    async def write(self, message: Any) -> None:
        """Send a message after those before it. Raises what gRPC raises."""
        async with self._turn:
            # Its writer may have been cancelled; gRPC goes on with it all the same.
            if self._sending is not None:
                await asyncio.wait([self._sending])
            self._sending = asyncio.create_task(self._send(message))
            self._sending.add_done_callback(_seen)
            await asyncio.shield(self._sending)

    async def settle(self) -> None:
        """Return when no write is under way, or one is stuck. Nobody may write any more."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=SETTLE_S)

    async def _send(self, message: Any) -> None:
        await self._context.write(message)


def _seen(sending: asyncio.Task[None]) -> None:
    """Whoever wrote has the error, or was cancelled and does not care: asyncio need not log it as one that nobody saw."""
    if not sending.cancelled():
        sending.exception()
