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
            await asyncio.shield(self._sending)

    async def settle(self) -> None:
        """Return when no write is under way, or one is stuck. Nobody may write any more."""
        if self._sending is not None:
            done, _ = await asyncio.wait([self._sending], timeout=SETTLE_S)
            for sending in done:
                # Whoever wrote has seen the error or does not care any more.
                if not sending.cancelled():
                    sending.exception()

    async def _send(self, message: Any) -> None:
        await self._context.write(message)
