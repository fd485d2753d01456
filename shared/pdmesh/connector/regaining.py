"""Better connectors for peers that were attached over a worse one: what could not be used once may work by now.

Whoever uses such a peer sets off an attempt now and then, beside what is under way; a mesh that rests makes none. Each attempt
costs a handshake and what the connector takes to say no, so that they become rare, but never end.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine

from pdmesh.connector.handshake import Greeter, Peer
from pdmesh.errors import MeshError

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 5.0
LAST_PAUSE_S = 300.0


class Regaining:
    """The attempts of one consumer."""

    def __init__(
        self,
        greeter: Greeter,
        *,
        knows: Callable[[Peer], bool],
        in_background: Callable[[Coroutine[object, object, None], str], object],
        detach: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`detach` disconnects from a peer id that nobody knows any more."""
        self.regained: Counter[str] = Counter()
        """Times a connector could be used again, by its name."""
        self._greeter = greeter
        self._knows = knows
        self._in_background = in_background
        self._detach = detach
        self._clock = clock

    def note_met(self, peer: Peer) -> None:
        """A peer was attached over some connector."""
        if self._greeter.before(peer.connector):
            peer.regain_pause_s, peer.regain_due_s = FIRST_PAUSE_S, self._clock() + FIRST_PAUSE_S

    def replace(self, peer: Peer, name: str) -> None:
        """What is in use with a peer is given up for now, and a worse one, which is attached, used instead."""
        log.warning("connector %s damages what comes from %s: %s is used for now", peer.connector, peer.address, name)
        peer.attached.add(name)
        peer.connector = name
        self.note_met(peer)

    def note_used(self, peer: Peer) -> None:
        """A peer is used: see whether it could be reached over a better connector, if that is due."""
        if peer.regain_due_s is not None and self._clock() >= peer.regain_due_s:
            peer.regain_due_s = None
            self._in_background(self._try(peer), "regain-connector")

    async def _try(self, peer: Peer) -> None:
        name = ""
        try:
            # Without `peer.attaching`: this may take long, and a request that needs its next connector waits for that lock. What
            # is attached here comes before the one in use, and what there after it.
            greeting = await self._greeter.ask(peer.stub, peer.address)
            if greeting.reply.peer_id == peer.peer_id and self._knows(peer):
                name = await self._greeter.attach_better(peer.address, greeting, peer.connector)
        except MeshError as exc:
            log.debug("%s was not asked for a better connector: %s", peer.address, exc.message)
        except Exception:  # the task's top
            log.exception("a better connector to %s could not be tried", peer.address)
        finally:
            # Whatever happened, the next attempt comes.
            self._settle(peer, name)

    def _settle(self, peer: Peer, name: str) -> None:
        """An attempt is over; `name`: the connector that was attached, if one was."""
        if not self._knows(peer):
            if name:
                self._detach(peer.peer_id)
            return
        if name:
            log.info("connector %s reaches %s again and is used instead of %s", name, peer.address, peer.connector)
            self.regained[name] += 1
            peer.attached.add(name)
            peer.connector = name
            self.note_met(peer)
        else:
            peer.regain_pause_s = min(2 * peer.regain_pause_s, LAST_PAUSE_S)
            peer.regain_due_s = self._clock() + peer.regain_pause_s
