"""What a service is reached by: its HTTP and gRPC servers, as contexts that yield the bound port."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdmesh.auth import AuthInterceptor
from pdmesh.channels import add_port
from pdmesh.config import LOOPBACK_HOSTS
from pdmesh.decoding import DecodeInterceptor
from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.http_server import serving
from pdmesh.lifecycle import bind, listen, port_in_use
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

# On one connection, of anyone who can reach the port: twice the pushes that a decode may expect of a prefill, a stream each.
MAX_STREAMS = 2048
STOP_GRACE_S = 1.0
# Beyond the longest that a stream of ours takes to settle its last write.
CALLS_END_S = 2.0
CALL_COROUTINES = ("_schedule_rpc_coro", "_handle_exceptions")
"""In which gRPC runs each call to a server."""

_running: Counter[asyncio.AbstractEventLoop] = Counter()
"""How many servers run on each event loop; in tests they may be several."""


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
    server = grpc.aio.server(
        options=[*GRPC_OPTIONS, ("grpc.max_concurrent_streams", MAX_STREAMS)],
        interceptors=[AuthInterceptor(secret), DecodeInterceptor()],
    )
    names = register(server)
    health_servicer = _AskingHealth(healthy)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    bind(host, port, "grpc_port").close()
    try:
        bound = add_port(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secret)
    except RuntimeError as exc:
        raise port_in_use(host, port, "grpc_port") from exc
    if secret.certificates is None and host not in LOOPBACK_HOSTS:
        log.warning(
            "gRPC on %s is not encrypted: whoever can listen in reads prompts, KV and the credential with which anyone can call; "
            "set tls-cert, tls-key and tls-ca unless the network is the mesh's own",
            host,
        )
    await server.start()
    _running[asyncio.get_running_loop()] += 1
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    try:
        yield bound
    finally:
        await health_servicer.enter_graceful_shutdown()
        await server.stop(STOP_GRACE_S)
        loop = asyncio.get_running_loop()
        _running[loop] -= 1
        if not _running[loop]:
            del _running[loop]
            await _calls_ended()


async def _calls_ended() -> None:
    """Wait for calls that were cut off by the stop: gRPC only tells them to end, and logs a traceback for each that is met by
    the end of the event loop.
    """
    calls = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") in CALL_COROUTINES]
    if not calls:
        return
    _, late = await asyncio.wait(calls, timeout=CALLS_END_S)
    if late:
        log.warning("%d calls have not ended %g s after the server was stopped", len(late), CALLS_END_S)
