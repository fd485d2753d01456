"""The kvcache service's life: Valkey, arenas, workers, gRPC and HTTP ports, until it is told to stop."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdmesh.connector.options import unused_options
from pdmesh.errors import ConfigError
from pdmesh.lifecycle import Life, check_ports
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server, http_server
from pdmesh_kvcache.arenas import ArenaSet
from pdmesh_kvcache.backing import Backing
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.lookups import Lookups
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.rpc import TierPeer, TierServicer
from pdmesh_kvcache.stores import Stores
from pdmesh_kvcache.valkey import Valkey
from pdmesh_kvcache.writer import Writer

log = logging.getLogger(__name__)

# Pulls take milliseconds; what takes longer at shutdown is not worth waiting for.
STORE_DRAIN_S = 2.0


async def check(config: KVCacheConfig) -> None:
    """Raise ConfigError for what cannot work, as far as milliseconds tell; a Valkey that must be there is asked."""
    _load_secret(config)
    for line in unused_options(config.connector_options, config.connector):
        log.info("%s", line)
    check_ports(config.host, port=config.port, grpc_port=config.grpc_port)
    if not config.valkey:
        return
    async with Valkey(config) as valkey:
        if config.valkey_required:
            await valkey.require()


async def serve(config: KVCacheConfig, life: Life) -> None:
    """Run the service until `life` stops. Raises ConfigError when it cannot start as configured."""
    secret = _load_secret(config)
    engine_id = config.engine_id or f"kvcache-{secrets.token_hex(2)}"
    metrics = Metrics(CollectorRegistry())
    async with AsyncExitStack() as stack:
        valkey = await stack.enter_async_context(Valkey(config)) if config.valkey else None
        backing = Backing(valkey, metrics)
        await backing.check()
        arenas = await stack.enter_async_context(ArenaSet(config, engine_id=engine_id, secret=secret, metrics=metrics))
        writer = Writer(config, backing=backing, secret=secret, metrics=metrics)
        stores = Stores(config, arenas=arenas, writer=writer, metrics=metrics)
        lookups = Lookups(config, arenas=arenas, backing=backing, writer=writer, secret=secret, metrics=metrics)
        _watch(metrics, arenas, stores, writer)
        await stack.enter_async_context(_running(backing.run(), writer.run(), stores.run()))
        stack.push_async_callback(_drain, config, stores, writer)
        servicer = TierServicer(config, arenas=arenas, backing=backing, lookups=lookups, stores=stores)
        grpc_port = await stack.enter_async_context(
            grpc_server(
                config.host, config.grpc_port, secret, lambda server: _register(server, servicer, arenas, metrics)
            )
        )
        port = await stack.enter_async_context(
            http_server(_http_app(metrics, backing, arenas), config.host, config.port)
        )
        log.info("%s serves engines on port %d, metrics on port %d", engine_id, grpc_port, port)
        life.ready(http_port=port, grpc_port=grpc_port, engine_id=engine_id)
        await life.stopped()


def _load_secret(config: KVCacheConfig) -> MeshSecret:
    """Raise ConfigError where stored blocks could be anyone's: a certificate says who connects, not who wrote a value."""
    secret = MeshSecret.load(config)
    if config.valkey and not secret.is_secret:
        raise ConfigError(
            "valkey needs the mesh secret beside tls-cert: stored blocks carry a MAC that only services of this mesh can make; "
            "set --secret-file or PDMESH_SECRET"
        )
    return secret


def _register(server: grpc.aio.Server, servicer: TierServicer, arenas: ArenaSet, metrics: Metrics) -> list[str]:
    mesh_pb2_grpc.add_KVCacheServicer_to_server(servicer, server)
    mesh_pb2_grpc.add_KVPeerServicer_to_server(TierPeer(arenas, metrics), server)
    services = pb.DESCRIPTOR.services_by_name
    return [services["KVCache"].full_name, services["KVPeer"].full_name]


@asynccontextmanager
async def _running(*lives: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run these as long as the service; one that fails ends the service."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(life) for life in lives]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _drain(config: KVCacheConfig, stores: Stores, writer: Writer) -> None:
    started_s = time.monotonic()
    await stores.drain(min(STORE_DRAIN_S, config.drain_timeout_s))
    await writer.flush(max(0.0, config.drain_timeout_s - (time.monotonic() - started_s)))


def _watch(metrics: Metrics, arenas: ArenaSet, stores: Stores, writer: Writer) -> None:
    """Have gauges read the live objects at each scrape."""
    metrics.layouts.set_function(lambda: len(arenas.hosts))
    metrics.slots.set_function(lambda: sum(host.index.num_slots for host in arenas.hosts))
    metrics.slots_used.set_function(lambda: sum(host.index.num_used for host in arenas.hosts))
    metrics.slots_pinned.set_function(lambda: sum(host.index.num_pinned for host in arenas.hosts))
    metrics.slot_bytes.set_function(lambda: sum(host.arena.total_bytes for host in arenas.hosts))
    metrics.open_lookups.set_function(lambda: arenas.num_open_lookups)
    metrics.queued_stores.set_function(lambda: stores.num_queued)
    metrics.queued_writes.set_function(lambda: writer.num_queued)


def _http_app(metrics: Metrics, backing: Backing, arenas: ArenaSet) -> Starlette:
    async def health(request: Request) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "backing_up": backing.up,
                "backing_writable": backing.writable,
                "layouts": len(arenas.hosts),
            }
        )

    async def show_metrics(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/health", health), Route("/metrics", show_metrics)])
