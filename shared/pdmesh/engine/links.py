"""The worker's halves of all connectors as one thing: connect peers aside, start pulls, collect what ended.

Connecting may block for seconds, so that it runs in a thread of its own; the loop is woken when it is done.
"""

import functools
import logging
import os
import queue
import threading
from collections import Counter
from dataclasses import dataclass

from pdmesh.connector.base import PeerPool, Publication, Published, Pull, PullResult, WorkerConnector
from pdmesh.connector.pool import KVPool
from pdmesh.engine.conversion import ConvertingPull
from pdmesh.engine.messages import ConnectorChanged, ConnectPeer, OfferPublished, PeerConnected
from pdmesh.engine.staged_pulls import StagedPulls
from pdmesh.errors import MeshError

log = logging.getLogger(__name__)

PEER_LOST = "peer_lost"
# A connect that hangs longer is left to end with the process.
CONNECT_GRACE_S = 1.0

News = PeerConnected | ConnectorChanged | OfferPublished


@dataclass(frozen=True, slots=True)
class EndedPull:
    """A pull's result and the connector it came over."""

    result: PullResult
    connector: str


class Links:
    """Connections of this core's pool to those of its peers. Owns the connectors.

    With a `pool` that has a staging area, blocks of peers with other layouts are converted on their way into it.
    """

    def __init__(self, connectors: dict[str, WorkerConnector], pool: KVPool | None = None) -> None:
        self._connectors = connectors
        self._connectors_of: dict[str, list[str]] = {}
        """Peer id -> the connectors it is connected over; last the one that was connected last."""
        self._pulls: dict[str, str] = {}
        """Transfer id -> connector, while it runs."""
        self._refused: list[EndedPull] = []
        self._unwanted: set[str] = set()
        """Peers to forget as soon as they are connected; each has an order under way."""
        self._connecting: Counter[str] = Counter()
        """Orders under way, by peer id."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Lock()
        self._is_closed = False
        self._orders: queue.SimpleQueue[ConnectPeer | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        has_staging = pool is not None and pool.staging is not None
        self._staged = StagedPulls(pool, self._start, self.cancel) if pool is not None and has_staging else None
        # A daemon: a peer that hangs in connect must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="connect", daemon=True)
        self._thread.start()
        for name, connector in connectors.items():
            connector.watch_metadata(functools.partial(self._tell_changed, name))
            connector.watch_published(functools.partial(self._tell_published, name))

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when `poll` or `take_news` has something."""
        staged = [] if self._staged is None else [self._staged.fileno()]
        return [self._wake_fd, *staged, *(connector.fileno() for connector in self._connectors.values())]

    @property
    def has_refused(self) -> bool:
        """Whether `poll` has results that no descriptor tells of."""
        return bool(self._refused)

    @property
    def num_lanes_used(self) -> int:
        """Lanes of the staging area in which blocks of other layouts lie."""
        return 0 if self._staged is None else self._staged.num_lanes_used

    def connect(self, order: ConnectPeer) -> None:
        """Begin to connect a peer; the answer comes from `take_news`."""
        self._unwanted.discard(order.peer_id)
        self._connecting[order.peer_id] += 1
        self._orders.put(order)

    def take_news(self) -> list[News]:
        """Return the answers to `connect`, and what else the server must know, since the last call; never blocks."""
        if not self._drain_wake():
            return []
        news = []
        while not self._news.empty():
            message = self._news.get()
            news.append(message)
            if not isinstance(message, PeerConnected):
                continue
            self._connecting[message.peer_id] -= 1
            if not message.error:
                names = [each for each in self._connectors_of.get(message.peer_id, []) if each != message.connector]
                self._connectors_of[message.peer_id] = [*names, message.connector]
                if message.peer_id in self._unwanted:
                    self.disconnect(message.peer_id)
            if not self._connecting[message.peer_id]:
                del self._connecting[message.peer_id]
                self._unwanted.discard(message.peer_id)
        return news

    def disconnect(self, peer_id: str) -> None:
        """Forget a peer; its pulls end with `peer_lost`."""
        if peer_id in self._connecting:
            self._unwanted.add(peer_id)
        for name in self._connectors_of.pop(peer_id, []):
            self._connectors[name].disconnect(peer_id)

    def publish(self, publication: Publication) -> None:
        """Have every connector make an offer's blocks available."""
        for connector in self._connectors.values():
            connector.publish(publication)

    def retract(self, offer_id: str) -> None:
        """Have every connector take it back."""
        for connector in self._connectors.values():
            connector.retract(offer_id)

    def start(self, pull: Pull | ConvertingPull) -> None:
        """Begin a pull over the connector of its peer. It ends through `poll`, also when it cannot begin."""
        if isinstance(pull, Pull):
            self._start(pull)
        elif self._staged is None:
            self._refuse(pull, "", "error:this engine has no staging area (kv-staging-bytes)")
        else:
            self._staged.start(pull)

    def _start(self, pull: Pull) -> None:
        names = self._connectors_of.get(pull.peer_id, [])
        name = pull.connector or (names[-1] if names else "")
        if name not in names:
            self._refuse(pull, name, PEER_LOST)
            return
        try:
            self._connectors[name].start(pull)
        except Exception as exc:
            log.exception("pull %s could not be started over %s", pull.transfer_id, name)
            self._refuse(pull, name, f"error:{type(exc).__name__}: {exc}")
            return
        self._pulls[pull.transfer_id] = name

    def cancel(self, transfer_id: str) -> None:
        """Stop a pull; it still ends through `poll`."""
        name = self._pulls.get(transfer_id)
        if name is not None:
            self._connectors[name].cancel(transfer_id)
        elif self._staged is not None:
            self._staged.cancel(transfer_id)

    def poll(self) -> list[EndedPull]:
        """Return the pulls that ended since the last call; never blocks."""
        ended, self._refused = self._refused, []
        if self._pulls:
            for name, connector in self._connectors.items():
                for result in connector.poll():
                    self._pulls.pop(result.transfer_id, None)
                    ended.append(EndedPull(result, name))
        if self._staged is None:
            return ended
        whole = []
        for each in ended:
            if self._staged.owns(each.result.transfer_id):
                self._staged.piece_ended(each.result, each.connector)
            else:
                whole.append(each)
        return whole + [EndedPull(each.result, each.connector) for each in self._staged.poll()]

    def close(self) -> None:
        """End all pulls and the connectors with them."""
        self._orders.put(None)
        for connector in self._connectors.values():
            connector.close()
        if self._staged is not None:
            self._staged.close()
        self._thread.join(timeout=CONNECT_GRACE_S)
        with self._closing:
            self._is_closed = True
            os.close(self._wake_fd)

    def _refuse(self, pull: Pull | ConvertingPull, connector: str, reason: str) -> None:
        result = PullResult(transfer_id=pull.transfer_id, reason=reason, num_bytes=0, duration_s=0.0)
        self._refused.append(EndedPull(result, connector))

    def _drain_wake(self) -> bool:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return False
        return True

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            self._tell(PeerConnected(peer_id=order.peer_id, connector=order.connector, error=self._connect(order)))

    def _tell_changed(self, connector: str, metadata: bytes) -> None:
        self._tell(ConnectorChanged(connector=connector, metadata=metadata))

    def _tell_published(self, connector: str, published: Published) -> None:
        self._tell(OfferPublished(connector=connector, offer_id=published.offer_id, error=published.error))

    def _tell(self, message: News) -> None:
        """Queue news for the loop and wake it; from any thread."""
        self._news.put(message)
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def _connect(self, order: ConnectPeer) -> str:
        """Connect and return what went wrong, or nothing."""
        connector = self._connectors.get(order.connector)
        if connector is None:
            return f"this engine has no connector {order.connector}; it has {', '.join(self._connectors)}"
        if order.layouts and self._staged is None:
            return (
                "its blocks have another layout, and this engine has no staging area to convert them (kv-staging-bytes)"
            )
        peer = PeerPool(
            peer_id=order.peer_id,
            metadata=order.metadata,
            num_blocks=order.num_blocks,
            block_bytes=order.block_bytes,
            layouts=tuple(order.layouts),
        )
        try:
            connector.connect(peer)
        except MeshError as exc:
            return exc.message
        except Exception as exc:  # the thread's top: a bad peer must not end it
            log.exception("connecting %s over %s failed", order.peer_id, order.connector)
            return f"{type(exc).__name__}: {exc}"
        return ""
