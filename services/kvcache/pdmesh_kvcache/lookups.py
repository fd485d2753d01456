"""Answers an engine's question "how much of this prompt do you hold": a leading run of its block keys, pinned.

First what the arena holds, then, within the time the engine gives, what Redis or Valkey holds (`promotion`). What is on its way
already, by a store or by another lookup, is waited for.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum

from pdmesh.errors import DeadlineExceeded, InvalidRequest
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import BlockKind
from pdmesh_kvcache.arenas import ArenaSet
from pdmesh_kvcache.backing import Backing
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.host import ArenaHost
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.promotion import Cut, Promotion
from pdmesh_kvcache.writer import Writer

# A lookup that is neither sealed nor ended by then was cut off in the middle; its pins go.
SEAL_GRACE_S = 5.0


class HitSource(StrEnum):
    ARENA = "arena"
    BACKING = "backing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One lookup."""

    transfer_id: str
    consumer_id: str
    kind: BlockKind
    group: int
    keys: list[bytes]
    remaining_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A leading run of hits; its slots are pinned until the consumer's transfer ends."""

    blocks: GroupBlocks
    num_arena: int = 0
    num_backing: int = 0
    peer_id: str = ""


@dataclass(slots=True)
class _Search:
    """A lookup under way."""

    query: Query
    deadline_s: float
    host: ArenaHost | None = None
    slots: list[int] = field(default_factory=list)
    num: dict[HitSource, int] = field(default_factory=lambda: dict.fromkeys(HitSource, 0))

    @property
    def remaining_s(self) -> float:
        return self.deadline_s - time.monotonic()

    @property
    def rest(self) -> list[bytes]:
        """Keys not found yet."""
        return self.query.keys[len(self.slots) :]

    def pin(self, host: ArenaHost, keys: list[bytes], source: HitSource) -> None:
        self.slots += host.pin_lookup(self.query.transfer_id, keys)
        self.num[source] += len(keys)


