"""The parts of an engine's server, put together once the core is ready; what they do together is in `Engine`."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

import grpc.aio
from prometheus_client import CollectorRegistry

from pdmesh.config import EngineConfig
from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import KVPool
from pdmesh.engine.core_client import CoreClient
from pdmesh.engine.server.attempts import Attempts
from pdmesh.engine.server.core_peers import CorePeers
from pdmesh.engine.server.damage import Damage
from pdmesh.engine.server.endings import Endings
from pdmesh.engine.server.expectations import Expectations
from pdmesh.engine.server.fetches import Fetches, Tasks
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.heart import Heart
from pdmesh.engine.server.identity import Identity, describe, pushes
from pdmesh.engine.server.kv_event_publisher import KVEventPublisher
from pdmesh.engine.server.kv_peers import KVPeers
from pdmesh.engine.server.kv_probe import KVProbe
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.local_generator import LocalGenerator
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.outputs import Outputs
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.engine.server.requests import RequestTable
from pdmesh.engine.server.returns import Returns
from pdmesh.engine.server.servicer import EngineServicer
from pdmesh.engine.server.sessions import Sessions
from pdmesh.engine.server.sources import Sources
from pdmesh.engine.server.submission import Submission
from pdmesh.engine.server.tier_client import TierClient
from pdmesh.engine.server.unread_offers import UnreadOffers
from pdmesh.errors import Draining, MeshError, PeerUnavailable
from pdmesh.lifecycle import Life
from pdmesh.protocol.offers import OfferTable
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine service's parts."""

    table: RequestTable
    board: LoadBoard
    offers: OfferTable
    handoff: Handoff
    endings: Endings
    outputs: Outputs
    servicer: EngineServicer
    expectations: Expectations
    generator: LocalGenerator
    tier: TierClient | None
    resets: PrefixCacheResets
    heart: Heart
    probe: KVProbe
    metrics: EngineMetrics
    registry: CollectorRegistry

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add all gRPC services to a server; returns their full names."""
        return [self.servicer.add_to(server), self.handoff.owner.add_to(server)]

    def core_died(self, what: str) -> None:
        """Fail everything that ran; nothing new is taken."""
        self.generator.core_alive = False
        self.board.core_died()
        error = PeerUnavailable(f"the engine core died ({what}); the request may be repeated")
        self.fail_all(error)
        self.resets.fail(error)
        self.handoff.core_died()

    def core_given_up(self, error: PeerUnavailable) -> None:
        """Fail what runs: the core stands still. What comes is refused until it is heard again."""
        self.metrics.core_silences.inc()
        self.fail_all(error)

    def fail_all(self, error: MeshError) -> None:
        """End all running requests with an error."""
        for running in self.table:
            self.endings.fail(running, error)

    async def drain(self, timeout_s: float, life: Life) -> None:
        """Take nothing new; let requests finish and offers be fetched within `timeout_s`, then end what is left.

        Offers are kept no longer than until `life` says that nobody is left to fetch them.
        """
        self.board.drain(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await self.table.emptied()
                if self.offers.num_open:
                    life.keeping()
                    await _first_of(self._offers_ended(), life.forsaken())
        except TimeoutError:
            log.warning(
                "not drained within %.1f s: ending %d requests and %d offers",
                timeout_s,
                len(self.table),
                self.offers.num_open,
            )
        self.fail_all(Draining("the engine shut down before the request ended"))
        if self.offers.num_open:
            log.info("ending %d offers", self.offers.num_open)
        self.handoff.release_all()
        self.servicer.close()

    async def _offers_ended(self) -> None:
        while self.offers.num_open:
            # An offer's end is a change of the load.
            await self.board.newer(self.board.version)


async def _first_of(*waits: Coroutine[object, object, None]) -> None:
    """Return when one of them has, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


