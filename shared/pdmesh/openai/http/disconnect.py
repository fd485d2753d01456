"""Ends work whose client has gone, so that nothing is generated for nobody."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

ResultT = TypeVar("ResultT")

# nginx's status for it; nobody reads it, but it is what is counted.
CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """The client closed its connection; there is no one to answer."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` to its end, or cancel it and raise ClientGone when the client disconnects. The body has been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
