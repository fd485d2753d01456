"""Takes blocks that engines have computed into the arenas: a bounded queue of offers to copy, and workers that pull.

Nothing is pinned at the engine. It goes on at once and may reuse a block at any time; the generation words tell, and what is
stale is dropped. Blocks become visible when they are copied and checked, never before.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from pdmesh.connector.active import UNKNOWN, PullEnd
from pdmesh.connector.peers import Peer
from pdmesh.errors import MeshError
from pdmesh_kvcache.arena import BlockKind
from pdmesh_kvcache.arenas import ArenaSet
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.host import ArenaHost
from pdmesh_kvcache.index import Reservation
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.seldom import Seldom
from pdmesh_kvcache.writer import Writer

log = logging.getLogger(__name__)

# A pull that fails takes its whole part with it, and a part that arrived can be hit while the rest is on its way.
PART_BYTES = 16 << 20


class StoreDrop(StrEnum):
    """Why a block was not kept."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    NO_ARENA = "no_arena"
    """Other layouts have all the memory, or a block is larger than the arena."""
    FULL = "full"
    """Everything in the arena is pinned or arriving."""
    OWNER_GONE = "owner_gone"
    STALE = "stale"
    CORRUPT = "corrupt"
    """What arrived is not what the engine has summed."""
    TIMEOUT = "timeout"
    PULL_FAILED = "pull_failed"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in an engine's pool."""

    block_id: int
    generation: int
    checksum: int | None = None
    """None: the engine did not tell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offering:
    """One engine's blocks, to be copied."""

    kind: BlockKind
    owner_id: str
    owner_address: str
    blocks: dict[bytes, StoredBlock]
    """By key, in the order of the chain."""
    block_bytes: int


