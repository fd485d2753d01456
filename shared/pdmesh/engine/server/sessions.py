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

# 256 steps of 256 choices: seconds of a stalled proxy, tens of megabytes at most.
MAX_UNSENT_DELTAS = 65536
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
        self._table = table
        self._unsent: list[ChoiceDelta] = []
        self._unsent_weight = 0
        self._wake = asyncio.Event()
        self._finishing = False

    def put(self, delta: ChoiceDelta) -> None:
        self._unsent.append(delta)
        # A prompt's logprobs weigh as much as the deltas of a whole answer.
        self._unsent_weight += 1 + len(delta.prompt_logprobs or ())
        if self._unsent_weight > MAX_UNSENT_DELTAS:
            self.end(Broken.NOT_DRAINED)
        self._wake.set()

    def end(self, why: Broken) -> None:
        """Have the data stream end."""
        if not self.broken.done():
            self.broken.set_result(why)

    async def take(self) -> list[ChoiceDelta]:
        """Wait for deltas and return all there are; empty when the proxy sends nothing more and is owed nothing."""
        while not self._unsent and not (self._finishing and not self._table.of(self)):
            self._wake.clear()
            await self._wake.wait()
        taken, self._unsent, self._unsent_weight = self._unsent, [], 0
        return taken

    def finish(self) -> None:
        """The proxy sends no more requests."""
        self._finishing = True
        self.nudge()

    def nudge(self) -> None:
        """Let `take` look again, as after a request that ended without a delta."""
        self._wake.set()

    def discard(self) -> list[ChoiceDelta]:
        """Take back what was never sent."""
        unsent, self._unsent = self._unsent, []
        return unsent


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

    def close(self, session_id: str, session: Session) -> None:
        """End a session whose data stream is over: abort what runs, release what was never handed over."""
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
