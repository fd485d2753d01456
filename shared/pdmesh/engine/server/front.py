"""An engine's server once its core is ready: peers, gRPC, HTTP, serve, drain, close.

Importing it takes longer than a core needs to start, so that `service` imports it meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

import msgspec

from pdmesh.config import EngineConfig
from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.peers import PeerDirectory
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.kv_events_config import kv_events_config
from pdmesh.engine.server.admin_routes import make_admin_router
from pdmesh.engine.server.assembly import Engine, assemble
from pdmesh.engine.server.core_peers import CorePeers
from pdmesh.engine.server.errands import Errands
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.kv_event_publisher import KVEventPublisher
from pdmesh.engine.server.stats_log import log_stats
from pdmesh.errors import InternalError, MeshError
from pdmesh.lifecycle import Life, advertised_host
from pdmesh.openai.app import create_app
from pdmesh.openai.text import TextModel
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server, http_server

log = logging.getLogger(__name__)


async def serve_front(
    config: EngineConfig, life: Life, *, identity: Identity, secret: MeshSecret, core: CoreClient, text: TextModel
) -> None:
    """Serve what the core computes until told to stop."""
    core_peers = CorePeers(core)
    async with (
        contextlib.AsyncExitStack() as closing,
        _publisher(config) as publisher,
        PeerDirectory(
            identity.peer_id,
            secret,
            list(config.connector),
            core.ready.model_fingerprint,
            core.ready.layout_fingerprints,
            core_peers.attach,
            core_peers.detach,
            block_bytes=[core.ready.block_bytes],
            description=core.ready.description,
        ) as peers,
        _task_group() as tasks,
        Errands(tasks) as errands,
    ):
        pool = core.pool()
        closing.callback(pool.close)
        sums = PoolSums(pool, block_size=core.ready.block_size) if config.kv_checksums else None
        if sums is not None:
            closing.enter_context(sums)
        engine = assemble(
            config=config,
            identity=identity,
            secret=secret,
            core=core,
            pool=pool,
            core_peers=core_peers,
            peers=peers,
            sums=sums,
            tasks=errands,
            publisher=publisher,
        )
        app = create_app(generator=engine.generator, text=text, config=config, role="engine", registry=engine.registry)
        app.include_router(make_admin_router(config, engine.resets, publisher))
        async with (
            _background(tasks, engine, core, publisher, life),
            grpc_server(config.host, config.grpc_port, secret, engine.register, engine.generator.healthy) as grpc_port,
            http_server(app, config.host, config.port) as http_port,
        ):
            identity.address = f"{advertised_host(config)}:{grpc_port}"
            await engine.probe.first()
            if engine.probe.problem:
                life.progress(engine.probe.problem, 0.0)
                await engine.probe.works()
            if engine.tier is not None:
                await engine.tier.tried()
            log.info(
                "%s serves %s on HTTP port %d and gRPC port %d",
                identity.engine_id,
                identity.model_name,
                http_port,
                grpc_port,
            )
            life.ready(
                http_port=http_port,
                grpc_port=grpc_port,
                engine_id=identity.engine_id,
                backend_fallback=core.ready.backend_fallback,
                **_pairing_facts(core, config),
                **({} if publisher is None else {"kv_event_source": publisher.source()}),
            )
            await life.stopped()
            await engine.drain(config.drain_timeout_s, life)


def _pairing_facts(core: CoreClient, config: EngineConfig) -> dict[str, object]:
    """What decides with whom this engine can exchange KV, for the supervisor to compare."""
    ready = core.ready
    return {
        "model_fingerprint": ready.model_fingerprint,
        "backend": ready.backend,
        "dtype": ready.dtype,
        "quantization": ready.quantization,
        "kv_dtype": ready.kv_dtype,
        "block_size": ready.block_size,
        "layout": ",".join(ready.layout_fingerprints),
        "kv": msgspec.to_builtins(ready.description),
        "connectors": [name for name in config.connector if name in ready.connectors],
    }


@asynccontextmanager
async def _publisher(config: EngineConfig) -> AsyncIterator[KVEventPublisher | None]:
    """Publish KV events where they are wanted."""
    settings = kv_events_config(config)
    if settings is None:
        yield None
        return
    async with KVEventPublisher(settings, host=config.host) as publisher:
        yield publisher


@asynccontextmanager
async def _background(
    tasks: asyncio.TaskGroup, engine: Engine, core: CoreClient, publisher: KVEventPublisher | None, life: Life
) -> AsyncIterator[None]:
    """Run what an engine does besides answering calls."""
    parts: list[tuple[str, Coroutine[object, object, None]]] = [
        ("outputs", engine.outputs.run(core)),
        ("leases", engine.handoff.owner.run()),
        ("statistics", log_stats(engine.board)),
        ("core", _watch_core(core, engine, life)),
        ("probe", engine.probe.run()),
        ("heart", engine.heart.watch(engine.table, engine.core_given_up)),
    ]
    if engine.tier is not None:
        parts.append(("tier", engine.tier.run()))
    if publisher is not None:
        parts.append(("KV events' replay", publisher.run()))
    running = [tasks.create_task(_guard(name, part, life), name=name) for name, part in parts]
    try:
        yield
    finally:
        engine.expectations.close()
        for task in running:
            task.cancel()


async def _guard(name: str, part: Coroutine[object, object, None], life: Life) -> None:
    """A part that fails takes the service down: half an engine is worse than none."""
    try:
        await part
    except asyncio.CancelledError:
        # A task group takes no note of one that nobody asked for: something that the part waited for was cancelled.
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        log.exception("%s was cancelled", name)
        life.stop(InternalError(f"{name} failed: what it waited for was cancelled"))
    except MeshError as exc:
        life.stop(exc)
    except Exception as exc:
        log.exception("%s failed", name)
        life.stop(InternalError(f"{name} failed: {type(exc).__name__}: {exc}"))


async def _watch_core(core: CoreClient, engine: Engine, life: Life) -> None:
    what = await core.died()
    engine.core_died(str(what or "unknown cause"))
    life.stop(InternalError("the engine core died; see its log above"))


@asynccontextmanager
async def _task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose body's own error comes out as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
