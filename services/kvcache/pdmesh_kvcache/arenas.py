"""Which layouts have an arena, and how they share the memory.

Equal parts, made on demand: the first layout gets the whole budget. When another arrives, arenas that nobody asked for in
`layout_idle_s` are closed; those left that hold more than an equal part are retired (they answer nothing new, and close when
the last pin on them ends) and come back, empty, with an equal part. Blocks lost so are still in Redis or Valkey.
A part does not grow while its arena lives. The sum of all arenas never exceeds the budget.
"""

import asyncio
import logging
import secrets
import time
from types import TracebackType
from typing import Self

from pdmesh.connector.options import connector_options
from pdmesh.connector.pool import PAGE_BYTES
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena, BlockKind
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.host import ArenaHost, lookup_pin
from pdmesh_kvcache.metrics import Metrics

log = logging.getLogger(__name__)

GENERATION_WORD_BYTES = 8
# Booking a slot takes 80 ns when an arena is made or closed, and the loop waits for it.
MAX_SLOTS = 1 << 22


class ArenaSet:
    """All arenas of this service. An async context manager; leaving it ends what is under way and frees the memory."""

    def __init__(self, config: KVCacheConfig, *, engine_id: str, secret: MeshSecret, metrics: Metrics) -> None:
        self._config = config
        self._engine_id = engine_id
        self._secret = secret
        self._metrics = metrics
        self._options = connector_options(config.connector_options)
        self._hosts: list[ArenaHost] = []
        # When each kind that has a right to a part was last asked for.
        self._claims: dict[BlockKind, float] = {}
        self._lock = asyncio.Lock()
        self._too_large: set[BlockKind] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in list(self._hosts):
            await self._close(host)

    @property
    def hosts(self) -> list[ArenaHost]:
        """Every arena that takes memory, retiring ones too."""
        return list(self._hosts)

    @property
    def num_open_lookups(self) -> int:
        return sum(host.offers.num_open for host in self._hosts)

    def get(self, kind: BlockKind) -> ArenaHost | None:
        """Return the arena of a kind if there is one that takes calls."""
        host = next((host for host in self._hosts if host.arena.kind == kind and not host.retiring), None)
        if host is not None:
            self._claims[kind] = time.monotonic()
        return host

    def of_lookup(self, transfer_id: str) -> ArenaHost | None:
        """Find the arena in which a lookup pinned something."""
        return next((host for host in self._hosts if host.index.has_pin(lookup_pin(transfer_id))), None)

    @property
    def peer_id(self) -> str:
        """What answers where no arena does: this service, as the owner of no pool."""
        return f"{self._engine_id}@0"

    def of_end(self, transfer_id: str, peer_id: str) -> ArenaHost | None:
        """Find the arena that an end is for: where its lookup pinned something or is remembered, else the one that it names."""
        remembering = (host for host in self._hosts if host.offers.outcome_of(transfer_id) is not None)
        return self.of_lookup(transfer_id) or next(remembering, None) or self.of_peer_id(peer_id)

    def of_peer_id(self, peer_id: str) -> ArenaHost | None:
        """Find an arena by its pool's id."""
        return next((host for host in self._hosts if host.arena.peer_id == peer_id), None)

    async def open(self, kind: BlockKind, block_bytes: int) -> ArenaHost | None:
        """Return the arena of a kind, made now if need be; None when there is no room for it (yet)."""
        host = self.get(kind)
        if host is None and self._claim(kind):
            async with self._lock:
                host = self.get(kind) or await self._make(kind, block_bytes)
        return host if host is not None and host.arena.pool.shape.block_bytes == block_bytes else None

    def _claim(self, kind: BlockKind) -> bool:
        """Give a kind the right to a part; False when others have them all."""
        now = time.monotonic()
        idle_before_s = now - self._config.layout_idle_s
        self._claims = {each: asked_s for each, asked_s in self._claims.items() if asked_s >= idle_before_s}
        self._too_large &= self._claims.keys()
        if kind not in self._claims and len(self._claims) >= self._config.max_layouts:
            return False
        self._claims[kind] = now
        return True

    async def _make(self, kind: BlockKind, block_bytes: int) -> ArenaHost | None:
        part_bytes = await self._make_room()
        # The pool's header is rounded up to a page.
        num_slots = (part_bytes - PAGE_BYTES) // (block_bytes + GENERATION_WORD_BYTES)
        if num_slots < 1:
            self._report_too_large(kind, part_bytes, block_bytes)
            return None
        if num_slots > MAX_SLOTS:
            log.warning(
                "layout %s gets %d slots, the most an arena may have, and leaves memory unused: %d bytes would make %d",
                kind.layout_fingerprint,
                MAX_SLOTS,
                part_bytes,
                num_slots,
            )
            num_slots = MAX_SLOTS
        arena = Arena(
            kind,
            # Its own epoch: to engines, another arena is a pool of another life.
            peer_id=f"{self._engine_id}@{secrets.randbits(63)}",
            num_slots=num_slots,
            block_bytes=block_bytes,
            on_evict=self._metrics.evictions.inc,
            has_sums=self._config.kv_checksums,
        )
        host = await ArenaHost(
            arena,
            list(self._config.connector),
            self._secret,
            on_loopback=self._config.on_loopback,
            options=self._options,
            on_left_out=lambda name: self._metrics.connectors_left_out.labels(name).inc(),
        ).__aenter__()
        self._hosts.append(host)
        log.info(
            "layout %s of model %s: %d slots of %d bytes",
            kind.layout_fingerprint,
            kind.model_fingerprint,
            num_slots,
            block_bytes,
        )
        return host

    async def _make_room(self) -> int:
        """Close what may go and return the bytes for one more arena; 0 when there is no room now."""
        for host in list(self._hosts):
            if host.is_quiet and (host.retiring or host.arena.kind not in self._claims):
                await self._close(host)
        part_bytes = self._config.arena_bytes // len(self._claims)
        for host in list(self._hosts):
            if host.arena.total_bytes > part_bytes:
                host.retiring = True
                if host.is_quiet:
                    await self._close(host)
        free_bytes = self._config.arena_bytes - sum(host.arena.total_bytes for host in self._hosts)
        return part_bytes if free_bytes >= part_bytes else 0

    async def _close(self, host: ArenaHost) -> None:
        self._hosts.remove(host)
        await host.__aexit__(None, None, None)

    def _report_too_large(self, kind: BlockKind, part_bytes: int, block_bytes: int) -> None:
        if part_bytes and kind not in self._too_large:
            self._too_large.add(kind)
            log.warning(
                "a block of layout %s has %d bytes, more than its part of the arena (%d): raise --arena-bytes",
                kind.layout_fingerprint,
                block_bytes,
                part_bytes,
            )
