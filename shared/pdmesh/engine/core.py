"""The engine core's loop: take messages and ended pulls in, run a step, send what came of it; sleep when there is nothing.

One thread owns everything here. A request waits in the inbox for at most one step.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from pdmesh.engine.links import Links
from pdmesh.engine.messages import (
    Abort,
    AddRequest,
    ConnectPeer,
    DisconnectPeer,
    FromCore,
    ReleaseOffer,
    Shutdown,
    StepOutput,
    ToCore,
)
from pdmesh.engine.runner import Runner
from pdmesh.engine.scheduler import Schedule, Scheduler
from pdmesh.errors import InternalError

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


class Inbox(Protocol):
    """Where the server's messages arrive."""

    @property
    def num_dropped(self) -> int:
        """Messages that could not be decoded."""

    def drain(self) -> Iterable[ToCore]:
        """Return what has arrived; never blocks."""

    def wait(self, descriptors: list[int]) -> None:
        """Sleep until a message arrives or one of `descriptors` becomes readable."""


class Core:
    """Scheduler, runner and links, driven by messages."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, links: Links, inbox: Inbox, send: Callable[[FromCore], None]
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._links = links
        self._inbox = inbox
        self._send = send
        self._is_stopping = False
        self._num_steps = 0
        self._step_tokens = 0
        self._max_step_tokens = 0
        self._num_failed_in_a_row = 0
        self._is_stats_sent = False

    def run(self) -> None:
        """Serve until Shutdown. Raises InternalError when step after step fails."""
        while True:
            self._take_in()
            if self._is_stopping:
                return
            schedule = self._scheduler.schedule()
            # Pulls go first, so that memory moves while the step computes.
            self._order_pulls()
            if schedule.rows:
                self.step(schedule)
            self._flush(has_stepped=bool(schedule.rows))
            if not schedule.rows and not self._links.has_refused:
                self._rest()

    def step(self, schedule: Schedule) -> None:
        """Compute a schedule and take in the results; a failure ends the requests in it, not the engine."""
        self._num_steps += 1
        self._step_tokens = schedule.num_tokens
        self._max_step_tokens = max(self._max_step_tokens, self._step_tokens)
        try:
            results = self._runner.run(schedule)
            self._scheduler.update(schedule, results)
        except Exception as exc:
            self._survive(schedule, exc)
        else:
            self._num_failed_in_a_row = 0

    def _survive(self, schedule: Schedule, exc: Exception) -> None:
        log.exception("a step over %d requests failed", len(schedule.rows))
        self._scheduler.fail(schedule, f"the engine failed in a step: {type(exc).__name__}: {exc}")
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == MAX_FAILED_STEPS:
            self._flush(has_stepped=True)
            raise InternalError(f"{MAX_FAILED_STEPS} steps in a row failed, the last with {type(exc).__name__}: {exc}")

    def _take_in(self) -> None:
        for order in self._inbox.drain():
            self._handle(order)
        for ended in self._links.poll():
            self._scheduler.end_pull(ended.result, ended.connector)
        for message in self._links.take_news():
            self._send(message)

    def _handle(self, message: ToCore) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case Abort():
                self._scheduler.abort(message.request_id, message.choice)
            case ReleaseOffer():
                self._scheduler.release_offer(message.offer_id)
            case ConnectPeer():
                self._links.connect(message)
            case DisconnectPeer():
                self._links.disconnect(message.peer_id)
            case Shutdown():
                self._is_stopping = True

    def _add(self, message: AddRequest) -> None:
        try:
            self._scheduler.add(message)
        except Exception as exc:  # whatever a request holds, the others go on
            log.exception("request %s could not be taken in", message.request.request_id)
            self._scheduler.fail_add(message, f"{type(exc).__name__}: {exc}")

    def _order_pulls(self) -> None:
        outbox = self._scheduler.state.outbox
        for pull in outbox.pulls:
            self._links.start(pull)
        for transfer_id in outbox.cancels:
            self._links.cancel(transfer_id)
        outbox.pulls, outbox.cancels = [], []

    def _flush(self, *, has_stepped: bool) -> None:
        """Send one message with all that there is to tell."""
        # A step's end may have cancelled pulls.
        self._order_pulls()
        if not has_stepped and not self._scheduler.state.outbox.has_reports and self._is_stats_sent:
            return
        outbox = self._scheduler.state.take_outbox()
        stats = msgspec.structs.replace(
            self._scheduler.state.stats(),
            steps=self._num_steps,
            step_tokens=self._step_tokens if has_stepped else 0,
            max_step_tokens=self._max_step_tokens,
            undecodable_messages=self._inbox.num_dropped,
        )
        self._send(
            StepOutput(
                deltas=outbox.deltas,
                sealed=outbox.sealed,
                transfers=outbox.transfers,
                computed=outbox.computed,
                stats=stats,
            )
        )
        # After the last step the gauges are sent once more, now at rest.
        self._is_stats_sent = not has_stepped

    def _rest(self) -> None:
        if __debug__ and not self._scheduler.state.requests:
            self._scheduler.state.check_integrity()
        self._inbox.wait(self._links.descriptors)
        # Whatever woke the loop may change a gauge without a report.
        self._is_stats_sent = False
