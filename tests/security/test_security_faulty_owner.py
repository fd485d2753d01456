"""An owner that belongs to the mesh and is out of its mind: its consumer gets an error of ours within its time, never an
exception that nobody foresaw, and never a block that is not the one asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdmesh.connector.base import PeerPool, Pull
from pdmesh.connector.grpc import GrpcConnector
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.errors import MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.engines import loop_thread
from support.pool_node import SECRET, make_pool, wait_for

SECRETS = MeshSecret(SECRET)
SHAPE = PoolShape(num_blocks=8, block_bytes=4096)


class MadOwner(mesh_pb2_grpc.KVPeerServicer):
    """Gives the answers that it was made with."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.chunks: list[pb.BlockChunk] = []

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
        reply: pb.HandshakeReply = self._answers["handshake"]
        return reply

    async def BeginTransfer(self, request: pb.BeginTransferRequest, context: Any) -> pb.BeginTransferReply:
        reply: pb.BeginTransferReply = self._answers["begin"]
        return reply

    async def EndTransfer(self, request: pb.EndTransferRequest, context: Any) -> pb.EndTransferReply:
        reply: pb.EndTransferReply = self._answers["end"]
        return reply

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> AsyncIterator[pb.BlockChunk]:
        for chunk in self.chunks if request.block_ids else []:
            yield chunk

    def add_to(self, server: grpc.aio.Server) -> list[str]:
        mesh_pb2_grpc.add_KVPeerServicer_to_server(self, server)
        return []


numbers = st.one_of(st.integers(0, 9), st.sampled_from([4096, 1 << 31, (1 << 32) - 1]))
long_numbers = st.one_of(numbers, st.sampled_from([1 << 62, (1 << 64) - 1]))
texts = st.one_of(
    st.sampled_from(["", "owner@1", "owner@x", "@", "model", "layout", "shm", "grpc", "committed", "x" * 5000]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)
names = st.lists(texts, max_size=2)
capabilities = st.builds(
    pb.Capability, name=st.sampled_from(["pool", "ticket_read", "?"]), oldest=numbers, newest=numbers
)
# Half of them sound enough to get further.
handshakes = st.builds(
    pb.HandshakeReply,
    peer_id=texts,
    protocol=st.one_of(st.just(1), numbers),
    layout_fingerprints=st.one_of(st.just(["layout"]), names),
    model_fingerprint=st.one_of(st.just("model"), texts),
    num_blocks=numbers,
    block_bytes=long_numbers,
    connectors=st.lists(st.builds(pb.ConnectorMetadata, connector=texts, metadata=st.binary(max_size=9)), max_size=3),
    capabilities=st.lists(capabilities, max_size=2),
)
blocks = st.builds(
    pb.BlockList,
    group=numbers,
    block_ids=st.lists(numbers, max_size=4),
    generations=st.lists(long_numbers, max_size=4),
    first_block=numbers,
)
begins = st.builds(
    pb.BeginTransferReply,
    groups=st.lists(blocks, max_size=2),
    num_tokens=numbers,
    error=st.one_of(st.none(), st.builds(pb.ErrorInfo, code=texts, message=texts, param=texts)),
    peer_id=texts,
)
ends = st.builds(
    pb.EndTransferReply,
    known=st.booleans(),
    outcome=texts,
    writing=st.booleans(),
    stopping=st.booleans(),
    peer_id=texts,
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(handshakes, begins, ends)
def test_answers_to_calls(handshake: Any, begin: Any, end: Any) -> None:
    async def attach(pool: PeerPool, connector: str) -> None:
        pass

    async def scenario() -> None:
        owner = MadOwner(handshake=handshake, begin=begin, end=end)
        async with (
            grpc_server("127.0.0.1", 0, SECRETS, owner.add_to) as port,
            PeerDirectory(
                "consumer@7", SECRETS, ["shm", "grpc"], "model", ["layout"], attach, lambda peer_id: None
            ) as peers,
        ):
            try:
                peer = await peers.reach(f"127.0.0.1:{port}", 5.0)
                await peers.begin(peer, transfer_id="t", offer_id="o", digest=b"", remaining_s=5.0)
            except MeshError:
                return
            await peers.end(peer.peer_id, "t", True)

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[MadOwner, str]]:
    """One owner for all examples; each has answers of its own."""
    owner, stop = MadOwner(), asyncio.Event()

    async def serve(started: asyncio.Future[int]) -> None:
        async with grpc_server("127.0.0.1", 0, SECRETS, owner.add_to) as port:
            started.set_result(port)
            await stop.wait()

    async def start() -> tuple[int, asyncio.Task[None]]:
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(started))
        return await started, serving

    async def end(serving: asyncio.Task[None]) -> None:
        stop.set()
        await serving

    with loop_thread() as loop:
        port, serving = loop.run(start())
        yield owner, f"127.0.0.1:{port}"
        loop.run(end(serving))


@contextmanager
def consuming(address: str) -> Iterator[tuple[GrpcConnector, KVPool]]:
    pool = make_pool(SHAPE, filled=False)
    connector = GrpcConnector("consumer@7", SECRETS)
    try:
        connector.register(pool)
        connector.connect(PeerPool(peer_id="owner@1", metadata=address.encode(), num_blocks=8, block_bytes=4096))
        yield connector, pool
    finally:
        connector.close()
        pool.close()


chunks = st.builds(
    pb.BlockChunk,
    data=st.sampled_from([0, 1, 4095, 4096, 8192, 12288, 1 << 20]).map(lambda size: b"\x07" * size),
    generations=st.lists(st.sampled_from([1, 2, (1 << 64) - 1]), max_size=3),
)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(chunks, max_size=4))
def test_blocks_that_were_not_asked_for_are_no_blocks(served: tuple[MadOwner, str], sent: list[pb.BlockChunk]) -> None:
    owner, address = served
    owner.chunks = sent
    with consuming(address) as (connector, pool):
        connector.start(
            Pull(
                transfer_id="t",
                peer_id="owner@1",
                source_block_ids=[0, 1],
                generations=[1, 2],
                target_block_ids=[3, 5],
                deadline_s=5.0,
            )
        )
        (result,) = wait_for(connector, 1, 10.0)
        if not result.reason:
            assert [each for chunk in sent for each in chunk.generations] == [1, 2]
            assert sum(len(chunk.data) for chunk in sent) == 2 * 4096
        else:
            assert result.num_bytes == 0
        # Whatever came, nothing was written beside the targets.
        assert not pool.blocks[[0, 1, 2, 4, 6, 7]].any()
