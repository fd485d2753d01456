"""Pulls that a connector has failed, on their way over the next one: the same transfer, which has not ended for its owner. And
pulls that wait for their first one, because it is being connected anew.

Its blocks and generations are the same, and what has failed writes nothing any more; so what arrives over another connector is
as good, and is compared with the owner's sums again. That it was not what these say is a failure like others, as long as there is
another way. Which ways lead to a peer is told when it is connected; one is connected when it is needed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pdmesh.connector.active import PullEnd, may_be_connectors
from pdmesh.connector.base import Pull, PullResult
from pdmesh.connector.ways import way_of
from pdmesh.engine.attachments import Connection
from pdmesh.engine.messages import ConnectPeer


@dataclass(slots=True, kw_only=True)
class Journey:
    """A pull from its start to its end, over one connector after the other."""

    pull: Pull
    connector: str
    """The one it goes over, or will when that is connected."""
    failed: list[str] = field(default_factory=list)
    """Connectors that it went over before."""
    damaged: list[str] = field(default_factory=list)
    """Those over which its bytes came otherwise than they were summed."""
    started_s: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    over: Connection | None = None
    """What carries it now, or did last."""
    result: PullResult | None = None
    """How it ended over the connector before, while the next is being connected; None: there was none."""
    awaits: ConnectPeer | None = None
    """What connects that: no earlier order for it, which may be of another start or other memory."""

    @property
    def way(self) -> str:
        """For people: the connector, and after which other."""
        return way_of(self.connector, self.failed[-1] if self.failed else "")

    @property
    def last(self) -> str:
        """The connector that it went over last, if over any."""
        return self.failed[-1] if self.failed else self.connector

    @property
    def due_s(self) -> float:
        """When it is given up, on the monotonic clock."""
        return self.started_s + self.pull.deadline_s

    @property
    def left_s(self) -> float:
        return self.due_s - time.monotonic()

    def ended(self, result: PullResult) -> PullResult:
        """What to tell of its end. Bytes that came damaged and then whole over no other connector leave open what their owner has
        drawn from them, whatever it was that failed last.
        """
        reason = PullEnd.CORRUPT if self.damaged and result.reason else result.reason
        return replace(result, reason=reason, damaged=tuple(self.damaged))

    def next_pull(self) -> Pull:
        """The order for the connector that it goes over now."""
        return replace(self.pull, connector=self.connector, deadline_s=max(self.left_s, 0.0))


class Detours:
    """The other ways to each peer, and pulls that wait for one to be connected. Starts and connects nothing itself."""

    def __init__(self) -> None:
        self._ways: dict[str, list[ConnectPeer]] = {}
        self._waiting: dict[str, Journey] = {}

    def __len__(self) -> int:
        return len(self._ways) + len(self._waiting)

    def tell(self, order: ConnectPeer) -> None:
        """Learn what other ways lead to a peer that is connected."""
        self._ways[order.peer_id] = [
            replace_way(order, way.connector, way.metadata) for way in order.others if way.connector != order.connector
        ]

    def forget(self, peer_id: str) -> Iterator[Journey]:
        """Let a peer's ways go; the pulls that waited for one end."""
        self._ways.pop(peer_id, None)
        for journey in [each for each in self._waiting.values() if each.pull.peer_id == peer_id]:
            del self._waiting[journey.pull.transfer_id]
            yield journey

    def next_way(self, journey: Journey, result: PullResult) -> ConnectPeer | None:
        """Return how a pull that ended so may go on; None when that was its end."""
        if not may_be_connectors(result.reason) or journey.is_cancelled or journey.left_s <= 0:
            return None
        tried = {*journey.failed, journey.connector}
        return next((way for way in self._ways.get(journey.pull.peer_id, []) if way.connector not in tried), None)

    def wait(self, journey: Journey, order: ConnectPeer) -> None:
        """Keep a pull until the connector that it is to go over is connected by this order."""
        journey.awaits = order
        self._waiting[journey.pull.transfer_id] = journey

    def cancel(self, transfer_id: str) -> Journey | None:
        """Take out a pull that waits; None when it does not."""
        return self._waiting.pop(transfer_id, None)

    @property
    def due_s(self) -> float | None:
        """When the first of the pulls that wait has waited too long."""
        return min((journey.due_s for journey in self._waiting.values()), default=None)

    def overdue(self) -> list[Journey]:
        """Take out the pulls that have waited too long."""
        found = [journey for journey in self._waiting.values() if journey.left_s <= 0]
        for journey in found:
            del self._waiting[journey.pull.transfer_id]
        return found

    def arrived(self, order: ConnectPeer) -> list[Journey]:
        """Take out the pulls that waited for the end of an order, good or bad."""
        found = [each for each in self._waiting.values() if each.awaits is order]
        for journey in found:
            del self._waiting[journey.pull.transfer_id]
        return found


def replace_way(order: ConnectPeer, connector: str, metadata: bytes) -> ConnectPeer:
    """Make the order that connects the same peer over another connector."""
    return ConnectPeer(
        peer_id=order.peer_id,
        connector=connector,
        metadata=metadata,
        num_blocks=order.num_blocks,
        block_bytes=order.block_bytes,
        layouts=order.layouts,
    )
