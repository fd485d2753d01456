"""Connects pools of peers in the core: the server agrees with a peer, the core's worker half maps or registers its memory."""

import asyncio
from dataclasses import dataclass, field
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
class _Question:
    """An answer of the core's that is waited for, by several maybe."""

    answer: asyncio.Future[PeerConnected] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_waiting: int = 0
    is_heard: bool = False
    """One of them has had the answer, and lets go what it is about."""


class CorePeers:
    """Turns ConnectPeer and its answer into one awaitable call."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[tuple[str, str, Use], _Question] = {}

    async def attach(self, pool: PeerPool, connector: str, use: Use = Use.PULL) -> None:
        """Have the core reach `pool`. Raises HandshakeRefused when its memory cannot be reached."""
        key = (pool.peer_id, connector, use)
        question = self._waiting.setdefault(key, _Question())
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
            )
        )
        question.num_waiting += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connected = await asyncio.shield(question.answer)
            question.is_heard = True
        except TimeoutError:
            raise PeerUnavailable(f"the engine core did not connect {pool.peer_id} over {connector} in time") from None
        finally:
            question.num_waiting -= 1
            if not question.num_waiting:
                del self._waiting[key]
                if not question.is_heard:
                    # It may be connected yet, and nobody would know of it to let it go. The others of the peer's go on.
                    self._core.send(DisconnectPeer(peer_id=pool.peer_id, use=use, connector=connector))
        if connected.error:
            raise HandshakeRefused(f"{pool.peer_id} over {connector}: {connected.error}")

    def detach(self, peer_id: str, use: Use = Use.PULL) -> None:
        """Let the core forget a peer for a use; its pulls, or pushes, end as `peer_lost`."""
        self._core.send(DisconnectPeer(peer_id=peer_id, use=use))

    def send(self, message: ToCore) -> None:
        """Hand a message about an attached peer over."""
        self._core.send(message)

    def connected(self, message: PeerConnected) -> None:
        """Deliver the core's answer."""
        question = self._waiting.get((message.peer_id, message.connector, message.use))
        if question is not None and not question.answer.done():
            question.answer.set_result(message)
