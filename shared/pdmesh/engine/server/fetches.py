"""Pulls that this engine's requests have begun at other pools: each ends exactly once, and its owner is told how."""

import asyncio
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pdmesh.connector.active import PullEnd
from pdmesh.connector.peers import PeerDirectory
from pdmesh.engine.messages import TransferEnded
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RunningRequest

log = logging.getLogger(__name__)

# The core gives a pull up at its deadline; one that it has not reported by then is lost.
REPORT_GRACE_S = 10.0
NIXL = "nixl"
ABORTED = "aborted"
"""Reason of a pull whose request went away."""


class Origin(StrEnum):
    """Whose pool a request's KV comes from, and how the request named it."""

    TICKET = "ticket"
    STOCK = "stock"
    TIER = "tier"


class Outcome(StrEnum):
    """How a pull ended."""

    COMMITTED = "committed"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """One attempt of one request."""

    transfer_id: str
    peer_id: str
    connector: str
    origin: Origin
    running: RunningRequest
    timer: asyncio.TimerHandle | None = None


class Tasks(Protocol):
    """Where short calls to other services run; a TaskGroup."""

    def create_task(self, coro: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]: ...


class Fetches:
    """The table of pulls that have begun and not ended."""

    def __init__(self, *, peers: PeerDirectory, tasks: Tasks, metrics: EngineMetrics) -> None:
        self._peers = peers
        self._tasks = tasks
        self._metrics = metrics
        self._open: dict[str, Fetch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begun(self, fetch: Fetch, deadline_s: float) -> None:
        """Note a pull whose owner waits to hear of its end."""
        loop = asyncio.get_running_loop()
        fetch.timer = loop.call_later(deadline_s + REPORT_GRACE_S, self._end, fetch, Outcome.FAILED, "unreported")
        self._open[fetch.transfer_id] = fetch

    def abandon(self, running: RunningRequest) -> None:
        """End the pulls of a request that the core has never seen; the core reports the others itself."""
        if not running.in_core:
            for fetch in [each for each in self._open.values() if each.running is running]:
                self._end(fetch, Outcome.FAILED, ABORTED)

    def ended(self, message: TransferEnded) -> Fetch | None:
        """Take the core's report and tell the owner; None when the pull had ended already."""
        fetch = self._open.get(message.transfer_id)
        if fetch is None:
            return None
        metrics = self._metrics
        metrics.transfer_bytes.inc(fetch.connector, fetch.origin, amount=message.num_bytes)
        if fetch.connector == NIXL:
            if message.committed:
                metrics.nixl_time.observe(message.duration_s)
                metrics.nixl_bytes.observe(message.num_bytes)
            else:
                metrics.nixl_failed.inc()
        self._end(fetch, Outcome.COMMITTED if message.committed else Outcome.FAILED, message.reason)
        return fetch

    def failed(self, fetch: Fetch, reason: str) -> None:
        """The owner refused to begin, or could not be asked."""
        self._end(fetch, Outcome.FAILED, reason)

    async def give_up(self, fetch: Fetch, reason: str) -> None:
        """Take a begin back, and return when its owner has heard of it or cannot be told."""
        if self._strike_off(fetch, Outcome.FAILED, reason):
            await self._tell_owner(fetch, Outcome.FAILED, reason)

    def discard(self, fetch: Fetch) -> None:
        """Nothing was begun: the owner answered that it holds nothing."""
        self._take_out(fetch)

    def _end(self, fetch: Fetch, outcome: Outcome, reason: str) -> None:
        if self._strike_off(fetch, outcome, reason):
            self._tasks.create_task(self._tell_owner(fetch, outcome, reason))

    def _strike_off(self, fetch: Fetch, outcome: Outcome, reason: str) -> bool:
        """Take a pull out of the table and count how it ended; False when it had ended before."""
        if not self._take_out(fetch):
            return False
        # What follows the colon names blocks or paths: no label should.
        self._metrics.transfers.inc(outcome, reason.partition(":")[0], fetch.connector, fetch.origin)
        return True

    def _take_out(self, fetch: Fetch) -> bool:
        if self._open.pop(fetch.transfer_id, None) is None:
            return False
        if fetch.timer is not None:
            fetch.timer.cancel()
        return True

    async def _tell_owner(self, fetch: Fetch, outcome: Outcome, reason: str) -> None:
        try:
            await self._peers.end(fetch.peer_id, fetch.transfer_id, outcome is Outcome.COMMITTED, reason)
            if reason == PullEnd.PEER_LOST:
                # Shake hands anew before the next pull: the peer's memory is gone, or the core let go of it.
                self._peers.forget(fetch.peer_id)
        except Exception:
            # The owner's lease ends the transfer.
            log.warning("%s was not told that transfer %s ended", fetch.peer_id, fetch.transfer_id, exc_info=True)
