"""Bytes that are no message: the caller learns that it is at fault, and the log has a line, not a traceback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server

SECRET = MeshSecret("a mesh secret for tests only")
GARBAGE = b"\xff" * 40


class Peer(mesh_pb2_grpc.KVPeerServicer):
    """One unary call and one stream of answers."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def EndTransfer(self, request: pb.EndTransferRequest, context: Any) -> pb.EndTransferReply:
        return pb.EndTransferReply(known=True)

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> AsyncIterator[pb.BlockChunk]:
        try:
            while True:
                yield pb.BlockChunk()
                await asyncio.sleep(0)
        finally:
            self.closed.set()


class Engine(mesh_pb2_grpc.EngineServicer):
    """A stream that is iterated, and one that reads by itself."""

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.StepFrame]:  # type: ignore[override]
        async for _ in request_iterator:
            yield pb.StepFrame()

    async def Control(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        while await context.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            await context.write(pb.ControlDown(pong=1))


def register(server: grpc.aio.Server, peer: Peer) -> list[str]:
    mesh_pb2_grpc.add_KVPeerServicer_to_server(peer, server)
    mesh_pb2_grpc.add_EngineServicer_to_server(Engine(), server)
    return []


async def outcome(channel: grpc.aio.Channel, kind: str, method: str, metadata: Any) -> tuple[grpc.StatusCode, str]:
    """Send garbage to a method, to a stream after something good; returns the status."""
    make = getattr(channel, kind)(method)
    if kind == "stream_stream":
        call = make(metadata=metadata, timeout=5)
        await call.write(b"")
        await call.read()
        await call.write(GARBAGE)
    else:
        call = make(GARBAGE, metadata=metadata, timeout=5)
    return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "/pdmesh.v1.KVPeer/EndTransfer"),
        ("unary_stream", "/pdmesh.v1.KVPeer/ReadBlocks"),
        ("stream_stream", "/pdmesh.v1.Engine/Generate"),
        ("stream_stream", "/pdmesh.v1.Engine/Control"),
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
    ],
)
def test_garbage_is_an_invalid_argument_and_a_line(kind: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> tuple[grpc.StatusCode, str]:
        async with (
            grpc_server("127.0.0.1", 0, SECRET, lambda server: register(server, Peer())) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            return await outcome(channel, kind, method, SECRET.call_metadata())

    code, details = asyncio.run(go())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "40 bytes cannot be decoded" in details
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(loud) == 1, [record.getMessage() for record in loud]
    assert method in loud[0].getMessage()
    assert loud[0].exc_info is None


def test_garbage_of_a_stranger_is_refused_as_any_call_of_a_stranger(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> tuple[grpc.StatusCode, str]:
        async with (
            grpc_server("127.0.0.1", 0, SECRET, lambda server: register(server, Peer())) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            return await outcome(channel, "unary_unary", "/pdmesh.v1.KVPeer/EndTransfer", ())

    assert asyncio.run(go())[0] is grpc.StatusCode.UNAUTHENTICATED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_good_calls_pass_and_a_stream_is_closed_with_its_caller() -> None:
    async def go() -> None:
        peer = Peer()
        async with (
            grpc_server("127.0.0.1", 0, SECRET, lambda server: register(server, peer)) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = mesh_pb2_grpc.KVPeerStub(channel)
            metadata = SECRET.call_metadata()
            assert (await stub.EndTransfer(pb.EndTransferRequest(), metadata=metadata, timeout=5)).known
            reading = stub.ReadBlocks(pb.ReadBlocksRequest(), metadata=metadata, timeout=5)
            await reading.read()
            reading.cancel()
            await asyncio.wait_for(peer.closed.wait(), 5)

    asyncio.run(go())
