"""Pulls that this engine's requests have begun at other pools: each ends exactly once, and its owner is told how.

The consumer's end of `TRANSFER_TABLE`: a fetch is open from before its begin is sent, and reads once the owner has agreed.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pdmesh.connector.active import PullEnd
from pdmesh.connector.handshake import Peer
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.ways import parts_of, way_of
from pdmesh.engine.messages import TransferEnded
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RunningRequest
from pdmesh.protocol.exchange import Exchange
from pdmesh.protocol.layout import Layout
from pdmesh.protocol.states import TRANSFER_TABLE, TransferEvent, TransferState, event_of_end

log = logging.getLogger(__name__)

# The core gives a request's pull up with the request; one that it has not reported by then is lost.
REPORT_GRACE_S = 10.0
NIXL = "nixl"
MAX_CORRUPT_PEERS = 1024
ABORTED = "aborted"
"""Reason of a pull whose request went away."""


class Origin(StrEnum):
    """Whose pool a request's KV comes from, and how the request named it."""

    TICKET = "ticket"
    STOCK = "stock"
    TIER = "tier"


HOW = {Exchange.BYTES: "", Exchange.REPACKED: "+converted", Exchange.ROUNDED: "+converted+rounded"}
"""What stands behind the connector where KV comes from."""


class HandoffStage(StrEnum):
    """Label of `pdmesh_handoff_seconds`; a mesh's whole handoff is these and the way from engine to proxy to engine."""

    SEALED = "sealed"
    """At the owner: from the end of the prompt's last step until its ticket is handed out."""
    BEGIN = "begin"
    """At the consumer: from the request's arrival until the owner has agreed; not of one that was here before the offer."""
    PULL = "pull"
    """From there until all KV is here and checked."""
    RESUME = "resume"
    """From there until the next token, one step."""


class HandoffEvent(StrEnum):
    """Label of `pdmesh_handoff_clock_seconds`: the two ends of a handoff, each told by the engine where it is."""

    COMPUTED = "computed"
    """At the owner: the prompt's last step has ended, its first token is drawn."""
    RESUMED = "resumed"
    """At the consumer: the model begins with the first step that the request is in."""


class Outcome(StrEnum):
    """How a pull ended."""

    COMMITTED = "committed"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class Fetch:
    """One attempt of one request."""

    transfer_id: str
    peer: Peer
    """The owner as it was met when this began."""
    connector: str
    origin: Origin
    running: RunningRequest
    block_bytes: int
    """Of the owner's pool."""
    num_bytes: int = 0
    """To be copied; known once the owner lets it read."""
    instead_of: str = ""
    """The connector that was tried before."""
    exchange: Exchange = Exchange.BYTES
    """What becomes of the owner's blocks here."""
    layouts: tuple[Layout, ...] = ()
    """Of the owner's blocks, where they are not those of the pool here."""
    timer: asyncio.TimerHandle | None = None
    state: TransferState = TransferState.OPEN
    begun_s: float = 0.0
    """When the owner had agreed."""

    @property
    def peer_id(self) -> str:
        return self.peer.peer_id

    @property
    def source(self) -> str:
        """Where the KV comes from, for people."""
        if self.origin is Origin.TIER:
            return self.origin
        return way_of(self.connector + HOW[self.exchange], self.instead_of)

    @property
    def is_handoff(self) -> bool:
        """Whether its request begins here with it: a tier's blocks, and what a preempted one comes back on, are no handoff."""
        return self.origin is not Origin.TIER and not self.running.has_answered

    def on(self, event: TransferEvent) -> None:
        """Move on. Raises KeyError for what cannot happen in this state."""
        self.state = TRANSFER_TABLE[self.state, event]


