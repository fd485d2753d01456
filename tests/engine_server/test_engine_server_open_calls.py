"""Services that are told to end while others have calls open to them: every call ends, and no log has a traceback."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdmesh.config import ServiceConfig
from pdmesh.engine.server.servicer import SESSION_METADATA_KEY
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.wire import request_to_pb
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support import mesh
from support.engines import request
from support.tiny_models import make_tiny

SECRET = MeshSecret.load(ServiceConfig(secret="a-secret-for-the-tests"))
METADATA = SECRET.call_metadata()
LONG = request("long", max_tokens=100_000)
NUM_STREAMS = 10
WITHIN_S = 20.0


class Silent(mesh_pb2_grpc.EngineServicer):
    """Streams that never end by themselves."""

    async def Control(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(pb.ControlDown())
        await asyncio.sleep(60)


def side(over: threading.Event, *messages: Any) -> Iterator[Any]:
    """A client's side of a stream, which stays open until it is told otherwise."""
    yield from messages
    over.wait(WITHIN_S)


def code_of(call: Any) -> grpc.StatusCode | None:
    """How it ends."""
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode | None = call.code()
    return code


def test_calls_that_a_stop_cuts_off_have_ended_with_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC logged a traceback for each of them when the event loop ended at once."""

    def register(server: grpc.aio.Server) -> list[str]:
        mesh_pb2_grpc.add_EngineServicer_to_server(Silent(), server)
        return []

    def open_streams(port: int) -> tuple[grpc.Channel, list[Any]]:
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        calls = [mesh_pb2_grpc.EngineStub(channel).Control(side(over), metadata=METADATA) for _ in range(NUM_STREAMS)]
        calls.append(watch(channel))
        for call in calls:
            next(call)
        return channel, calls

    async def scenario() -> tuple[grpc.Channel, list[Any]]:
        async with grpc_server("127.0.0.1", 0, SECRET, register) as port:
            return await asyncio.to_thread(open_streams, port)

    over = threading.Event()
    channel, calls = asyncio.run(scenario())
    assert {code_of(call) for call in calls} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    over.set()
    channel.close()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.mesh
@pytest.mark.timeout(120)
def test_services_with_open_streams_end_at_sigterm_without_a_traceback(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")
    ports = ("--port", "0", "--grpc-port", "0")
    flags = ("--model", str(model), "--dtype", "float32", "--cpu-threads", "1", "--kv-cache-memory-bytes", str(8 << 20))
    # Less than the request takes.
    drain = ("--drain-timeout-s", "0.5")
    decode = mesh.start("decode", *flags, *drain, *ports, folder=tmp_path)
    kvcache = mesh.start("kvcache", *ports, "--arena-bytes", str(4 << 20), folder=tmp_path)
    services, over = [decode, kvcache], threading.Event()
    channels: list[grpc.Channel] = []
    try:
        calls = []
        for service in services:
            service.wait_ready()
            channels.append(grpc.insecure_channel(service.grpc))
            calls.append(watch(channels[-1]))
        # A proxy's streams, with a request under way.
        engine = mesh_pb2_grpc.EngineStub(channels[0])
        frame = pb.SubmitFrame(requests=[request_to_pb(LONG)])
        metadata = [*METADATA, (SESSION_METADATA_KEY, "of-a-test")]
        calls += [engine.Generate(side(over, frame), metadata=metadata), engine.Control(side(over), metadata=metadata)]
        for call in calls:
            next(call)
        with ThreadPoolExecutor(len(services)) as pool:
            codes = list(pool.map(lambda service: service.stop(), services))
        assert codes == [0, 0]
        assert None not in [code_of(call) for call in calls]
        for service in services:
            assert "Traceback" not in service.log, service.log
            assert "grpc._cython" not in service.log, service.log
    finally:
        over.set()
        for channel in channels:
            channel.close()
        for service in services:
            service.kill()


def watch(channel: grpc.Channel) -> Any:
    """The health service's endless stream."""
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), metadata=METADATA)
