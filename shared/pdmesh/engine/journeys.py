"""Pulls that go straight into the pool: each over one connector after the other, until one has brought it or none is left.

What a connector says of a pull, or of a peer that is being connected, comes from `links`, which starts them here and collects
their ends.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdmesh.connector.active import PullEnd, error_reason
from pdmesh.connector.base import Pull, PullResult, Push, WorkerConnector
from pdmesh.engine.alarm import Alarm
from pdmesh.engine.attachments import Attachments
from pdmesh.engine.conversion import ConvertingPull
from pdmesh.engine.detours import Detours, Journey
from pdmesh.engine.messages import ConnectPeer, Use

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedPull:
    """A pull's result and the way it came: its connector, and after which other."""

    result: PullResult
    connector: str


class Journeys:
    """The pulls that run, and those that wait for a connector. Its methods are the loop's, and never wait."""

    def __init__(
        self,
        connectors: Mapping[str, WorkerConnector],
        attachments: Attachments,
        *,
        connect: Callable[[ConnectPeer], None],
        refuse: Callable[[EndedPull], None],
        wake: Callable[[], None],
    ) -> None:
        """`connect` has a peer connected aside, and `refuse` takes the end of a pull of which no connector will tell."""
        self._connectors = connectors
        self._attachments = attachments
        self._connect = connect
        self._refuse = refuse
        self._running: dict[str, Journey] = {}
        """By transfer id."""
        self._detours = Detours()
        self._alarm = Alarm(wake)
        """For pulls that wait for a connect, which may take longer than they have."""

    def __len__(self) -> int:
        return len(self._running) + len(self._detours)

    @property
    def has_running(self) -> bool:
        """Whether a connector has something to tell of a pull, now or later."""
        return bool(self._running)

    def under_way(self, peer_id: str, connector: str) -> list[str]:
        """Return the pulls from a peer that a connector carries out now."""
        running = self._running.items()
        return [key for key, each in running if (each.pull.peer_id, each.connector) == (peer_id, connector)]

    def tell_ways(self, order: ConnectPeer) -> None:
        """Learn what other ways lead to a peer that is being connected."""
        self._detours.tell(order)

    def forget_ways(self, peer_id: str) -> None:
        """A peer is let go: what waits for a connector to it ends."""
        for journey in self._detours.forget(peer_id):
            self._give_up(journey, PullEnd.PEER_LOST)

    def begin(self, pull: Pull, connector: str, *, at_rest: bool = False) -> None:
        """Begin a pull over a connector of its peer; it ends through `refuse` or `ended`. `at_rest`: the loop only waits."""
        self._begin(Journey(pull=pull, connector=connector), at_rest=at_rest)

    def cancel(self, transfer_id: str) -> bool:
        """Stop a pull; False when there is none of that id."""
        if (journey := self._running.get(transfer_id)) is not None:
            journey.is_cancelled = True
            self._connectors[journey.connector].cancel(transfer_id)
        elif (waiting := self._detours.cancel(transfer_id)) is not None:
            self._give_up(waiting, PullEnd.CANCELLED)
        return journey is not None or waiting is not None

    def take(self, transfer_id: str) -> Journey | None:
        """Take out a pull of which its connector has told the end; None when it was another's."""
        return self._running.pop(transfer_id, None)

    def ended(self, journey: Journey, result: PullResult) -> EndedPull | None:
        """Return how a pull ended that its connector has ended so; None when it goes on over another one."""
        if result.reason == PullEnd.CORRUPT:
            journey.damaged.append(journey.connector)
        return None if self._detour(journey, result) else EndedPull(journey.ended(result), journey.way)

    def connected(self, order: ConnectPeer, error: str) -> None:
        """An order has ended, well or with an error: the pulls that waited for it go on."""
        for journey in self._detours.arrived(order):
            self._go_on(journey, error)

    def refuse_overdue(self) -> None:
        """Give up the pulls whose next connector was not connected in time."""
        for journey in self._detours.overdue():
            self._give_up(journey, PullEnd.TIMEOUT)
        self._alarm.set(self._detours.due_s)

    def close(self) -> None:
        """Wake nobody any more."""
        self._alarm.set(None)

    def _begin(self, journey: Journey, *, at_rest: bool = False) -> None:
        """Have a pull's connector carry it out, when that is not just being connected anew."""
        pull, name = journey.pull, journey.connector
        if (order := self._attachments.making(pull.peer_id, name)) is not None:
            self._wait(journey, order)
            return
        journey.over = self._attachments.connection(pull.peer_id, name)
        connector = self._connectors[name]
        try:
            (connector.start_at_rest if at_rest else connector.start)(journey.next_pull())
        except Exception as exc:
            log.exception("pull %s could not be started over %s", pull.transfer_id, name)
            result = unbegun(pull, error_reason(f"{type(exc).__name__}: {exc}"))
            self._refuse(EndedPull(journey.ended(result), journey.way))
            return
        self._running[pull.transfer_id] = journey

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
            self._connect(way)
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
        result = journey.result or unbegun(journey.pull, PullEnd.PEER_LOST)
        if not self._detour(journey, result):
            self._refuse(EndedPull(journey.ended(result), journey.way))

    def _give_up(self, journey: Journey, reason: str) -> None:
        """End a pull that waits for a connector."""
        self._refuse(EndedPull(journey.ended(unbegun(journey.pull, reason)), journey.last))


def unbegun(pull: Pull | ConvertingPull | Push, reason: str) -> PullResult:
    """The end of what no connector has begun."""
    return PullResult(transfer_id=pull.transfer_id, reason=reason, num_bytes=0, duration_s=0.0)
