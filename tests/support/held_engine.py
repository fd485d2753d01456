"""An engine's server whose core is the test: it sees what the server sends and decides what the core says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from pdmesh.config import EngineConfig
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.messages import (
    AddRequest,
    ConnectPeer,
    CoreReady,
    FromCore,
    OfferSealed,
    OwnBlockPulled,
    PeerConnected,
    Ping,
    Pong,
    PullOwnBlock,
    ReleaseOffer,
    StepOutput,
    ToCore,
)
from pdmesh.engine.server.assembly import Engine, assemble
from pdmesh.engine.server.core_peers import CorePeers
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.requests import Sink
from pdmesh.protocol.messages import ChoiceDelta, GroupBlocks
from pdmesh.security import MeshSecret
from support.engines import SECRET

READY = CoreReady(
    model_fingerprint="model",
    layout_fingerprints=["layout"],
    block_size=16,
    num_blocks=8,
    block_bytes=64,
    max_model_len=1024,
    vocab_size=400,
    eos_token_ids=[1],
    connectors={},
    dtype="float32",
    backend="none",
    row_invariant=True,
)


class HeldCore:
    """The core's end: what was sent to it, and what the test lets it say."""

    ready = READY
    connectors = ("shm",)
    """Those by which this engine reaches others."""

    def __init__(self) -> None:
        self.sent: list[ToCore] = []
        self.is_frozen = False
        self.broken: dict[str, str] = {}
        """Connector -> how its pulls of an own block end."""
        self.mute: set[str] = set()
        """Connectors whose pulls of an own block get no answer."""
        self._connector = ""
        self._said: asyncio.Queue[FromCore] = asyncio.Queue()

    def send(self, message: ToCore) -> None:
        self.sent.append(message)
        match message:
            case ConnectPeer():
                # Every peer's memory is within reach.
                self._connector = message.connector
                self._said.put_nowait(
                    PeerConnected(
                        peer_id=message.peer_id, connector=message.connector, use=message.use, number=message.number
                    )
                )
            case PullOwnBlock() if self._connector not in self.mute:
                error = self.broken.get(self._connector, "")
                self._said.put_nowait(OwnBlockPulled(number=message.number, error=error))
            case Ping() if not self.is_frozen:
                self._said.put_nowait(Pong(number=message.number))

    async def outputs(self) -> AsyncIterator[FromCore]:
        while True:
            yield await self._said.get()

    async def say(self, **fields: Any) -> None:
        self._said.put_nowait(StepOutput(**fields))
        await asyncio.sleep(0.01)

    def added(self) -> AddRequest:
        """The latest request."""
        return next(message for message in reversed(self.sent) if isinstance(message, AddRequest))

    def released(self) -> list[str]:
        return [message.offer_id for message in self.sent if isinstance(message, ReleaseOffer)]

    async def prefill(self, *, finish_reason: str = "") -> None:
        """Seal the latest request's offer and give its first token."""
        added = self.added()
        blocks = GroupBlocks(group=0, block_ids=[0, 1, 2], generations=[5, 5, 5])
        await self.say(
            sealed=[OfferSealed(offer_id=added.offer_id, request_id="", groups=[blocks], num_tokens=40)],
            deltas=[ChoiceDelta(request_id=added.request.request_id, token_ids=[9], finish_reason=finish_reason)],
        )


class Inbox(Sink):
    def __init__(self) -> None:
        self.deltas: list[ChoiceDelta] = []

    def put(self, delta: ChoiceDelta) -> None:
        self.deltas.append(delta)


@asynccontextmanager
async def held_engine(core: HeldCore, **settings: Any) -> AsyncIterator[Engine]:
    identity = Identity(engine_id="engine", role="prefill", model_name="m", address="127.0.0.1:1")
    fd = create_pool_file("test")
    shape = PoolShape(READY.num_blocks, READY.block_bytes)
    size_pool_file(fd, shape)
    pool = KVPool(fd, shape, writable=False)
    core_peers = CorePeers(core)
    secret = MeshSecret(SECRET)
    async with (
        PeerDirectory(
            identity.peer_id, secret, list(core.connectors), "model", ["layout"], core_peers.attach, core_peers.detach
        ) as peers,
        asyncio.TaskGroup() as tasks,
    ):
        engine = assemble(
            config=EngineConfig(**settings),
            identity=identity,
            secret=secret,
            core=core,  # type: ignore[arg-type]
            pool=pool,
            core_peers=core_peers,
            peers=peers,
            sums=None,
            tasks=tasks,
            publisher=None,
        )
        running = [tasks.create_task(engine.outputs.run(core)), tasks.create_task(engine.handoff.owner.run())]  # type: ignore[arg-type]
        yield engine
        for task in running:
            task.cancel()
    pool.close()
    os.close(fd)


def play(scene: Callable[[HeldCore, Engine], Awaitable[None]], **settings: Any) -> None:
    async def body() -> None:
        core = HeldCore()
        async with held_engine(core, **settings) as engine:
            await scene(core, engine)

    asyncio.run(body())


def counted(engine: Engine, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    return sum(
        sample.value
        for family in engine.registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