def assemble(
    *,
    config: EngineConfig,
    identity: Identity,
    secret: MeshSecret,
    core: CoreClient,
    pool: KVPool,
    core_peers: CorePeers,
    peers: PeerDirectory,
    sums: PoolSums | None,
    tasks: Tasks,
    publisher: KVEventPublisher | None,
) -> Engine:
    """Make all parts, each with what it needs of the others. What is to be closed (`pool`, `peers`, `sums`, `publisher`) stays
    the caller's.
    """
    ready, registry, offers, table = core.ready, CollectorRegistry(), OfferTable(), RequestTable()
    board = LoadBoard(identity.epoch, offers)
    metrics = EngineMetrics(registry, identity, ready, board, peers.fallbacks, peers.regained)
    handoff = Handoff(
        config=config,
        identity=identity,
        ready=ready,
        secret=secret,
        core=core,
        core_peers=core_peers,
        pool=pool,
        offers=offers,
        board=board,
        metrics=metrics,
        sums=sums,
    )
    resets = PrefixCacheResets(core, offers.note_reset)
    damage = Damage(sums=sums, resets=resets, tasks=tasks, metrics=metrics, block_size=ready.block_size)
    handoff.owner.on_corrupt, handoff.on_reused = damage.suspect, damage.reused
    tier = None
    if config.kvcache and config.enable_prefix_caching and not ready.keeps_history:
        log.warning("kvcache is not used: it keeps whole prompts, and this model's sliding windows do not")
    elif config.kvcache and config.enable_prefix_caching:
        tier = TierClient(
            address=config.kvcache,
            lookup_timeout_s=config.kvcache_lookup_timeout_s,
            identity=identity,
            ready=ready,
            secret=secret,
            peers=peers,
            metrics=metrics,
            sums=sums,
            is_whole=damage.is_whole,
        )
    heart = Heart(core, timeout_s=config.core_timeout_s)
    info = describe(identity, ready, config)
    probe = KVProbe(
        identity=identity,
        ready=ready,
        names=list(config.connector),
        core_peers=core_peers,
        owner=handoff.owner,
        info=info,
        metrics=metrics,
    )
    fetches = Fetches(peers=peers, tasks=tasks, metrics=metrics)
    endings = Endings(table=table, core=core, handoff=handoff, fetches=fetches, metrics=metrics)
    allowed = KVPeers(config.kv_peers, on_loopback=config.on_loopback)
    sources = Sources(
        config=config,
        ready=ready,
        secret=secret,
        peers=peers,
        allowed=allowed,
        attempts=Attempts(identity=identity, peers=peers, fetches=fetches),
        fetches=fetches,
        tier=tier,
        metrics=metrics,
        resets=resets,
    )
    expectations = Expectations(
        identity=identity,
        ready=ready,
        secret=secret,
        core=core,
        peers=peers,
        owner=handoff.owner,
        tasks=tasks,
        metrics=metrics,
        pool=pool if config.kv_checksums else None,
        is_enabled=pushes(ready, config),
    )
    submission = Submission(
        config=config,
        ready=ready,
        core=core,
        table=table,
        board=board,
        handoff=handoff,
        sources=sources,
        endings=endings,
        expectations=expectations,
        tasks=tasks,
        metrics=metrics,
        heart=heart,
    )
    outputs = Outputs(
        table=table,
        board=board,
        handoff=handoff,
        fetches=fetches,
        endings=endings,
        expectations=expectations,
        core_peers=core_peers,
        tier=tier,
        metrics=metrics,
        resets=resets,
        publisher=publisher,
        heart=heart,
        probe=probe,
        returns=Returns(table=table, core=core, sources=sources, endings=endings, tasks=tasks, metrics=metrics),
    )
    submission.on_agreed = outputs.replay
    sessions = Sessions(table=table, endings=endings, handoff=handoff, expectations=expectations, metrics=metrics)
    return Engine(
        table=table,
        board=board,
        offers=offers,
        handoff=handoff,
        endings=endings,
        outputs=outputs,
        servicer=EngineServicer(
            info=info,
            submission=submission,
            sessions=sessions,
            handoff=handoff,
            expectations=expectations,
            board=board,
            metrics=metrics,
        ),
        expectations=expectations,
        generator=LocalGenerator(
            identity=identity,
            root=config.model,
            ready=ready,
            submission=submission,
            endings=endings,
            handoff=handoff,
            board=board,
            takes_params=config.on_loopback or bool(config.api_key),
            heart=heart,
            probe=probe,
            unread=UnreadOffers(identity=identity, secret=secret, allowed=allowed, peers=peers, tasks=tasks),
        ),
        tier=tier,
        resets=resets,
        heart=heart,
        probe=probe,
        metrics=metrics,
        registry=registry,
    )
