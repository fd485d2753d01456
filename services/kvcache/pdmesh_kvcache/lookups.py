"""Answers an engine's question "how much of this prompt do you hold": a leading run of its block keys, pinned.

First what the arena holds, then, within the time the engine gives, what Redis or Valkey holds: fetched in batches, checked,
copied into slots, and from then on held like any other block.
"""

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from pdmesh.errors import DeadlineExceeded, InvalidRequest, PeerError
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena, BlockKind
from pdmesh_kvcache.arenas import ArenaSet
from pdmesh_kvcache.backing import Backing
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.host import ArenaHost, lookup_pin
from pdmesh_kvcache.index import Reservation
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.value import ValueRejected, decode, storage_key
from pdmesh_kvcache.writer import Writer

log = logging.getLogger(__name__)

# A lookup that is neither sealed nor ended by then was cut off in the middle; its pins go.
SEAL_GRACE_S = 5.0


class HitSource(StrEnum):
    ARENA = "arena"
    BACKING = "backing"


class Cut(StrEnum):
    """Why a lookup may have found less than there was."""

    DEADLINE = "deadline"
    BACKING = "backing"
    """Redis or Valkey failed."""
    FULL = "full"
    """No slot could be freed for what was found there."""
    OVERLOADED = "overloaded"


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
        self.slots += host.index.pin(lookup_pin(self.query.transfer_id), keys)
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
        self._writer = writer
        self._secret = secret
        self._metrics = metrics

    async def find(self, query: Query) -> Found:
        """Find and pin the longest run of hits from the first key on. Raises InvalidRequest for a reused transfer id."""
        started_s = time.monotonic()
        self._metrics.lookups.inc()
        self._metrics.lookup_blocks.inc(len(query.keys))
        if self._arenas.num_open_lookups >= self._config.max_open_lookups:
            self._cut(Cut.OVERLOADED)
            return Found(blocks=_no_blocks(query.group))
        search = _Search(query, deadline_s=started_s + query.remaining_s)
        with ExitStack() as using:
            try:
                await self._search(search, using)
                found = self._sealed(search)
            except BaseException:
                if search.host is not None:
                    search.host.end_lookup(query.transfer_id)
                raise
        for source, num in search.num.items():
            self._metrics.hits.labels(source).inc(num)
        self._metrics.lookup_seconds.observe(time.monotonic() - started_s)
        return found

    async def _search(self, search: _Search, using: ExitStack) -> None:
        host = self._arenas.get(search.query.kind)
        if host is not None:
            self._settle_in(search, host, using)
        while search.rest:
            if search.host is not None and (held := search.host.index.num_leading(search.rest)):
                search.pin(search.host, search.rest[:held], HitSource.ARENA)
            elif not await self._promote(search, using):
                break

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
        if not self._backing.up:
            return False
        layout = search.query.kind.layout_fingerprint
        keys = self._next_batch(search)
        try:
            if search.remaining_s <= 0:
                raise DeadlineExceeded("the lookup's time was over")
            fetched = await self._backing.fetch([storage_key(layout, key) for key in keys], search.remaining_s)
        except DeadlineExceeded:
            self._cut(Cut.DEADLINE)
            return False
        except PeerError:
            self._cut(Cut.BACKING)
            return False
        values = _leading(fetched)
        if not values or not await self._has_host(search, using, keys[0], values[0]):
            return False
        assert search.host is not None, "a host was found or made"
        num_kept = await self._keep(search.host, keys[: len(values)], values)
        num_held = search.host.index.num_leading(keys[:num_kept])
        search.pin(search.host, keys[:num_held], HitSource.BACKING)
        return num_held == len(keys)

    def _next_batch(self, search: _Search) -> list[bytes]:
        """Keys to fetch in one round trip: those before the next one that the arena holds; one until the size is known."""
        if search.host is None:
            return search.rest[:1]
        most = max(1, self._config.valkey_batch_bytes // search.host.arena.pool.shape.block_bytes)
        batch = search.rest[:most]
        held = (at for at, key in enumerate(batch) if search.host.index.slot_of(key) is not None)
        return batch[: next(held, len(batch))]

    async def _has_host(self, search: _Search, using: ExitStack, key: bytes, value: bytes) -> bool:
        """Make the arena when the first value of a layout shows how large its blocks are."""
        if search.host is not None:
            return True
        kind = search.query.kind
        try:
            block_bytes = len(decode(self._secret, kind.layout_fingerprint, key, value))
        except ValueRejected as exc:
            self._reject(kind, key, exc)
            return False
        host = await self._arenas.open(kind, block_bytes)
        if host is None:
            self._cut(Cut.FULL)
            return False
        self._settle_in(search, host, using)
        return True

    async def _keep(self, host: ArenaHost, keys: list[bytes], values: list[bytes]) -> int:
        """Copy checked values into slots and show them; returns how many of `keys`, from the first, are good."""
        num_new = sum(not host.index.is_known(key) for key in keys)
        reserved = host.index.reserve(keys)
        by_key = dict(zip(keys, values, strict=True))
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, host.arena, reserved, by_key))
        try:
            await asyncio.shield(copying)
        finally:
            # A thread cannot be cancelled: the slots are given back or shown when it has written them.
            await asyncio.wait([copying])
            rejected = copying.result()
            good = [each for each in reserved if each.key not in rejected]
            host.index.abort([each for each in reserved if each.key in rejected])
            host.index.commit(good)
        if len(reserved) < num_new:
            self._cut(Cut.FULL)
        for key, error in rejected.items():
            self._reject(host.arena.kind, key, error)
        layout = host.arena.kind.layout_fingerprint
        self._writer.refresh({storage_key(layout, each.key): len(by_key[each.key]) for each in good})
        return next((at for at, key in enumerate(keys) if key in rejected), len(keys))

    def _copy(
        self, arena: Arena, reserved: list[Reservation], values: dict[bytes, bytes]
    ) -> dict[bytes, ValueRejected]:
        """Check values and write the good ones to their slots; runs in a thread."""
        rejected: dict[bytes, ValueRejected] = {}
        for each in reserved:
            try:
                payload = decode(self._secret, arena.kind.layout_fingerprint, each.key, values[each.key])
                if len(payload) != arena.pool.shape.block_bytes:
                    raise ValueRejected("length")
            except ValueRejected as exc:
                rejected[each.key] = exc
            else:
                arena.pool.blocks[each.slot] = np.frombuffer(payload, dtype=np.uint8)
        return rejected

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

    def _reject(self, kind: BlockKind, key: bytes, error: ValueRejected) -> None:
        """Count a value that failed its checks, and have it deleted."""
        self._metrics.values_rejected.labels(str(error)).inc()
        name = storage_key(kind.layout_fingerprint, key)
        log.warning("%s failed its check (%s) and is removed", name, error)
        self._writer.remove(name)

    def _cut(self, reason: Cut) -> None:
        self._metrics.lookups_cut.labels(reason).inc()


def _leading(values: list[bytes | None]) -> list[bytes]:
    """The values before the first that is missing."""
    leading: list[bytes] = []
    for value in values:
        if value is None:
            break
        leading.append(value)
    return leading


def _no_blocks(group: int) -> GroupBlocks:
    return GroupBlocks(group=group, block_ids=[], generations=[])
