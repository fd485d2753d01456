"""Who may still write into this pool: an owner whose push broke off is asked until it says that it has stopped, or is shut out.

Only the very process that wrote can say so, and only once it knows of the transfer's end. One that says that it is about to
stop is slow and not dead: it is asked again for as long as the request it wrote for might have lived. One that has gone, that
another start has replaced, or that stays silent is made unable to write: the connector withdraws what writers reach the pool
by. The clock decides when that is done, never that it need not be.
"""

import asyncio
import logging
import time
from enum import Enum, auto

from pdmesh.connector.peers import PeerDirectory
from pdmesh.engine.push_messages import ShutOutWriters, WritersShutOut
from pdmesh.engine.server.core_peers import Core
from pdmesh.errors import MeshError
from pdmesh.protocol.transfers import Ended

log = logging.getLogger(__name__)

# A living owner answers at once; shutting out costs the pulls that are under way over the connector.
ASK_FOR_S = 5.0
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0
REACH_TIMEOUT_S = 2.0
SHUT_OUT_TIMEOUT_S = 30.0
ABORTED = "aborted"


class _Word(Enum):
    STOPPED = auto()
    STOPPING = auto()
    """It lives, writes no more than it has begun, and will say when that is done."""
    NONE = auto()
    """No answer; or that it still writes, without more."""
    ADRIFT = auto()
    """It has ended, and bytes of it may still arrive: to ask again would bring the same."""
    NEVER = auto()
    """Another process is in its place."""


class Writers:
    """Gets the word of writers that ended without one."""

    def __init__(self, *, core: Core, peers: PeerDirectory, connector: str) -> None:
        self._core = core
        self._peers = peers
        self._connector = connector
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[None] | None = None
        self.num_shut_out = 0
        """Times that all writers were, or begin to be, shut out."""

    async def stop(
        self,
        owner_id: str,
        address: str,
        transfer_id: str,
        num_shut_out: int,
        deadline_s: float,
        has_ended: bool = False,
    ) -> bool:
        """Return when the owner writes nothing more for a transfer, that was begun after so many times of shutting out; whether
        the owner has been asked, and so told that the transfer is over.

        `deadline_s`: of its request, on the monotonic clock; until then an owner that says that it is stopping has time.
        `has_ended`: it has said already that it does no more for it.
        """
        is_asked = False
        ask_until_s, pause_s = time.monotonic() + ASK_FOR_S, FIRST_PAUSE_S
        while self.num_shut_out == num_shut_out:
            word, is_asked = await self._ask(owner_id, address, transfer_id, has_ended), True
            if word is _Word.STOPPED:
                return True
            if word is _Word.STOPPING:
                ask_until_s = max(ask_until_s, min(time.monotonic() + ASK_FOR_S, deadline_s))
            if word in (_Word.NEVER, _Word.ADRIFT) or time.monotonic() >= ask_until_s:
                log.warning("%s does not say that it has stopped writing here: all writers are shut out", owner_id)
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        await self._shut_out(num_shut_out)
        return is_asked

    def shut_out(self, message: WritersShutOut) -> None:
        """Deliver the core's answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    async def _ask(self, owner_id: str, address: str, transfer_id: str, has_ended: bool) -> _Word:
        if (ended := await self._peers.end(owner_id, transfer_id, False, ABORTED)) is None:
            try:
                peer = await self._peers.reach(address, REACH_TIMEOUT_S)
            except MeshError:
                return _Word.NONE
            if peer.peer_id != owner_id:
                return _Word.NEVER
            ended = await self._peers.end(owner_id, transfer_id, False, ABORTED)
        return _word_of(ended, owner_id, has_ended)

    async def _shut_out(self, num_shut_out: int) -> None:
        """Have the core shut all writers out, unless that was begun since the transfer was."""
        async with self._turn:
            while self.num_shut_out == num_shut_out:
                self.num_shut_out += 1
                self._answer = asyncio.get_running_loop().create_future()
                self._core.send(ShutOutWriters(connector=self._connector))
                try:
                    async with asyncio.timeout(SHUT_OUT_TIMEOUT_S):
                        await self._answer
                except TimeoutError:
                    log.error("writers could not be shut out within %.0f s; trying again", SHUT_OUT_TIMEOUT_S)
                    self.num_shut_out = num_shut_out


def _word_of(ended: Ended | None, owner_id: str, has_ended: bool) -> _Word:
    if ended is None:
        return _Word.NONE
    if ended.peer_id not in ("", owner_id):
        # Another start of the owner knows nothing of what the one before still writes.
        return _Word.NEVER
    if ended.writing:
        if ended.stopping:
            return _Word.STOPPING
        return _Word.ADRIFT if has_ended else _Word.NONE
    return _Word.STOPPED if ended.peer_id else _Word.NEVER
