"""The worker's halves of all connectors as one thing: connect peers aside, start pulls, collect what ended.

Connecting may block for seconds, so that it runs in threads of its own (`connecting`); the loop is woken when it is done.
"""

import functools
import logging
import os
import queue
import threading
from dataclasses import dataclass, replace

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
from pdmesh.connector.pool import KVPool
from pdmesh.engine.alarm import Alarm
from pdmesh.engine.attachments import Attachments, Connection
from pdmesh.engine.connecting import Connected, Connecting
from pdmesh.engine.conversion import ConvertingPull
from pdmesh.engine.detours import Detours, Journey
from pdmesh.engine.messages import ConnectorChanged, ConnectPeer, OfferPublished, PeerConnected, Use
from pdmesh.engine.push_messages import WritersShutOut
from pdmesh.engine.staged_pulls import StagedPulls

log = logging.getLogger(__name__)

News = PeerConnected | ConnectorChanged | OfferPublished | WritersShutOut


@dataclass(frozen=True, slots=True)
class EndedPull:
    """A pull's result and the way it came: its connector, and after which other."""

    result: PullResult
    connector: str


class Links:
    """Connections of this core's pool to those of its peers. Owns the connectors.

    With a `pool` that has a staging area, blocks of peers with other layouts are converted on their way into it.
    """

    def __init__(self, connectors: dict[str, WorkerConnector], pool: KVPool | None = None) -> None:
        self._connectors = connectors
        self._attachments = Attachments()
        self._writes: dict[str, Connection] = {}
        """Writes of pushes that have not ended."""
        self._lost: set[str] = set()
        """Transfers that are stopped because their peer was let go."""
        self._pulls: dict[str, Journey] = {}
        """By transfer id, while they run."""
        self._detours = Detours()
        self._refused: list[EndedPull] = []
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Lock()
        self._is_closed = False
        self._alarm = Alarm(self._wake)
        """For pulls that wait for a connect, which may take longer than they have."""
        self._news: queue.SimpleQueue[News | Connected] = queue.SimpleQueue()
        has_staging = pool is not None and pool.staging is not None
        self._staged = StagedPulls(pool, self._start, self.cancel) if pool is not None and has_staging else None
        self._connecting = Connecting(connectors, self._attachments, self._tell, has_staging=self._staged is not None)
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
            self._detours.tell(order)
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
        self._refuse_overdue()
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
        for journey in self._detours.arrived(order):
            self._go_on(journey, error)
        if order.use is Use.PULL and error and self._attachments.is_over(order.peer_id, Use.PULL):
            self._forget_ways(order.peer_id)
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
            self._forget_ways(peer_id)

    def _stop(self, peer_id: str, use: Use, name: str) -> None:
        """Stop what is under way for one use of a connection that the other keeps."""
        for transfer_id in self._under_way(peer_id, use, name):
            self._lost.add(transfer_id)
            self.cancel(transfer_id)

    def _under_way(self, peer_id: str, use: Use, name: str) -> list[str]:
        """Return what a connector carries out now of a peer's pulls, or of the writes to it."""
        if use is Use.PULL:
            return [key for key, each in self._pulls.items() if (each.pull.peer_id, each.connector) == (peer_id, name)]
        return [key for key, each in self._writes.items() if (each.peer_id, each.connector) == (peer_id, name)]

    def _forget_ways(self, peer_id: str) -> None:
        for journey in self._detours.forget(peer_id):
            self._give_up(journey, PullEnd.PEER_LOST)

    def publish(self, publication: Publication) -> None:
        """Have every connector make an offer's blocks available."""
        for connector in self._connectors.values():
            connector.publish(publication)

    def retract(self, offer_id: str) -> None:
        """Have every connector take it back."""
        for connector in self._connectors.values():
            connector.retract(offer_id)

    def start(self, pull: Pull | ConvertingPull | Push) -> None:
        """Begin a pull, or a write, over a connector of its peer. It ends through `poll`, also when it cannot begin."""
        if not isinstance(pull, ConvertingPull):
            self._start(pull)
        elif self._staged is None:
            self._refuse(pull, "", error_reason("this engine has no staging area (kv-staging-bytes)"))
        else:
            try:
                self._staged.start(pull)
            except Exception as exc:  # whatever a peer told of its layouts, the other requests go on
                log.exception("pull %s could not be started", pull.transfer_id)
                self._refuse(pull, "", error_reason(f"{type(exc).__name__}: {exc}"))

    def _start(self, pull: Pull | Push) -> None:
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
            self._begin(Journey(pull=pull, connector=name))

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

    def _begin(self, journey: Journey) -> None:
        """Have a pull's connector carry it out, when that is not just being connected anew."""
        pull, name = journey.pull, journey.connector
        if (order := self._attachments.making(pull.peer_id, name)) is not None:
            self._wait(journey, order)
            return
        journey.over = self._attachments.connection(pull.peer_id, name)
        try:
            self._connectors[name].start(journey.next_pull())
        except Exception as exc:
            log.exception("pull %s could not be started over %s", pull.transfer_id, name)
            result = _unbegun(pull, error_reason(f"{type(exc).__name__}: {exc}"))
            self._refused.append(EndedPull(journey.ended(result), journey.way))
            return
        self._pulls[pull.transfer_id] = journey

    def _detour(self, journey: Journey, result: PullResult) -> bool:
        """Have a pull that its connector failed go on over the next one, if there is one."""
        way = self._detours.next_way(journey, result)
        names = self._attachments.names(journey.pull.peer_id, Use.PULL)
        if way is None or way.connector not in self._connectors or not names:
            return False
        # Of damage the server tells, once for a peer.
        log.log(
            logging.DEBUG if result.reason == PullEnd.CORRUPT else logging.WARNING,
            "pull %s from %s failed over %s (%s) and goes on over %s",
            journey.pull.transfer_id,
            journey.pull.peer_id,
            journey.connector,
            result.reason,
            way.connector,
        )
        journey.failed.append(journey.connector)
        journey.connector, journey.result = way.connector, result
        if way.connector in names:
            self._begin(journey)
        else:
            self._wait(journey, way)
            self._connect_aside(way)
        return True

    def _wait(self, journey: Journey, order: ConnectPeer) -> None:
        """Let a pull go on when an order has ended."""
        self._detours.wait(journey, order)
        self._alarm.set(self._detours.due_s)

    def _go_on(self, journey: Journey, error: str) -> None:
        """The connector that a pull waited for is connected, or cannot be."""
        if not error and journey.left_s > 0:
            self._begin(journey)
            return
        result = journey.result or _unbegun(journey.pull, PullEnd.PEER_LOST)
        if not self._detour(journey, result):
            self._refused.append(EndedPull(journey.ended(result), journey.way))

    def cancel(self, transfer_id: str) -> None:
        """Stop a pull; it still ends through `poll`."""
        journey = self._pulls.get(transfer_id)
        if journey is not None:
            journey.is_cancelled = True
            self._connectors[journey.connector].cancel(transfer_id)
        elif (write := self._writes.get(transfer_id)) is not None:
            self._connectors[write.connector].cancel(transfer_id)
        elif (waiting := self._detours.cancel(transfer_id)) is not None:
            self._give_up(waiting, PullEnd.CANCELLED)
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
        self._refuse_overdue()
        ended, self._refused = self._refused, []
        if self._pulls or self._writes:
            for name, connector in self._connectors.items():
                for told in connector.poll():
                    journey = self._pulls.pop(told.transfer_id, None)
                    write = self._writes.pop(told.transfer_id, None)
                    over = write if journey is None else journey.over
                    if over is not None and (told.reason == PullEnd.PEER_LOST or told.reason.startswith(ERROR_PREFIX)):
                        self._attachments.suspect(over)
                    result = self._judged(told)
                    if journey is not None and result.reason == PullEnd.CORRUPT:
                        journey.damaged.append(name)
                    if journey is None:
                        ended.append(EndedPull(result, name))
                    elif not self._detour(journey, result):
                        ended.append(EndedPull(journey.ended(result), journey.way))
        if self._staged is None:
            return ended
        whole = []
        for each in ended:
            if self._staged.owns(each.result.transfer_id):
                self._staged.piece_ended(each.result, each.connector)
            else:
                whole.append(each)
        return whole + [EndedPull(each.result, each.connector) for each in self._staged.poll()]

    def _judged(self, result: PullResult) -> PullResult:
        """Say of what was stopped with its peer what had become of it."""
        if result.transfer_id not in self._lost:
            return result
        self._lost.remove(result.transfer_id)
        return replace(result, reason=PullEnd.PEER_LOST) if result.reason == PullEnd.CANCELLED else result

    def close(self) -> None:
        """End all pulls and the connectors with them."""
        self._connecting.stop()
        self._alarm.set(None)
        for connector in self._connectors.values():
            connector.close()
        if self._staged is not None:
            self._staged.close()
        self._connecting.join()
        with self._closing:
            self._is_closed = True
            os.close(self._wake_fd)

    def _refuse_overdue(self) -> None:
        """Give up the pulls whose next connector was not connected in time."""
        for journey in self._detours.overdue():
            self._give_up(journey, PullEnd.TIMEOUT)
        self._alarm.set(self._detours.due_s)

    def _give_up(self, journey: Journey, reason: str) -> None:
        """End a pull that waits for a connector."""
        self._refused.append(EndedPull(journey.ended(_unbegun(journey.pull, reason)), journey.last))

    def _refuse(self, pull: Pull | ConvertingPull | Push, connector: str, reason: str) -> None:
        self._refused.append(EndedPull(_unbegun(pull, reason), connector))

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


def _unbegun(pull: Pull | ConvertingPull | Push, reason: str) -> PullResult:
    """The end of what no connector has begun."""
    return PullResult(transfer_id=pull.transfer_id, reason=reason, num_bytes=0, duration_s=0.0)