def lifetime_s(running: RunningRequest) -> float:
    """Seconds for which a transfer of a request may be renewed: it is queued perhaps, and reads when there is room.

    Both ends count with the same, so that neither ends what the other still uses.
    """
    return running.remaining_s + REPORT_GRACE_S


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
        self._failing: set[str] = set()
        """Peers that a connector has failed, until nothing is pulled from them any more and hands can be shaken anew."""
        self._corrupt: dict[str, None] = {}
        """Peers of whose damaged KV the log has told; the oldest are forgotten."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, fetch: Fetch) -> None:
        """Note a pull before its begin is sent: from then on its owner waits to hear of its end."""
        loop = asyncio.get_running_loop()
        fetch.timer = loop.call_later(lifetime_s(fetch.running), self._end, fetch, False, "unreported")
        self._open[fetch.transfer_id] = fetch

    def begun(self, fetch: Fetch, num_blocks: int) -> None:
        """The owner lets it read so many blocks."""
        fetch.num_bytes = num_blocks * fetch.block_bytes
        # Whoever ended it meanwhile has told the owner.
        if fetch.transfer_id in self._open:
            fetch.on(TransferEvent.BEGIN)
            fetch.begun_s = time.monotonic()
            if fetch.is_handoff and fetch.running.request.awaits is None:
                self._metrics.handoff.observe(HandoffStage.BEGIN, fetch.begun_s - fetch.running.arrived_s)

    def num_bytes_under_way(self, connector: str) -> int:
        """What the pulls over a connector have to copy in all."""
        return sum(each.num_bytes for each in self._open.values() if each.connector == connector)

    def abandon(self, running: RunningRequest) -> None:
        """End the pulls of a request that the core has never seen; the core reports the others itself."""
        if not running.in_core:
            for fetch in [each for each in self._open.values() if each.running is running]:
                self._end(fetch, committed=False, reason=ABORTED)

    def ended(self, message: TransferEnded) -> Fetch | None:
        """Take the core's report and tell the owner; None when the pull had ended already."""
        fetch = self._open.get(message.transfer_id)
        if fetch is None:
            return None
        connector, failed = parts_of(message.way)
        if failed:
            fetch.connector, fetch.instead_of = connector, failed
            self._peers.fallbacks[failed] += 1
            self._failing.add(fetch.peer_id)
        metrics = self._metrics
        for name in message.damaged:
            metrics.damaged.inc(name)
        if message.reason == PullEnd.CORRUPT or message.damaged:
            self._report_corrupt(fetch, message.damaged or [connector])
        if message.committed and connector:
            self._peers.came_whole(fetch.peer, connector, after=message.damaged)
        if message.committed and fetch.is_handoff:
            fetch.running.pulled_s = time.monotonic()
            metrics.handoff.observe(HandoffStage.PULL, fetch.running.pulled_s - fetch.begun_s)
        metrics.transfer_bytes.inc(fetch.connector, fetch.origin, amount=message.num_bytes)
        if fetch.connector == NIXL:
            if message.committed:
                metrics.nixl_time.observe(message.duration_s)
                metrics.nixl_bytes.observe(message.num_bytes)
            else:
                metrics.nixl_failed.inc()
        self._end(fetch, message.committed, message.reason)
        return fetch

    def _report_corrupt(self, fetch: Fetch, connectors: list[str]) -> None:
        """Once for each peer; every one is in the metric."""
        if fetch.peer_id in self._corrupt:
            return
        self._corrupt[fetch.peer_id] = None
        if len(self._corrupt) > MAX_CORRUPT_PEERS:
            del self._corrupt[next(iter(self._corrupt))]
        log.error(
            "KV from %s over %s (transfer %s) is not what was summed there: memory or the way from it is damaged",
            fetch.peer_id,
            ", ".join(connectors) or fetch.connector,
            fetch.transfer_id,
        )

    def failed(self, fetch: Fetch, reason: str) -> None:
        """The owner refused to begin, or could not be asked."""
        self._end(fetch, committed=False, reason=reason)

    async def give_up(self, fetch: Fetch, reason: str) -> None:
        """Take a begin back, and return when its owner has heard of it or cannot be told."""
        if self._strike_off(fetch, committed=False, reason=reason):
            await self._tell_owner(fetch, reason)

    def discard(self, fetch: Fetch) -> None:
        """Nothing was begun: the owner answered that it holds nothing."""
        self._take_out(fetch)

    def _end(self, fetch: Fetch, committed: bool, reason: str) -> None:
        if self._strike_off(fetch, committed, reason):
            self._tasks.create_task(self._tell_owner(fetch, reason))

    def _strike_off(self, fetch: Fetch, committed: bool, reason: str) -> bool:
        """Take a pull out of the table and count how it ended; False when it had ended before."""
        if not self._take_out(fetch):
            return False
        fetch.on(event_of_end(committed, reason))
        outcome = Outcome.COMMITTED if committed else Outcome.FAILED
        # What follows the colon names blocks or paths: no label should.
        self._metrics.transfers.inc(outcome, reason.partition(":")[0], fetch.connector, fetch.origin)
        if fetch.exchange is not Exchange.BYTES:
            numbers = "kept" if fetch.exchange is Exchange.REPACKED else "rounded"
            self._metrics.converted.inc(outcome, numbers, fetch.connector)
        return True

    def _take_out(self, fetch: Fetch) -> bool:
        if self._open.pop(fetch.transfer_id, None) is None:
            return False
        if fetch.timer is not None:
            fetch.timer.cancel()
        return True

    async def _tell_owner(self, fetch: Fetch, reason: str) -> None:
        try:
            committed = fetch.state is TransferState.COMMITTED
            ended = await self._peers.end(fetch.peer_id, fetch.transfer_id, committed, reason, met=fetch.peer)
            if committed and ended is not None and ended.outcome not in (None, TransferState.COMMITTED):
                # The generation words say that what was read is right; that it took longer than the lease is worth knowing.
                log.info("%s counts transfer %s as %s", fetch.peer_id, fetch.transfer_id, ended.outcome.value)
            has_failed = fetch.peer_id in self._failing and not any(
                each.peer_id == fetch.peer_id and each.begun_s for each in self._open.values()
            )
            if reason == PullEnd.PEER_LOST or has_failed:
                self._failing.discard(fetch.peer_id)
                # Shake hands anew before the next pull: the peer's memory is gone, or the core let go of it.
                self._peers.forget(fetch.peer_id, met=fetch.peer)
        except Exception:
            # The owner's lease ends the transfer.
            log.warning("%s was not told that transfer %s ended", fetch.peer_id, fetch.transfer_id, exc_info=True)
