"""An owner of KV over real gRPC, and a consumer whose core is a notebook."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from pdmesh.connector.base import PeerPool
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import PoolShape
from pdmesh.errors import HandshakeRefused
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import EndedOffer, OfferTable
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.old_wire import OldWireServer
from support.pool_node import SECRET, make_pool

SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
DIGEST = b"d" * 32
SECRETS = MeshSecret(SECRET)


@dataclass
class Owner:
    offers: OfferTable
    servicer: PoolOwner
    ended: list[EndedOffer]
    blocks: GroupBlocks
    port: int = 0
    num_handshakes: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def offer(self, offer_id: str = "o", **changes: object) -> None:
        self.offers.open(offer_id, request_id="r", digest=DIGEST, **changes)  # type: ignore[arg-type]
        assert self.offers.seal(offer_id, [self.blocks], 20)
        self.servicer.settle()


@asynccontextmanager
async def owning(
    peer_id: str = "owner@1",
    *,
    model: str = "model",
    layouts: tuple[str, ...] = ("layout",),
    connectors: tuple[str, ...] = ("shm", "grpc"),
    secret: MeshSecret = SECRETS,
    port: int = 0,
    is_old: bool = False,
) -> AsyncIterator[Owner]:
    """`is_old`: it speaks protocol version 1."""
    pool = make_pool(SHAPE, filled=True)
    ended: list[EndedOffer] = []
    table = OfferTable()
    servicer = PoolOwner(
        peer_id=peer_id,
        pool=pool,
        offers=table,
        connectors={name: b"metadata of " + name.encode() for name in connectors},
        model_fingerprint=model,
        layout_fingerprints=list(layouts),
        on_ended=ended.append,
    )
    blocks = GroupBlocks(group=0, block_ids=[2, 5], generations=pool.generations_of([2, 5]))
    owner = Owner(table, servicer, ended, blocks)
    reaper = asyncio.create_task(servicer.run())
    try:

        def register(server: grpc.aio.Server) -> list[str]:
            return [servicer.add_to(OldWireServer(server) if is_old else server)]  # type: ignore[arg-type]

        async with grpc_server("127.0.0.1", port, secret, register) as owner.port:
            yield owner
    finally:
        reaper.cancel()
        await asyncio.wait([reaper])
        pool.close()


@dataclass
class Half:
    """Stands where an engine's core is: notes what it is told, refuses what the test wants refused."""

    attached: list[tuple[PeerPool, str]] = field(default_factory=list)
    detached: list[str] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)

    async def attach(self, pool: PeerPool, connector: str) -> None:
        await asyncio.sleep(0.01)
        if connector in self.refuse:
            raise HandshakeRefused(f"{connector} does not reach")
        self.attached.append((pool, connector))

    def detach(self, peer_id: str) -> None:
        self.detached.append(peer_id)


def directory(
    half: Half, *, model: str = "model", layouts: tuple[str, ...] = ("layout",), secret: MeshSecret = SECRETS
) -> PeerDirectory:
    return PeerDirectory("consumer@7", secret, ["shm", "grpc"], model, list(layouts), half.attach, half.detach)
