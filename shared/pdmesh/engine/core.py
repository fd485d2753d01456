"""The engine core's loop: take messages, ended pulls and ended steps in, plan the next step, send what came of it; sleep when
there is nothing.

One thread owns the scheduler, another the model (see `executor`). With asynchronous scheduling a step is planned while the
one before it computes; requests that come before it begins are added to it.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from pdmesh.connector.base import Publication, Pull
from pdmesh.connector.pool import KVPool
from pdmesh.engine.backend import BackendLostError
from pdmesh.engine.conversion import ConvertingPull
from pdmesh.engine.executor import Executor
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.links import Links
from pdmesh.engine.messages import (
    Abort,
    AddRequest,
    ConnectPeer,
    DisconnectPeer,
    DropHeld,
    FromCore,
    HoldRequest,
    Ping,
    Pong,
    PrefixCacheReset,
    PullOwnBlock,
    ReleaseOffer,
    ResetPrefixCache,
    SetSource,
    Shutdown,
    StepOutput,
    ToCore,
)
from pdmesh.engine.notices import Notices
from pdmesh.engine.plan import StepResult
from pdmesh.engine.push_messages import (
    BeginPush,
    EndPush,
    ExpectPush,
    PushArrived,
    PushExpected,
    ShutOutWriters,
    StopPush,
)
from pdmesh.engine.request import BrokenSequence
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.scheduler import Scheduler
from pdmesh.engine.self_pull import SelfPulls
from pdmesh.errors import InternalError

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
# The states are looked through when nothing has happened for so long: that takes a millisecond or more over a large pool, and
# right behind a prompt others on these cores are about to go on with it.
QUIET_S = 0.5
# Nothing hangs on the gauges; what has just been told of does, and wants the processors for the next moment.
GAUGES_PAUSE_S = 0.01


class Inbox(Protocol):
    """Where the server's messages arrive."""

    @property
    def num_dropped(self) -> int:
        """Messages that could not be decoded."""

    def drain(self) -> Iterable[ToCore]:
        """Return what has arrived; never blocks."""

    def wait(self, descriptors: list[int], timeout_s: float | None = None) -> bool:
        """Sleep until a message arrives or one of `descriptors` becomes readable; False when neither did within the timeout."""


