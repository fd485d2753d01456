"""The worker's halves of all connectors as one thing: connect peers aside, start pulls, collect what ended.

Connecting may block for seconds, so that it runs in threads of its own (`connecting`); the loop is woken when it is done. What a
connector fails goes on over the next one (`journeys`), and what is to be converted through the staging area (`staged_pulls`).
"""

import functools
import logging
import os
import queue
import threading
from dataclasses import replace

from pdmesh.connector.active import ERROR_PREFIX, PullEnd, error_reason
from pdmesh.connector.base import (
    Publication,
    Published,
    Pull,
    PullResult,
    Push,
    PushConnector,
    WorkerConnector,
)
from pdmesh.connector.notices import NoticeConnector, OfferNotice
from pdmesh.connector.pool import KVPool
from pdmesh.engine.attachments import Attachments, Connection
from pdmesh.engine.connecting import Connected, Connecting
from pdmesh.engine.conversion import ConvertingPull
from pdmesh.engine.journeys import EndedPull, Journeys, unbegun
from pdmesh.engine.messages import ConnectorChanged, ConnectPeer, OfferPublished, PeerConnected, Use
from pdmesh.engine.push_messages import WritersShutOut
from pdmesh.engine.staged_pulls import StagedPulls

log = logging.getLogger(__name__)

News = PeerConnected | ConnectorChanged | OfferPublished | WritersShutOut


