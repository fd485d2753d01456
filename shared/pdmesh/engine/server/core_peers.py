"""Connects pools of peers in the core: the server agrees with a peer, the core's worker half maps or registers its memory."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pdmesh.connector.base import PeerPool
from pdmesh.engine.messages import ConnectPeer, DisconnectPeer, OtherWay, PeerConnected, ToCore, Use
from pdmesh.errors import HandshakeRefused, PeerUnavailable

# A worker half may block 5 s in connect; a step may run before it is asked.
CONNECT_TIMEOUT_S = 15.0


class Core(Protocol):
    """What the server's parts need of the core's client."""

    def send(self, message: ToCore) -> None: ...


@dataclass(slots=True, eq=False)
class _Askers:
    """All who wait at a time for one peer, connector and use to be connected."""

    num_waiting: int = 0
    is_attached: bool = False
    """One of them has had the answer that it is, and lets go what it is about."""
    is_given_up: bool = False
    """One of them waits no more: what it has ordered may be connected yet."""


class CorePeers:
    """Turns ConnectPeer and its answer into one awaitable call."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[PeerConnected]] = {}
        """By order: what is said of an earlier one is not said of this, for its peer may be reached in another way by now."""
        self._waiting: dict[tuple[str, str, Use], _Askers] = {}

    async def attach(self, pool: PeerPool, connector: str, use: Use = Use.PULL) -> None:
        """Have the core reach `pool`. Raises HandshakeRefused when its memory cannot be reached."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._core.send(
            ConnectPeer(
                peer_id=pool.peer_id,
                connector=connector,
                metadata=pool.metadata,
                num_blocks=pool.num_blocks,
                block_bytes=pool.block_bytes,
                layouts=list(pool.layouts),
                others=[OtherWay(connector=way.connector, metadata=way.metadata) for way in pool.others],
                use=use,
                number=number,
            )
        )
        try:
            with self._asking(pool.peer_id, connector, use) as askers:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    connected = await answer
                askers.is_attached |= not connected.error
        except TimeoutError:
            raise PeerUnavailable(f"the engine core did not connect {pool.peer_id} over {connector} in time") from None
        finally:
            del self._answers[number]
        if connected.error:
            raise HandshakeRefused(f"{pool.peer_id} over {connector}: {connected.error}")

    @contextmanager
    def _asking(self, peer_id: str, connector: str, use: Use) -> Iterator[_Askers]:
        """Be one of those who wait; the last to go lets go what nobody has heard to be connected."""
        key = (peer_id, connector, use)
        askers = self._waiting.setdefault(key, _Askers())
        askers.num_waiting += 1
        try:
            yield askers
        except BaseException:
            askers.is_given_up = True
            raise
        finally:
            askers.num_waiting -= 1
            if not askers.num_waiting:
                del self._waiting[key]
                if askers.is_given_up and not askers.is_attached:
                    # The others of the peer's go on.
                    self._core.send(DisconnectPeer(peer_id=peer_id, use=use, connector=connector))

    def detach(self, peer_id: str, use: Use = Use.PULL) -> None:
        """Let the core forget a peer for a use; its pulls, or pushes, end as `peer_lost`."""
        for (each, _, of), askers in self._waiting.items():
            if (each, of) == (peer_id, use):
                askers.is_attached = False
        self._core.send(DisconnectPeer(peer_id=peer_id, use=use))

    def send(self, message: ToCore) -> None:
        """Hand a message about an attached peer over."""
        self._core.send(message)

    def connected(self, message: PeerConnected) -> None:
        """Deliver the core's answer."""
        answer = self._answers.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message)