class Core:
    """Scheduler, executor and links, driven by messages."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        links: Links,
        inbox: Inbox,
        send: Callable[[FromCore], None],
        events: KVEventLog | None = None,
        self_pulls: SelfPulls | None = None,
        summed: KVPool | None = None,
    ) -> None:
        """`summed`: see `Notices`."""
        self._scheduler = scheduler
        self._executor = executor
        self._links = links
        self._inbox = inbox
        self._send = send
        self._events = events
        self._self_pulls = self_pulls
        self._notices = Notices(links, summed, scheduler.state.kv.block_size)
        if self_pulls is not None:
            scheduler.state.borrowers.append(lambda: self_pulls.blocks)
        self._under_way: deque[Schedule] = deque()
        self._pulls: deque[tuple[int, Pull | ConvertingPull | PushExpected]] = deque()
        """Pulls, and answers that let peers write, with the number of steps that must have ended first: those may still write
        there too."""
        self._num_unsafe = 0
        """As many steps must have ended before blocks that are free now are written to by anything but a later step."""
        self._has_arrivals = False
        """Whether somebody waits who may not have been there when the last step was planned."""
        self._cancelled: set[str] = set()
        """Of those pulls."""
        self._is_stopping = False
        self._step_tokens = 0
        self._max_step_tokens = 0
        self._num_failed_in_a_row = 0
        self._gauges_due_s: float | None = 0.0
        """When the gauges are told although nothing else is; None when nothing may have changed."""

    def run(self) -> None:
        """Serve until Shutdown. Raises InternalError when step after step fails."""
        while True:
            self._take_in()
            if self._is_stopping:
                return
            has_stepped = self._take_results()
            while self._plan():
                pass
            self._pull_own_block()
            self._flush(has_stepped=has_stepped)
            if not self._links.has_refused:
                self._rest()

    def _take_in(self) -> None:
        for order in self._inbox.drain():
            with self._expelling():
                self._handle(order)
        for ended in self._links.poll():
            if self._self_pulls is not None and (pulled := self._self_pulls.ended(ended.result)) is not None:
                self._send(pulled)
                continue
            self._has_arrivals = True
            with self._expelling():
                self._scheduler.end_pull(ended.result, ended.connector)
        for message in self._links.take_news():
            self._send(message)
        for add in self._notices.take():
            with self._expelling():
                self._add(add)

    @contextlib.contextmanager
    def _expelling(self) -> Iterator[None]:
        """Let a request that meets a bug of the engine's states end alone."""
        try:
            yield
        except BrokenSequence as exc:
            self._scheduler.expel(exc)

    def _take_results(self) -> bool:
        """Update the scheduler with each step that ended; whether there was one."""
        results = self._executor.take_results()
        for result in results:
            schedule = self._under_way.popleft()
            self._step_tokens = schedule.num_tokens
            self._max_step_tokens = max(self._max_step_tokens, self._step_tokens)
            self._take_result(schedule, result)
        return bool(results)

    def _take_result(self, schedule: Schedule, result: StepResult | Exception) -> None:
        """Take one step's result in; a failure ends the requests in it, not the engine."""
        if isinstance(result, Exception):
            self._survive(schedule, result)
            return
        try:
            self._scheduler.update(schedule, result)
        except Exception as exc:
            self._survive(schedule, exc)
        else:
            self._num_failed_in_a_row = 0

    def _survive(self, schedule: Schedule, exc: Exception) -> None:
        if isinstance(exc, BackendLostError):
            # Its requests are not failed one by one: with the core's end they may go on elsewhere.
            raise InternalError(f"the engine core ends: {exc}") from exc
        log.error("a step over %d rows failed", len(schedule.sequences), exc_info=exc)
        self._scheduler.fail(schedule, f"the engine failed in a step: {type(exc).__name__}: {exc}")
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row == MAX_FAILED_STEPS:
            self._flush(has_stepped=True)
            raise InternalError(f"{MAX_FAILED_STEPS} steps in a row failed, the last with {type(exc).__name__}: {exc}")

    def _plan(self) -> bool:
        """Submit the next step, if it would run next and there is something to compute; whether there was."""
        if not self._may_plan:
            if self._has_arrivals and self._under_way:
                self._has_arrivals = False
                self._extend(self._under_way[-1])
            self._order_pulls()
            return False
        self._has_arrivals = False
        schedule = self._scheduler.schedule()
        # Pulls go first, so that memory moves while the step computes.
        self._order_pulls(at_rest=schedule.is_empty and not self._under_way)
        if schedule.is_empty:
            return False
        self._under_way.append(schedule)
        self._submit(schedule)
        return True

    @property
    def _may_plan(self) -> bool:
        # Should a step with copies fail, nobody knows which blocks are whole: nothing may be planned on it before.
        return self._executor.can_take and not (self._under_way and self._under_way[-1].plan.copies)

    def _extend(self, schedule: Schedule) -> None:
        """Let who came after the last step was planned take part in it, if it has not begun."""
        if not self._scheduler.may_extend(schedule) or not self._executor.recall():
            return
        try:
            self._scheduler.extend(schedule)
            self._order_pulls()
        finally:
            self._submit(schedule)

    def _submit(self, schedule: Schedule) -> None:
        self._executor.submit(schedule.plan)
        if schedule.plan.copies:
            # Its copies' sources may be free by now.
            self._num_unsafe = self._executor.num_submitted

    def _handle(self, message: ToCore) -> None:
        match message:
            case AddRequest():
                if not self._notices.settle(message.request.request_id):
                    self._add(message)
            case HoldRequest():
                self._notices.hold(message.add)
            case DropHeld():
                if self._notices.settle(message.request_id):
                    self._scheduler.abort(message.request_id)
            case Abort():
                self._scheduler.abort(message.request_id, message.choice)
            case ReleaseOffer():
                # First, or what is written of its blocks might already be another request's.
                self._links.retract(message.offer_id)
                self._scheduler.release_offer(message.offer_id)
            case SetSource():
                self._has_arrivals = True
                self._scheduler.comebacks.answer(message)
            case ConnectPeer():
                self._links.connect(message)
            case DisconnectPeer():
                self._links.disconnect(message.peer_id, message.use, message.connector)
            case BeginPush():
                self._scheduler.remote.pushing.begin(message)
            case StopPush():
                self._scheduler.remote.pushing.stop(message.transfer_id)
            case ExpectPush():
                self._scheduler.remote.landings.expect(message)
            case PushArrived():
                self._scheduler.remote.landings.arrived(message)
            case EndPush():
                self._scheduler.remote.landings.end(message)
            case ShutOutWriters():
                self._links.shut_out(message.connector)
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache(message.damaged)
                self._send(PrefixCacheReset(number=message.number))
            case Ping():
                self._send(Pong(number=message.number))
            case PullOwnBlock() if self._self_pulls is not None:
                self._self_pulls.order(message)
            case Shutdown():
                self._is_stopping = True

    def _add(self, message: AddRequest) -> None:
        self._has_arrivals = True
        try:
            self._scheduler.add(message)
        except Exception as exc:  # whatever a request holds, the others go on
            log.exception("request %s could not be taken in", message.request.request_id)
            self._scheduler.fail_add(message, f"{type(exc).__name__}: {exc}")

    def _order_pulls(self, *, at_rest: bool = False) -> None:
        """Start the pulls that no step under way can disturb, in order, and cancel what is not wanted any more.

        `at_rest`: nothing is computed, now or next.
        """
        if self._scheduler.state.take_strays():
            self._num_unsafe = self._executor.num_submitted
        outbox = self._scheduler.state.outbox
        self._pulls.extend((self._num_unsafe, pull) for pull in outbox.pulls)
        self._pulls.extend((self._num_unsafe, expected) for expected in outbox.expected)
        waiting = {pull.transfer_id for _, pull in self._pulls}
        # These read what is computed.
        for write in outbox.writes:
            self._links.start(write)
        for transfer_id in outbox.cancels:
            if transfer_id in waiting:
                self._cancelled.add(transfer_id)
            else:
                self._links.cancel(transfer_id)
        outbox.pulls, outbox.expected, outbox.writes, outbox.cancels = [], [], [], []
        at_rest = at_rest and len(self._pulls) == 1 and not self._cancelled
        while self._pulls and self._pulls[0][0] <= self._executor.num_ended:
            _, pull = self._pulls.popleft()
            if isinstance(pull, PushExpected):
                self._send(pull)
                continue
            self._links.start(pull, at_rest=at_rest)
            if pull.transfer_id in self._cancelled:
                self._cancelled.remove(pull.transfer_id)
                self._links.cancel(pull.transfer_id)

    def _pull_own_block(self) -> None:
        """Start the pull that was ordered, when blocks are there that no step writes to."""
        if self._self_pulls is None:
            return
        pull = self._self_pulls.next_pull(
            num_submitted=self._executor.num_submitted, num_ended=self._executor.num_ended
        )
        if pull is not None:
            self._links.start(pull)

    def _flush(self, *, has_stepped: bool) -> None:
        """Send one message with all that there is to tell."""
        has_events = self._events is not None and self._events.has_events
        has_news = has_stepped or has_events or self._scheduler.state.outbox.has_reports
        is_due = self._gauges_due_s is not None and time.monotonic() >= self._gauges_due_s
        if not has_news and (self._under_way or not is_due):
            return
        outbox = self._scheduler.state.take_outbox()
        # First: who listens goes on with it, and has the longest way yet.
        outbox.sealed = self._notices.give(outbox.sealed, outbox.deltas)
        for sealed in outbox.sealed:
            self._links.publish(
                Publication(
                    offer_id=sealed.offer_id,
                    block_ids=[block_id for group in sealed.groups for block_id in group.block_ids],
                    generations=[word for group in sealed.groups for word in group.generations],
                )
            )
        stats = msgspec.structs.replace(
            self._scheduler.state.stats(),
            steps=self._executor.num_ended,
            step_tokens=self._step_tokens if has_stepped else 0,
            max_step_tokens=self._max_step_tokens,
            num_lanes_used=self._links.num_lanes_used,
            pushed_tokens=self._scheduler.remote.landings.num_pushed_tokens,
            num_blocks_quarantined=self._scheduler.remote.landings.num_quarantined,
            told_ahead=self._notices.num_ahead,
            undecodable_messages=self._inbox.num_dropped,
        )
        self._send(
            StepOutput(
                deltas=outbox.deltas,
                sealed=outbox.sealed,
                transfers=outbox.transfers,
                computed=outbox.computed,
                needs=outbox.needs,
                begun_s=self._executor.begun_s if has_stepped else 0.0,
                ended_s=self._executor.ended_s if has_stepped else 0.0,
                pushes=outbox.pushes,
                landings=outbox.landings,
                kv_events=self._events.take() if has_events and self._events is not None else b"",
                stats=stats,
            )
        )
        # After the last step the gauges are sent once more, now at rest.
        self._gauges_due_s = time.monotonic() + GAUGES_PAUSE_S if has_stepped else None

    def _rest(self) -> None:
        wait = self._inbox.wait
        if self._under_way:
            wait(self._descriptors)
        elif self._gauges_due_s is not None:
            wait(self._descriptors, max(0.0, self._gauges_due_s - time.monotonic()))
            return
        elif __debug__ and not self._scheduler.state.requests:
            if not wait(self._descriptors, QUIET_S):
                self._scheduler.state.check_integrity()
                wait(self._descriptors)
        else:
            wait(self._descriptors)
        # Whatever woke the loop may change a gauge without a report.
        if self._gauges_due_s is None:
            self._gauges_due_s = time.monotonic() + GAUGES_PAUSE_S

    @property
    def _descriptors(self) -> list[int]:
        return [self._executor.fileno(), *self._links.descriptors]