class Links:
    """Connections of this core's pool to those of its peers. Owns the connectors.

    With a `pool` that has a staging area, blocks of peers with other layouts are converted on their way into it.
    """

    def __init__(self, connectors: dict[str, WorkerConnector], pool: KVPool | None = None) -> None:
        self._connectors = connectors
        self._tellers = {name: each for name, each in connectors.items() if isinstance(each, NoticeConnector)}
        self._attachments = Attachments()
        self._writes: dict[str, Connection] = {}
        """Writes of pushes that have not ended."""
        self._lost: set[str] = set()
        """Transfers that are stopped because their peer was let go."""
        self._refused: list[EndedPull] = []
        """Ends of which no connector tells."""
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Lock()
        self._is_closed = False
        self._news: queue.SimpleQueue[News | Connected] = queue.SimpleQueue()
        has_staging = pool is not None and pool.staging is not None
        self._staged = StagedPulls(pool, self._start, self.cancel) if pool is not None and has_staging else None
        self._connecting = Connecting(connectors, self._attachments, self._tell, has_staging=self._staged is not None)
        self._journeys = Journeys(
            connectors,
            self._attachments,
            connect=self._connect_aside,
            refuse=lambda ended: self._refused.append(ended),
            wake=self._wake,
        )
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
        if order.use is Use.PULL:
            self._journeys.tell_ways(order)
        self._connect_aside(order)

    def _connect_aside(self, order: ConnectPeer) -> None:
        self._attachments.begin(order)
        self._connecting.order(order)

    def take_news(self) -> list[News]:
        """Return the answers to `connect`, and what else the server must know, since the last call; never blocks."""
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return []
        # What woke the loop may have been the alarm, which does not ring twice.
        self._journeys.refuse_overdue()
        news: list[News] = []
        while not self._news.empty():
            message = self._news.get()
            news.append(self._answered(message) if isinstance(message, Connected) else message)
        return news

    def _answered(self, connected: Connected) -> PeerConnected:
        """Draw the conclusions from the end of an order."""
        order, error = connected.order, connected.error
        answer = PeerConnected(
            peer_id=order.peer_id, connector=order.connector, error=error, use=order.use, number=order.number
        )
        is_unwanted = self._attachments.arrived(answer)
        # Also of a push's connection, which pulls may share.
        self._journeys.connected(order, error)
        if order.use is Use.PULL and error and self._attachments.is_over(order.peer_id, Use.PULL):
            self._journeys.forget_ways(order.peer_id)
        if is_unwanted:
            self.disconnect(order.peer_id, order.use, order.connector)
        for name in self._attachments.strays(order.peer_id):
            self._connectors[name].disconnect(order.peer_id)
        return answer

    def disconnect(self, peer_id: str, use: Use = Use.PULL, connector: str = "") -> None:
        """Forget a peer for a use; its pulls, or the writes to it, end with `peer_lost`.

        With a connector: give that one up alone, when it is connected. One that a detour goes over by then goes with the others.
        """
        if connector and not self._lost.issuperset(self._under_way(peer_id, use, connector)):
            return
        released = self._attachments.release(peer_id, use, connector)
        for name in released.gone:
            self._lost.update(self._under_way(peer_id, use, name))
            self._connectors[name].disconnect(peer_id)
        for name in released.kept:
            self._stop(peer_id, use, name)
        if use is Use.PULL and (not connector or self._attachments.is_over(peer_id, use)):
            self._journeys.forget_ways(peer_id)

    def _stop(self, peer_id: str, use: Use, name: str) -> None:
        """Stop what is under way for one use of a connection that the other keeps."""
        for transfer_id in self._under_way(peer_id, use, name):
            self._lost.add(transfer_id)
            self.cancel(transfer_id)

    def _under_way(self, peer_id: str, use: Use, name: str) -> list[str]:
        """Return what a connector carries out now of a peer's pulls, or of the writes to it."""
        if use is Use.PULL:
            return self._journeys.under_way(peer_id, name)
        return [key for key, each in self._writes.items() if (each.peer_id, each.connector) == (peer_id, name)]

    def publish(self, publication: Publication) -> None:
        """Have every connector make an offer's blocks available."""
        for connector in self._connectors.values():
            connector.publish(publication)

    def retract(self, offer_id: str) -> None:
        """Have every connector take it back."""
        for connector in self._connectors.values():
            connector.retract(offer_id)

    def await_offer(self, peer_id: str, connector: str, offer_id: str) -> None:
        """Listen for a peer's offer, where its connector knows how."""
        if (teller := self._tellers.get(connector)) is not None:
            teller.await_offer(peer_id, offer_id)

    def take_notices(self) -> list[tuple[str, OfferNotice]]:
        """Return what peers have told of their offers, by peer id, since the last call; never blocks."""
        return [told for teller in self._tellers.values() for told in teller.take_notices()]

    def is_awaited(self, offer_id: str) -> bool:
        """Whether any peer listens for an offer."""
        return any(teller.is_awaited(offer_id) for teller in self._tellers.values())

    def tell(self, notice: OfferNotice) -> None:
        """Tell the peers that listen for an offer."""
        for teller in self._tellers.values():
            teller.tell(notice)

    def start(self, pull: Pull | ConvertingPull | Push, *, at_rest: bool = False) -> None:
        """Begin a pull, or a write, over a connector of its peer. It ends through `poll`, also when it cannot begin.

        `at_rest`: the loop would only wait for it.
        """
        if not isinstance(pull, ConvertingPull):
            self._start(pull, at_rest=at_rest)
        elif self._staged is None:
            self._refuse(pull, "", error_reason("this engine has no staging area (kv-staging-bytes)"))
        else:
            try:
                self._staged.start(pull)
            except Exception as exc:  # whatever a peer told of its layouts, the other requests go on
                log.exception("pull %s could not be started", pull.transfer_id)
                self._refuse(pull, "", error_reason(f"{type(exc).__name__}: {exc}"))

    def _start(self, pull: Pull | Push, *, at_rest: bool = False) -> None:
        names = self._attachments.names(pull.peer_id, Use.PUSH if isinstance(pull, Push) else Use.PULL)
        if isinstance(pull, Push):
            names = [each for each in names if isinstance(self._connectors[each], PushConnector)]
        wanted = pull.connector if isinstance(pull, Pull) else ""
        name = wanted or (names[-1] if names else "")
        if name not in names:
            self._refuse(pull, name, PullEnd.PEER_LOST)
            return
        if isinstance(pull, Push):
            self._push(pull, name)
        else:
            self._journeys.begin(pull, name, at_rest=at_rest)

    def _push(self, push: Push, name: str) -> None:
        """Have a connector write."""
        connector = self._connectors[name]
        assert isinstance(connector, PushConnector)
        # Before: what is cut as it begins must not pass for a write of the connection that it is cut for.
        over = self._attachments.connection(push.peer_id, name)
        try:
            connector.push(push)
        except Exception as exc:
            log.exception("write %s could not be started over %s", push.transfer_id, name)
            self._refuse(push, name, error_reason(f"{type(exc).__name__}: {exc}"))
            return
        self._writes[push.transfer_id] = over

    def cancel(self, transfer_id: str) -> None:
        """Stop a pull, or a write; it still ends through `poll`."""
        if self._journeys.cancel(transfer_id):
            return
        if (write := self._writes.get(transfer_id)) is not None:
            self._connectors[write.connector].cancel(transfer_id)
        elif self._staged is not None:
            self._staged.cancel(transfer_id)

    def shut_out(self, name: str) -> None:
        """Make sure that no peer writes here over a connector any more; `take_news` tells when it is so."""
        connector = self._connectors.get(name)
        if isinstance(connector, PushConnector):
            connector.shut_out(functools.partial(self._tell, WritersShutOut(connector=name)))
        else:
            # Nobody ever writes over it.
            self._tell(WritersShutOut(connector=name))

    def poll(self) -> list[EndedPull]:
        """Return the pulls and writes that ended since the last call; never blocks."""
        self._journeys.refuse_overdue()
        ended, self._refused = self._refused, []
        if self._journeys.has_running or self._writes:
            for name, connector in self._connectors.items():
                results = (self._ended(name, told) for told in connector.poll())
                ended += [each for each in results if each is not None]
        if self._staged is None:
            return ended
        whole = []
        for each in ended:
            if self._staged.owns(each.result.transfer_id):
                self._staged.piece_ended(each.result, each.connector)
            else:
                whole.append(each)
        return whole + self._staged.poll()

    def _ended(self, name: str, told: PullResult) -> EndedPull | None:
        """Take a connector's word on a pull or a write; None for a pull that goes on over another connector."""
        journey, write = self._journeys.take(told.transfer_id), self._writes.pop(told.transfer_id, None)
        over = write if journey is None else journey.over
        if over is not None and (told.reason == PullEnd.PEER_LOST or told.reason.startswith(ERROR_PREFIX)):
            self._attachments.suspect(over)
        result = self._judged(told)
        return EndedPull(result, name) if journey is None else self._journeys.ended(journey, result)

    def _judged(self, result: PullResult) -> PullResult:
        """Say of what was stopped with its peer what had become of it."""
        if result.transfer_id not in self._lost:
            return result
        self._lost.remove(result.transfer_id)
        return replace(result, reason=PullEnd.PEER_LOST) if result.reason == PullEnd.CANCELLED else result

    def close(self) -> None:
        """End all pulls and the connectors with them."""
        self._connecting.stop()
        self._journeys.close()
        for connector in self._connectors.values():
            connector.close()
        if self._staged is not None:
            self._staged.close()
        self._connecting.join()
        with self._closing:
            self._is_closed = True
            os.close(self._wake_fd)

    def _refuse(self, pull: Pull | ConvertingPull | Push, connector: str, reason: str) -> None:
        self._refused.append(EndedPull(unbegun(pull, reason), connector))

    def _tell_changed(self, connector: str, metadata: bytes) -> None:
        self._tell(ConnectorChanged(connector=connector, metadata=metadata))

    def _tell_published(self, connector: str, published: Published) -> None:
        offer_id, error, num_remade = published.offer_id, published.error, published.num_remade
        self._tell(OfferPublished(connector=connector, offer_id=offer_id, error=error, num_remade=num_remade))

    def _tell(self, message: News | Connected) -> None:
        """Queue news for the loop and wake it; from any thread."""
        self._news.put(message)
        self._wake()

    def _wake(self) -> None:
        with self._closing:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)
