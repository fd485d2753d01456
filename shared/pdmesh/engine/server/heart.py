"""Whether the core still answers: its process may be there and stand still, stopped or stuck.

Every message of it is a sign of life. It is asked for one when somebody wants to know, and when requests run and nothing has
come for a while: an engine at rest asks nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import count

from pdmesh.engine.messages import Ping
from pdmesh.engine.server.core_peers import Core
from pdmesh.engine.server.requests import RequestTable
from pdmesh.errors import PeerUnavailable

log = logging.getLogger(__name__)

# The core's loop answers beside its steps, in well under a millisecond; a machine that is overloaded takes longer.
BEAT_TIMEOUT_S = 2.0
# Heard so lately it need not be asked.
FRESH_S = 0.5
# So often a silent core is looked at, as parts of the longest silence.
LOOKS = 8


class Heart:
    """Hears the core of one engine. `watch` gives it up after `timeout_s` without a sign of life; 0: never."""

    def __init__(self, core: Core, *, timeout_s: float) -> None:
        self._core = core
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._heard = asyncio.Event()
        self._heard_s = time.monotonic()
        self._stopped_s = 0.0
        """When it was given up; 0: it was not."""

    def heard(self) -> None:
        """Note a message of the core."""
        self._heard_s = time.monotonic()
        self._heard.set()
        if self._stopped_s:
            log.warning("the engine core answers again, %.1f s after it was given up", self._heard_s - self._stopped_s)
            self._stopped_s = 0.0

    def check(self) -> None:
        """Raise PeerUnavailable when the core takes nothing now."""
        if self._stopped_s:
            raise PeerUnavailable(self._words())

    async def beats(self) -> bool:
        """Whether the core has said something just now, or does when it is asked."""
        if time.monotonic() - self._heard_s < FRESH_S:
            return True
        self._heard.clear()
        self._core.send(Ping(number=next(self._numbers)))
        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                await self._heard.wait()
        except TimeoutError:
            return False
        return True

    async def watch(self, table: RequestTable, on_given_up: Callable[[PeerUnavailable], None]) -> None:
        """Tell of a core that stands still while requests run, until cancelled; asleep while none does."""
        while self._timeout_s:
            await table.filled()
            await self._watch_running(table, on_given_up)

    async def _watch_running(self, table: RequestTable, on_given_up: Callable[[PeerUnavailable], None]) -> None:
        asked_s = 0.0
        while len(table):
            looked_s = time.monotonic()
            await asyncio.sleep(self._timeout_s / LOOKS)
            now_s = time.monotonic()
            if now_s - looked_s > 2 * self._timeout_s / LOOKS or self._heard_s >= looked_s:
                # This process stood still itself and could hear nothing, or has heard the core.
                asked_s = 0.0
            elif not asked_s:
                asked_s = now_s
                self._core.send(Ping(number=next(self._numbers)))
            elif now_s - asked_s >= self._timeout_s and not self._stopped_s:
                self._stopped_s = now_s
                log.error("%s; its requests are ended", self._words())
                on_given_up(PeerUnavailable(self._words()))

    def _words(self) -> str:
        return f"the engine core has not answered for {self._timeout_s:g} s"