class Stores:
    """The queue and its workers. `run` works until it is cancelled."""

    def __init__(self, config: KVCacheConfig, *, arenas: ArenaSet, writer: Writer, metrics: Metrics) -> None:
        self._config = config
        self._arenas = arenas
        self._writer = writer
        self._metrics = metrics
        self._queue: deque[Offering] = deque()
        self._num_running = 0
        # Owners that a worker is trying to reach: one that does not answer must not keep all workers.
        self._reaching: set[str] = set()
        self._draining = False
        self._corrupt = Seldom()
        self._changed = asyncio.Condition()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def submit(self, store: Offering) -> int:
        """Queue what is not held yet; returns the number of blocks that will be pulled. Never waits for a pull."""
        host = self._arenas.get(store.kind)
        wanted = {key: block for key, block in store.blocks.items() if host is None or not host.index.is_known(key)}
        if not wanted:
            return 0
        if self._draining or len(self._queue) >= self._config.max_queued_stores:
            self._drop(StoreDrop.DRAINING if self._draining else StoreDrop.QUEUE_FULL, len(wanted))
            return 0
        self._queue.append(
            Offering(
                kind=store.kind,
                owner_id=store.owner_id,
                owner_address=store.owner_address,
                blocks=wanted,
                block_bytes=store.block_bytes,
            )
        )
        self._metrics.blocks_accepted.inc(len(wanted))
        async with self._changed:
            self._changed.notify_all()
        return len(wanted)

    async def run(self) -> None:
        """Pull what is queued, several stores at a time."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._config.num_store_workers):
                group.create_task(self._work())

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, drop what waits, and let what runs finish within `timeout_s`."""
        self._draining = True
        self._drop(StoreDrop.DRAINING, sum(len(store.blocks) for store in self._queue))
        self._queue.clear()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._num_running == 0)
        except TimeoutError:
            log.warning("%d stores did not end in time and are cut off", self._num_running)

    async def _work(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._next() is not None)
                store = self._take()
                self._num_running += 1
            try:
                await self._carry_out(store)
            except Exception:  # a worker's top: one store's failure is not the next one's
                log.exception("a store of %s failed", store.owner_id)
                self._metrics.errors.labels("store").inc()
            finally:
                self._num_running -= 1
                async with self._changed:
                    self._changed.notify_all()

    def _next(self) -> Offering | None:
        """Return the first store whose owner nobody is trying to reach."""
        return next((store for store in self._queue if store.owner_id not in self._reaching), None)

    def _take(self) -> Offering:
        store = self._next()
        assert store is not None, "it was there when the worker woke"
        self._queue.remove(store)
        self._reaching.add(store.owner_id)
        return store

    async def _carry_out(self, store: Offering) -> None:
        started_s = time.monotonic()
        with ExitStack() as using:
            async with self._reached(store.owner_id):
                host = await self._arenas.open(store.kind, store.block_bytes)
                if host is None:
                    self._drop(StoreDrop.NO_ARENA, len(store.blocks))
                    return
                using.enter_context(host.in_use())
                peer = await self._reach(store, host)
            if peer is None:
                return
            await self._fill(store, host, peer, started_s + self._config.store_timeout_s)
        self._metrics.store_seconds.observe(time.monotonic() - started_s)

    @asynccontextmanager
    async def _reached(self, owner_id: str) -> AsyncIterator[None]:
        """Leave an owner's other stores to other workers afterwards."""
        try:
            yield
        finally:
            self._reaching.discard(owner_id)
            async with self._changed:
                self._changed.notify_all()

    async def _reach(self, store: Offering, host: ArenaHost) -> Peer | None:
        """Return the attached owner; None when there is none, and then its other stores go too."""
        try:
            return await host.puller.reach(store.owner_id, store.owner_address, self._config.store_timeout_s)
        except MeshError as exc:
            log.warning("blocks of %s cannot be copied: %s", store.owner_id, exc.message)
            self._metrics.errors.labels("reach").inc()
        gone = [store, *(each for each in self._queue if _same_owner(each, store))]
        self._queue = deque(each for each in self._queue if not _same_owner(each, store))
        self._drop(StoreDrop.OWNER_GONE, sum(len(each.blocks) for each in gone))
        return None

    async def _fill(self, store: Offering, host: ArenaHost, peer: Peer, deadline_s: float) -> None:
        """Reserve slots for the whole chain, so that it does not evict itself, and fill them part by part."""
        # Another engine may have brought some meanwhile.
        wanted = [key for key in store.blocks if not host.index.is_known(key)]
        rest = host.index.reserve(wanted)
        self._drop(StoreDrop.FULL, len(wanted) - len(rest))
        most = max(1, PART_BYTES // store.block_bytes)
        while rest:
            part = rest[:most]
            try:
                reason = await self._pull(store, host, peer, part, deadline_s - time.monotonic())
            except Exception:
                # It never began.
                host.index.abort(rest)
                raise
            if not reason:
                host.index.commit(part)
                self._metrics.blocks_committed.inc(len(part))
                self._writer.submit(host.arena, [each.key for each in part])
                rest = rest[most:]
            elif reason in (PullEnd.STALE, PullEnd.CORRUPT) and len(part) > 1:
                # An engine reuses the ends of chains first: what comes before the bad block is still worth having.
                most = len(part) // 2
            else:
                host.index.abort(rest)
                self._give_up(store, host, reason, len(rest))
                return

    async def _pull(
        self, store: Offering, host: ArenaHost, peer: Peer, part: list[Reservation], remaining_s: float
    ) -> str:
        if remaining_s <= 0:
            return PullEnd.TIMEOUT
        blocks = [store.blocks[each.key] for each in part]
        checksums = [block.checksum or UNKNOWN for block in blocks] if host.arena.sums is not None else []
        result = await host.puller.pull(
            peer,
            [block.block_id for block in blocks],
            [block.generation for block in blocks],
            [each.slot for each in part],
            remaining_s,
            checksums=checksums,
            on_rerouted=lambda connector: self._metrics.pulls_rerouted.labels(connector).inc(),
        )
        self._metrics.pulled_bytes.inc(result.num_bytes)
        if not result.reason:
            slots = [each.slot for each in part]
            if UNKNOWN not in checksums:
                host.arena.note_sums(slots, checksums)
            else:
                await asyncio.to_thread(host.arena.note_sums, slots, [])
        return result.reason

    def _give_up(self, store: Offering, host: ArenaHost, reason: str, num_blocks: int) -> None:
        drops = {
            PullEnd.STALE: StoreDrop.STALE,
            PullEnd.CORRUPT: StoreDrop.CORRUPT,
            PullEnd.TIMEOUT: StoreDrop.TIMEOUT,
            PullEnd.PEER_LOST: StoreDrop.OWNER_GONE,
        }
        drop = next((drop for end, drop in drops.items() if end == reason), StoreDrop.PULL_FAILED)
        self._drop(drop, num_blocks)
        if drop is StoreDrop.OWNER_GONE:
            host.puller.peers.forget(store.owner_id)
        elif drop is not StoreDrop.STALE:
            self._metrics.errors.labels("pull").inc()
            if drop is StoreDrop.CORRUPT and not self._corrupt.due(reason):
                return
            log.warning("%d blocks of %s were not copied: %s", num_blocks, store.owner_id, reason)

    def _drop(self, reason: StoreDrop, num: int) -> None:
        if num:
            self._metrics.blocks_dropped.labels(reason).inc(num)


def _same_owner(one: Offering, other: Offering) -> bool:
    return (one.owner_id, one.owner_address, one.kind) == (other.owner_id, other.owner_address, other.kind)
