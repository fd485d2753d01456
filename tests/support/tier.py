"""A running tier and engines to use it, all real: gRPC on loopback, shared memory, Valkey."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import select
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from pdmesh.connector.base import PeerPool, Pull, PullResult
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.lifecycle import Life
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.offers import OfferTable
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from pdmesh_kernels.block_sum import sum_blocks
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.server import serve

SECRET = "a mesh secret for tests only"
BLOCK_BYTES = 8192
LAYOUT = "layout-a"
MODEL = "model-a"


def block_key(*parts: object) -> bytes:
    """A key as engines make them."""
    return hashlib.sha256(repr(parts).encode()).digest()


def chain(name: str, num: int) -> list[bytes]:
    """Keys of a prompt's blocks."""
    return [block_key(name, at) for at in range(num)]


class ReadyLife(Life):
    """Remembers what the service reported when it was ready."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def ready(self, **facts: object) -> None:
        self.facts.set_result(facts)


class RunningTier:
    """The service in this process, seen through its ports."""

    def __init__(self, port: int, grpc_port: int) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False)
        self.address = f"127.0.0.1:{grpc_port}"
        self._channel = grpc.aio.insecure_channel(self.address)
        self.stub = mesh_pb2_grpc.KVCacheStub(self._channel)
        self.peer = mesh_pb2_grpc.KVPeerStub(self._channel)
        self.metadata = MeshSecret(SECRET).call_metadata()
        self._numbers = itertools.count()

    async def close(self) -> None:
        await self._channel.close()
        await self._http.aclose()

    async def lookup(
        self,
        keys: list[bytes],
        *,
        transfer_id: str = "",
        remaining_ms: int = 5000,
        layout: str = LAYOUT,
        timeout_s: float = 10.0,
    ) -> pb.LookupReply:
        request = pb.LookupRequest(
            transfer_id=transfer_id or f"lookup-{next(self._numbers)}",
            consumer_id="engine-x@1",
            keys=keys,
            remaining_ms=remaining_ms,
            layout_fingerprint=layout,
            model_fingerprint=MODEL,
        )
        reply: pb.LookupReply = await self.stub.Lookup(request, timeout=timeout_s, metadata=self.metadata)
        return reply

    async def end(self, transfer_id: str, *, committed: bool = True, reason: str = "") -> bool:
        request = pb.EndTransferRequest(transfer_id=transfer_id, committed=committed, reason=reason)
        reply: pb.EndTransferReply = await self.peer.EndTransfer(request, timeout=5, metadata=self.metadata)
        return reply.known

    async def num_hits(self, keys: list[bytes], **options: Any) -> int:
        """Look up and let go at once."""
        transfer_id = f"lookup-{next(self._numbers)}"
        reply = await self.lookup(keys, transfer_id=transfer_id, **options)
        await self.end(transfer_id)
        return reply.num_hits

    async def stats(self) -> pb.StatsReply:
        reply: pb.StatsReply = await self.stub.Stats(pb.StatsRequest(), timeout=5, metadata=self.metadata)
        return reply

    async def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self._http.get("/health")).json()
        return answer

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry `labels`."""
        text = (await self._http.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"pdmesh_kvcache_{name}" and labels.items() <= sample.labels.items()
        )

    async def until(self, name: str, reached: Callable[[float], bool], **labels: str) -> float:
        """Wait for a metric."""
        deadline = time.monotonic() + 10
        while not reached(value := await self.metric(name, **labels)):
            assert time.monotonic() < deadline, f"{name} stays {value}"
            await asyncio.sleep(0.02)
        return value


@asynccontextmanager
async def running_tier(**settings: Any) -> AsyncIterator[RunningTier]:
    """Run the service until the block ends, then drain it."""
    config = KVCacheConfig(**{"port": 0, "grpc_port": 0, "secret": SECRET, "drain_timeout_s": 5.0, **settings})
    life = ReadyLife()
    service = asyncio.create_task(serve(config, life))
    await asyncio.wait([service, life.facts], return_when=asyncio.FIRST_COMPLETED)
    if service.done():
        service.result()
    facts = life.facts.result()
    tier = RunningTier(facts["http_port"], facts["grpc_port"])
    try:
        yield tier
    finally:
        await tier.close()
        life.stop()
        async with asyncio.timeout(15):
            await service


