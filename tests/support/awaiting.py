"""Waits, in an event loop, for what other tasks bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 0.005


async def until(holds: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Return when a condition holds; fail when it does not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(LOOK_EVERY_S)
    except TimeoutError:
        raise AssertionError("the condition never held") from None
