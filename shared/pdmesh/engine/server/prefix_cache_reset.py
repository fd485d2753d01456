"""Empties the core's prefix cache on request, and waits until the core says that it has."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from pdmesh.engine.messages import PrefixCacheReset, ResetPrefixCache, ToCore
from pdmesh.errors import DeadlineExceeded, MeshError, Overloaded
from pdmesh.protocol.messages import GroupBlocks

# A core that is in the middle of a step answers after it.
TIMEOUT_S = 30.0
# Each is one pass over the pool's names.
MAX_WAITING = 64


class Core(Protocol):
    """Where the order goes."""

    def send(self, message: ToCore) -> None: ...


class PrefixCacheResets:
    """Resets that are under way, by number."""

    def __init__(self, core: Core, on_begun: Callable[[], None] = lambda: None) -> None:
        """`on_begun` is called as each is ordered: the core has computed nothing by then that is still wanted afterwards."""
        self._core = core
        self._on_begun = on_begun
        self.num_begun = 0
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def reset(self, damaged: Sequence[GroupBlocks] = ()) -> None:
        """Return when no block can be found any more, and requests that hold a damaged one have ended.

        Raises Overloaded, DeadlineExceeded, or what `fail` says.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} resets of the prefix cache are under way already")
        number = next(self._numbers)
        done = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._core.send(ResetPrefixCache(number=number, damaged=list(damaged)))
            self.num_begun += 1
            self._on_begun()
            async with asyncio.timeout(TIMEOUT_S):
                await done
        except TimeoutError:
            raise DeadlineExceeded(f"the engine core did not reset its prefix cache within {TIMEOUT_S:.0f} s") from None
        finally:
            del self._waiting[number]

    def done(self, message: PrefixCacheReset) -> None:
        """Note the core's answer; nobody may wait for it any more."""
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def fail(self, error: MeshError) -> None:
        """End all waits: the core is gone."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
