"""What a service is reached by: its HTTP and gRPC servers, as contexts that yield the bound port."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdmesh.auth import AuthInterceptor
from pdmesh.channels import add_port
from pdmesh.decoding import DecodeInterceptor
from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.http_server import serving
from pdmesh.lifecycle import bind, listen, port_in_use
from pdmesh.security import MeshSecret


@asynccontextmanager
async def http_server(app: Any, host: str, port: int) -> AsyncIterator[int]:
    """Serve an ASGI app; yields the bound port. Raises ConfigError when the port is taken. Closing waits for no client."""
    async with serving(app, listen(host, port)) as server:
        yield server.port


class _AskingHealth(health.aio.HealthServicer):  # type: ignore[name-defined, misc]
    """gRPC's health service, which asks when it is asked: a service at rest need not watch itself."""

    def __init__(self, healthy: Callable[[], Awaitable[bool]] | None) -> None:
        super().__init__()
        self._healthy = healthy

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        """Answer NOT_SERVING also while the service says that it is not healthy."""
        known: health_pb2.HealthCheckResponse = await super().Check(request, context)
        if self._healthy is not None and not await self._healthy():
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return known


@asynccontextmanager
async def grpc_server(
    host: str,
    port: int,
    secret: MeshSecret,
    register: Callable[[grpc.aio.Server], list[str]],
    healthy: Callable[[], Awaitable[bool]] | None = None,
) -> AsyncIterator[int]:
    """Serve gRPC with health and reflection behind the mesh secret; yields the bound port.

    `register` adds the servicers and returns their full names. `healthy` is asked by each health check. Raises
    ConfigError when the port is taken.
    """
    server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=[AuthInterceptor(secret), DecodeInterceptor()])
    names = register(server)
    health_servicer = _AskingHealth(healthy)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    bind(host, port, "grpc_port").close()
    try:
        bound = add_port(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secret)
    except RuntimeError as exc:
        raise port_in_use(host, port, "grpc_port") from exc
    await server.start()
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(grace=1.0)
