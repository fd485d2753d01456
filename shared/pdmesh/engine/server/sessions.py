"""Proxy sessions: what an engine owes one proxy, framed by step and bounded, so that a proxy that stops reading loses only
its own requests.
"""

import asyncio
from enum import StrEnum

from pdmesh.engine.server.endings import Endings
from pdmesh.engine.server.expectations import Expectations
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RequestTable, Sink
from pdmesh.protocol.messages import ChoiceDelta

# 256 steps of 256 choices: seconds of a stalled proxy.
MAX_UNSENT_BYTES = 16 << 20
# About what a delta, and a logprob in one, take in memory; on the wire it is a fifth of that.
DELTA_BYTES = 256
LOGPROB_BYTES = 64
# As they lie in memory, so some megabytes on the wire: far below a message's limit, and above what a step produces.
FRAME_BYTES = 16 << 20
ALL_CHOICES = -1


class Broken(StrEnum):
    """Why a session ended with requests running."""

    STREAM = "stream"
    NOT_DRAINED = "not_drained"
    REPLACED = "replaced"


class Session(Sink):
    """Deltas on their way to one proxy."""

    def __init__(self, table: RequestTable) -> None:
        self.broken: asyncio.Future[Broken] = asyncio.get_running_loop().create_future()
        """Done when the engine must end the session."""
        self.closed = asyncio.Event()
        """Set when its data stream is over."""
        self._table = table
        self._unsent: list[ChoiceDelta] = []
        self._unsent_bytes = 0
        self._taken: list[ChoiceDelta] = []
        """The frame that is being written."""
        self._wake = asyncio.Event()
        self._finishing = False

    def put(self, delta: ChoiceDelta) -> None:
        self._unsent.append(delta)
        # What one step produced is taken whole: of a proxy that was owed nothing it says nothing.
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.end(Broken.NOT_DRAINED)
        self._unsent_bytes += _num_bytes(delta)
        self._wake.set()

    def end(self, why: Broken) -> None:
        """Have the data stream end."""
        if not self.broken.done():
            self.broken.set_result(why)

    async def take(self) -> list[ChoiceDelta]:
        """Wait for deltas and return a frame of them, for which `written` is due; empty when the proxy sends nothing more and is
        owed nothing."""
        while not self._unsent and not (self._finishing and not self._table.of(self)):
            self._wake.clear()
            await self._wake.wait()
        num, num_bytes = len(self._unsent), self._unsent_bytes
        if num_bytes > FRAME_BYTES:
            num, num_bytes = _of_a_frame(self._unsent)
        taken, self._unsent = self._unsent[:num], self._unsent[num:]
        self._unsent_bytes -= num_bytes
        self._taken = taken
        return taken

    def written(self) -> None:
        """The frame that was taken is on its way."""
        self._taken = []

    def finish(self) -> None:
        """The proxy sends no more requests."""
        self._finishing = True
        self.nudge()

    def nudge(self) -> None:
        """Let `take` look again, as after a request that ended without a delta."""
        self._wake.set()

    def discard(self) -> list[ChoiceDelta]:
        """Take back what was never sent, or not to its end: of a frame that broke off nobody knows who has it, and to whoever
        has the ticket in it all the same its offer is one that has ended."""
        unsent, self._taken, self._unsent = self._taken + self._unsent, [], []
        return unsent


def _num_bytes(delta: ChoiceDelta) -> int:
    num = sum(len(each.token_ids) for each in delta.logprobs)
    num += sum(len(each.token_ids) for each in delta.prompt_logprobs or () if each is not None)
    return DELTA_BYTES + LOGPROB_BYTES * num


def _of_a_frame(deltas: list[ChoiceDelta]) -> tuple[int, int]:
    """How many of the first fit into a frame, at least one, and their bytes."""
    total = 0
    for num, delta in enumerate(deltas):
        num_bytes = _num_bytes(delta)
        if num and total + num_bytes > FRAME_BYTES:
            return num, total
        total += num_bytes
    return len(deltas), total


class Sessions:
    """Open sessions by id. One data stream each; a second one under the same id replaces it."""

    def __init__(
        self,
        *,
        table: RequestTable,
        endings: Endings,
        handoff: Handoff,
        expectations: Expectations,
        metrics: EngineMetrics,
    ) -> None:
        self._table = table
        self._endings = endings
        self._expectations = expectations
        self._handoff = handoff
        self._metrics = metrics
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str) -> Session:
        """Start a session for a data stream that just came in."""
        if (previous := self._open.get(session_id)) is not None:
            previous.end(Broken.REPLACED)
        session = self._open[session_id] = Session(self._table)
        return session

    async def ended(self, session_id: str) -> None:
        """Wait until a session's data stream is over; there may be none."""
        if (session := self._open.get(session_id)) is not None:
            await session.closed.wait()

    def close(self, session_id: str, session: Session) -> None:
        """End a session whose data stream is over: abort what runs, release what was never handed over."""
        session.closed.set()
        if self._open.get(session_id) is session:
            del self._open[session_id]
        if requests := self._table.of(session):
            why = session.broken.result() if session.broken.done() else Broken.STREAM
            self._metrics.sessions_aborted.inc(why)
        for running in requests:
            self._endings.abort(running)
        self._expectations.session_closed(session)
        for delta in session.discard():
            if delta.ticket:
                self._handoff.release_ticket(delta.ticket)

    def finish(self) -> None:
        """Let every data stream end once its proxy has all it is owed."""
        for session in self._open.values():
            session.finish()

    def withdraw(self, session_id: str, offer_id: str) -> None:
        """A proxy expects no push any more."""
        if (session := self._open.get(session_id)) is not None:
            self._expectations.withdraw(session, offer_id)

    def abort(self, session_id: str, request_id: str, choice: int) -> None:
        """Abort a choice, or with ALL_CHOICES a request, that a proxy no longer wants; unknown ones have ended already."""
        session = self._open.get(session_id)
        running = None if session is None else self._table.find(session, request_id)
        if session is None or running is None:
            return
        if choice == ALL_CHOICES:
            self._endings.abort(running)
        else:
            self._endings.abort_choice(running, choice)
        session.nudge()
