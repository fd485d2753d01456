"""What each peer is attached for, and over which connectors: pulls from it and pushes to it live and end apart from each other.

Both may use one connector's connection. It ends with the last of the two, and is not made anew under the other while it stands:
that would cut off what is under way.
"""

import itertools
import threading
from collections import Counter
from dataclasses import dataclass

from pdmesh.engine.messages import ConnectPeer, PeerConnected, Use


@dataclass(frozen=True, slots=True)
class Released:
    """Connectors of an attachment that is over."""

    gone: list[str]
    """To disconnect."""
    kept: list[str]
    """That the peer's other attachment still uses."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What a transfer goes over."""

    peer_id: str
    connector: str
    number: int
    """Another one each time that the peer is connected anew."""


class Attachments:
    """The table. The loop's, but for what the threads that connect ask and say: `stands`, `make`, `connected` and `broke`."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, Use], list[str]] = {}
        """Last the connector that was connected last."""
        self._orders: dict[tuple[str, str], ConnectPeer] = {}
        """(peer, connector) -> how it was connected last."""
        self._numbers: dict[tuple[str, str], int] = {}
        """(peer, connector) -> its connection's."""
        self._numbered = itertools.count(1)
        self._making: dict[tuple[str, str], ConnectPeer] = {}
        """(peer, connector) -> the order that makes its connection now: what begins over it would be cut, or be of either."""
        self._suspects: set[tuple[str, str]] = set()
        """Connections over which something has failed since."""
        self._connecting: Counter[tuple[str, Use, str]] = Counter()
        """Orders under way."""
        self._unwanted: set[tuple[str, Use, str]] = set()
        """To be let go when the last order for them has ended; each has one under way."""
        self._lock = threading.Lock()
        """Of the connections."""

    def __len__(self) -> int:
        of_connections = len(self._orders) + len(self._numbers) + len(self._suspects) + len(self._making)
        return len(self._names) + len(self._connecting) + len(self._unwanted) + of_connections

    def names(self, peer_id: str, use: Use) -> list[str]:
        """Return the connectors that a peer is attached over for a use."""
        return self._names.get((peer_id, use), [])

    def begin(self, order: ConnectPeer) -> None:
        """Note an order that is given now: somebody wants what it connects, again maybe."""
        key = (order.peer_id, order.use, order.connector)
        self._connecting[key] += 1
        self._unwanted.discard(key)

    def stands(self, order: ConnectPeer) -> bool:
        """Whether a peer is connected just so already, and nothing speaks against it."""
        key = (order.peer_id, order.connector)
        with self._lock:
            known = self._orders.get(key)
            return known is not None and key not in self._suspects and _how(known) == _how(order)

    def make(self, order: ConnectPeer) -> None:
        """A connector connects a peer anew from now on, until it `connected` or `broke`."""
        with self._lock:
            self._making[order.peer_id, order.connector] = order

    def making(self, peer_id: str, connector: str) -> ConnectPeer | None:
        """Return the order that makes a connection anew now."""
        with self._lock:
            return self._making.get((peer_id, connector))

    def connected(self, order: ConnectPeer) -> None:
        """A connector has connected a peer anew."""
        key = (order.peer_id, order.connector)
        with self._lock:
            del self._making[key]
            self._orders[key] = order
            self._numbers[key] = next(self._numbered)
            self._suspects.discard(key)

    def broke(self, order: ConnectPeer) -> None:
        """A connector could not connect a peer anew: what was, if anything was, has been cut for it."""
        with self._lock:
            del self._making[order.peer_id, order.connector]
        self.suspect(self.connection(order.peer_id, order.connector))

    def connection(self, peer_id: str, connector: str) -> Connection:
        """Return what a transfer goes over that is about to begin."""
        with self._lock:
            return Connection(peer_id, connector, self._numbers.get((peer_id, connector), 0))

    def suspect(self, connection: Connection) -> None:
        """Something has failed over a connection. If that is not there any more, its end was heard of late, and says nothing of
        the one that has taken its place."""
        key = (connection.peer_id, connection.connector)
        with self._lock:
            if self._numbers.get(key) == connection.number:
                self._suspects.add(key)

    def arrived(self, answer: PeerConnected) -> bool:
        """Take the end of an order; whether its connector is to be let go at once."""
        key = (peer_id, use, connector) = (answer.peer_id, answer.use, answer.connector)
        self._connecting[key] -= 1
        self._connecting += Counter()
        if not answer.error:
            names = self._names.setdefault((peer_id, use), [])
            names[:] = [*(each for each in names if each != connector), connector]
        is_unwanted = key in self._unwanted
        self._unwanted.discard(key)
        return is_unwanted

    def is_over(self, peer_id: str, use: Use) -> bool:
        """Whether a peer is not attached for a use, nor about to be."""
        return not self.names(peer_id, use) and not self._connectors_under_way(peer_id, use)

    def release(self, peer_id: str, use: Use, connector: str = "") -> Released:
        """End an attachment, and one that is being made; with a connector, over that one alone, when its orders have ended."""
        under_way = self._connectors_under_way(peer_id, use)
        self._unwanted.update((peer_id, use, name) for name in under_way if connector in ("", name))
        names, rest = self._names.pop((peer_id, use), []), []
        if connector:
            rest = [each for each in names if each != connector or each in under_way]
            names = [each for each in names if each not in rest]
        if rest:
            self._names[peer_id, use] = rest
        used = self._used(peer_id)
        released = Released(
            gone=[each for each in names if each not in used], kept=[each for each in names if each in used]
        )
        self._forget(peer_id, released.gone)
        return released

    def strays(self, peer_id: str) -> list[str]:
        """Take out the connectors over which a peer is connected and that nobody uses, or is about to."""
        used = self._used(peer_id)
        with self._lock:
            found = [connector for each, connector in self._orders if each == peer_id and connector not in used]
        self._forget(peer_id, found)
        return found

    def _used(self, peer_id: str) -> set[str]:
        """Connectors over which a peer is attached or about to be."""
        attached = (name for use in Use for name in self.names(peer_id, use))
        return {*attached, *(name for use in Use for name in self._connectors_under_way(peer_id, use))}

    def _forget(self, peer_id: str, connectors: list[str]) -> None:
        with self._lock:
            for connector in connectors:
                self._orders.pop((peer_id, connector), None)
                self._numbers.pop((peer_id, connector), None)
                self._suspects.discard((peer_id, connector))

    def _connectors_under_way(self, peer_id: str, use: Use) -> list[str]:
        return [name for each, of, name in self._connecting if (each, of) == (peer_id, use)]


def _how(order: ConnectPeer) -> tuple[object, ...]:
    return (order.metadata, order.num_blocks, order.block_bytes, order.layouts)