class Lookups:
    """The lookup operation over all arenas."""

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        arenas: ArenaSet,
        backing: Backing,
        writer: Writer,
        secret: MeshSecret,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._arenas = arenas
        self._backing = backing
        self._metrics = metrics
        self._promotion = Promotion(arenas=arenas, backing=backing, writer=writer, secret=secret, metrics=metrics)

    async def find(self, query: Query) -> Found:
        """Find and pin the longest run of hits from the first key on. Raises InvalidRequest for a reused transfer id."""
        started_s = time.monotonic()
        self._metrics.lookups.inc()
        self._metrics.lookup_blocks.inc(len(query.keys))
        if self._arenas.num_open_lookups >= self._config.max_open_lookups:
            self._metrics.lookups_cut.labels(Cut.OVERLOADED).inc()
            return Found(blocks=_no_blocks(query.group))
        search = _Search(query, deadline_s=started_s + query.remaining_s)
        with ExitStack() as using:
            try:
                await self._search(search, using)
                found = self._sealed(search)
            except DeadlineExceeded:
                # This service stood still for longer than the engine waits: it has given up, and so has the offer.
                self._metrics.lookups_cut.labels(Cut.DEADLINE).inc()
                self._let_go(search)
                return Found(blocks=_no_blocks(query.group))
            except BaseException:
                self._let_go(search)
                raise
        for source, num in search.num.items():
            self._metrics.hits.labels(source).inc(num)
        self._metrics.lookup_seconds.observe(time.monotonic() - started_s)
        return found

    async def _search(self, search: _Search, using: ExitStack) -> None:
        while search.rest:
            if search.host is None and (host := self._arenas.get(search.query.kind)) is not None:
                self._settle_in(search, host, using)
            if search.host is not None and (held := search.host.index.num_leading(search.rest)):
                search.pin(search.host, search.rest[:held], HitSource.ARENA)
            elif not await self._bring(search, using):
                break

    async def _bring(self, search: _Search, using: ExitStack) -> bool:
        """Have the next key brought into the arena, by whoever is at it; False when the run ends here."""
        key, host = search.rest[0], search.host
        if host is not None and host.index.is_filling(key):
            settled = asyncio.Event()
            host.index.watch(key, settled.set)
            return await self._wait(search, settled)
        flight = self._promotion.flight_of(search.query.kind, key)
        if flight is not None:
            return await self._wait(search, flight.ended) and flight.missing != key
        return self._backing.up and await self._promote(search, using)

    async def _wait(self, search: _Search, event: asyncio.Event) -> bool:
        """Wait within the lookup's time; False, and counted, when that is over first."""
        try:
            async with asyncio.timeout(max(search.remaining_s, 0)):
                await event.wait()
        except TimeoutError:
            self._metrics.lookups_cut.labels(Cut.FILLING).inc()
            return False
        return True

    def _settle_in(self, search: _Search, host: ArenaHost, using: ExitStack) -> None:
        """Look in `host` from now on, and keep it alive meanwhile."""
        using.enter_context(host.in_use())
        try:
            host.open_lookup(search.query.transfer_id, max(search.remaining_s, 0) + SEAL_GRACE_S)
        except ValueError as exc:
            raise InvalidRequest(
                f"transfer_id {search.query.transfer_id} was used before", param="transfer_id"
            ) from exc
        search.host = host

    async def _promote(self, search: _Search, using: ExitStack) -> bool:
        """Bring the next batch of the rest from Redis or Valkey into slots and pin it; False when the run ends here."""
        kind, keys = search.query.kind, self._next_batch(search)
        with self._promotion.flight(kind, keys) as flight:
            # Until the size is known, a block may fill all there is.
            arena = None if search.host is None else search.host.arena
            most_bytes = self._config.arena_bytes if arena is None else arena.pool.shape.block_bytes
            values = await self._promotion.fetch(kind, keys, most_bytes, search.remaining_s, flight)
            if not values:
                return False
            if search.host is None:
                host = await self._promotion.open_arena(kind, keys[0], values[0])
                if host is None:
                    return False
                self._settle_in(search, host, using)
            assert search.host is not None, "it was there or has been made"
            num_held = await self._promotion.keep(search.host, keys, values)
        search.pin(search.host, keys[:num_held], HitSource.BACKING)
        if num_held < len(values):
            # A store may have begun to bring the next one meanwhile.
            return search.host.index.is_filling(keys[num_held])
        return num_held == len(keys)

    def _next_batch(self, search: _Search) -> list[bytes]:
        """Keys to fetch in one round trip: those before the next one that is here or on its way; one until the size is known."""
        if search.host is None:
            return search.rest[:1]
        most = max(1, self._config.valkey_batch_bytes // search.host.arena.pool.shape.block_bytes)
        batch, index, kind = search.rest[:most], search.host.index, search.query.kind
        known = (
            at
            for at, key in enumerate(batch)
            if index.is_known(key) or self._promotion.flight_of(kind, key) is not None
        )
        return batch[: next(known, len(batch))]

    def _let_go(self, search: _Search) -> None:
        if search.host is not None:
            search.host.end_lookup(search.query.transfer_id)

    def _sealed(self, search: _Search) -> Found:
        query, host = search.query, search.host
        if host is None:
            return Found(blocks=_no_blocks(query.group))
        if not search.slots:
            host.end_lookup(query.transfer_id)
            return Found(blocks=_no_blocks(query.group), peer_id=host.arena.peer_id)
        return Found(
            blocks=host.seal_lookup(query.transfer_id, query.consumer_id, query.group, search.slots),
            num_arena=search.num[HitSource.ARENA],
            num_backing=search.num[HitSource.BACKING],
            peer_id=host.arena.peer_id,
        )


def _no_blocks(group: int) -> GroupBlocks:
    return GroupBlocks(group=group, block_ids=[], generations=[])