class Engine:
    """An engine as the tier sees it: a pool that it owns, from which it stores and into which it pulls."""

    def __init__(
        self, name: str, *, num_blocks: int = 64, block_bytes: int = BLOCK_BYTES, connectors: tuple[str, ...] = ("shm",)
    ) -> None:
        self.peer_id = f"{name}@{time.monotonic_ns()}"
        self.secret = MeshSecret(SECRET)
        self.connectors = make_worker_connectors(list(connectors), peer_id=self.peer_id, secret=self.secret)
        fd = create_pool_file(name)
        shape = PoolShape(num_blocks, block_bytes)
        size_pool_file(fd, shape)
        self.pool = KVPool(fd, shape, writable=True)
        self.metadata = {each.name: each.register(self.pool) for each in self.connectors.values()}
        self.address = ""
        self._numbers = itertools.count()

    def fill(self, block_ids: list[int], seed: int) -> np.ndarray[Any, Any]:
        """Give blocks new content, as an engine that computes does, and return it."""
        self.pool.bump(block_ids)
        content = np.random.default_rng(seed).integers(
            0, 256, (len(block_ids), self.pool.shape.block_bytes), dtype=np.uint8
        )
        self.pool.blocks[block_ids] = content
        return content

    async def store(
        self,
        tier: RunningTier,
        keys: list[bytes],
        block_ids: list[int],
        *,
        generations: list[int] | None = None,
        layout: str = LAYOUT,
        owner_id: str = "",
        checksums: list[int] | None = None,
    ) -> int:
        if checksums is None:
            # Some tests offer what there is not.
            known = [block_id for block_id in block_ids if block_id < len(self.pool.blocks)]
            checksums = sum_blocks(self.pool.blocks, known).tolist() if known == block_ids else []
        request = pb.StoreRequest(
            owner_id=owner_id or self.peer_id,
            owner_address=self.address,
            keys=keys,
            block_ids=block_ids,
            generations=self.pool.generations_of(block_ids) if generations is None else generations,
            layout_fingerprint=layout,
            model_fingerprint=MODEL,
            block_bytes=self.pool.shape.block_bytes,
            checksums=checksums,
        )
        reply: pb.StoreReply = await tier.stub.Store(request, timeout=5, metadata=tier.metadata)
        return reply.num_accepted

    async def pull(self, tier: RunningTier, reply: pb.LookupReply, *, layout: str = LAYOUT) -> PullResult:
        """Copy a lookup's hits into this engine's blocks 0, 1, …, as its core would."""
        async with PeerDirectory(
            self.peer_id, self.secret, list(self.connectors), MODEL, [layout], self._attach, lambda peer_id: None
        ) as peers:
            peer = await peers.reach(tier.address, 5.0)
            assert peer.peer_id == reply.peer_id
            connector = self.connectors[peer.connector]
            transfer_id = f"pull-{next(self._numbers)}"
            ids = list(reply.blocks.block_ids)
            connector.start(
                Pull(
                    transfer_id=transfer_id,
                    peer_id=peer.peer_id,
                    source_block_ids=ids,
                    generations=list(reply.blocks.generations),
                    target_block_ids=list(range(len(ids))),
                    deadline_s=5.0,
                    checksums=list(reply.blocks.checksums),
                )
            )
            await asyncio.to_thread(select.select, [connector.fileno()], [], [], 10)
            (result,) = connector.poll()
            assert result.transfer_id == transfer_id
            connector.disconnect(peer.peer_id)
            return result

    async def _attach(self, pool: PeerPool, name: str) -> None:
        await asyncio.to_thread(self.connectors[name].connect, pool)

    def close(self) -> None:
        for connector in self.connectors.values():
            connector.close()
        self.pool.close()


@asynccontextmanager
async def running_engine(name: str, *, layout: str = LAYOUT, **options: Any) -> AsyncIterator[Engine]:
    """An engine whose pool the tier may read."""
    engine = Engine(name, **options)
    owner = PoolOwner(
        peer_id=engine.peer_id,
        pool=engine.pool,
        offers=OfferTable(),
        connectors=engine.metadata,
        model_fingerprint=MODEL,
        layout_fingerprints=[layout],
        on_ended=lambda ended: None,
    )
    async with AsyncExitStack() as stack:
        stack.callback(engine.close)
        port = await stack.enter_async_context(
            grpc_server("127.0.0.1", 0, engine.secret, lambda server: [owner.add_to(server)])
        )
        engine.address = f"127.0.0.1:{port}"
        yield engine
