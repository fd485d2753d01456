"""Connects pools of peers in the core: the server agrees with a peer, the core's worker half maps or registers its memory."""

import asyncio
from typing import Protocol

from pdmesh.connector.base import PeerPool
from pdmesh.engine.messages import ConnectPeer, DisconnectPeer, OtherWay, PeerConnected, ToCore, Use
from pdmesh.errors import HandshakeRefused, PeerUnavailable

# A worker half may block 5 s in connect; a step may run before it is asked.
CONNECT_TIMEOUT_S = 15.0


class Core(Protocol):
    """What the server's parts need of the core's client."""

    def send(self, message: ToCore) -> None: ...


class CorePeers:
    """Turns ConnectPeer and its answer into one awaitable call."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: dict[tuple[str, str, Use], asyncio.Future[PeerConnected]] = {}

    async def attach(self, pool: PeerPool, connector: str, use: Use = Use.PULL) -> None:
        """Have the core reach `pool`. Raises HandshakeRefused when its memory cannot be reached."""
        key = (pool.peer_id, connector, use)
        answer = self._waiting.setdefault(key, asyncio.get_running_loop().create_future())
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
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connected = await asyncio.shield(answer)
        except TimeoutError:
            # It may be connected yet, and nobody would know of it to let it go.
            self.detach(pool.peer_id)
            raise PeerUnavailable(f"the engine core did not connect {pool.peer_id} over {connector} in time") from None
        finally:
            self._waiting.pop(key, None)
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
        answer = self._waiting.get((message.peer_id, message.connector, message.use))
        if answer is not None and not answer.done():
            answer.set_result(message)
