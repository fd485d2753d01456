"""Writes committed blocks to Redis or Valkey behind everybody's back: a bounded queue, batches, nothing waits for it.

The queue holds names, not bytes: a block that was evicted before its turn is simply not written. While a batch is being
copied its slots are pinned. What lookups learn about values (used just now, failed its check) goes the same way.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from pdmesh.errors import PeerError
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena
from pdmesh_kvcache.backing import Backing
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.valkey import ValkeyNotWritable
from pdmesh_kvcache.value import encode, storage_key, value_bytes


class WriteDrop(StrEnum):
    """Why a block was not written."""

    DOWN = "down"
    REFUSED = "refused"
    """The server is up and takes no writes now."""
    QUEUE_FULL = "queue_full"
    EVICTED = "evicted"
    TOO_LARGE = "too_large"
    DAMAGED = "damaged"
    """Its bytes have changed in memory; under a MAC they would pass for good."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Write:
    arena: Arena
    key: bytes


class Writer:
    """`submit` blocks; `run` writes them until it is cancelled."""

    def __init__(self, config: KVCacheConfig, *, backing: Backing, secret: MeshSecret, metrics: Metrics) -> None:
        self._config = config
        self._backing = backing
        self._secret = secret
        self._metrics = metrics
        self._queue: deque[_Write] = deque()
        # Values that were used, with their sizes, and values to delete.
        self._used: dict[str, int] = {}
        self._bad: set[str] = set()
        self._wanted = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._numbers = itertools.count()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def submit(self, arena: Arena, keys: list[bytes]) -> None:
        """Queue held blocks; those beyond the bound are dropped and counted."""
        if not self._backing.exists:
            return
        if (reason := self._hindrance()) is not None:
            self._drop(reason, len(keys))
            return
        room = max(0, self._config.max_queued_writes - len(self._queue))
        self._queue.extend(_Write(arena, key) for key in keys[:room])
        self._drop(WriteDrop.QUEUE_FULL, len(keys[room:]))
        self._wake()

    def refresh(self, sizes: dict[str, int]) -> None:
        """Have values counted as just used; forgotten beyond the bound."""
        if len(self._used) + len(sizes) <= self._config.max_queued_writes:
            self._used |= sizes
            self._wake()

    def remove(self, name: str) -> None:
        """Have a value deleted; forgotten beyond the bound, so that the next lookup finds it again."""
        if len(self._bad) < self._config.max_queued_writes:
            self._bad.add(name)
            self._wake()

    async def run(self) -> None:
        """Write what is queued, one batch at a time."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._queue or self._used or self._bad:
                await self._tell()
                await self._write_batch()
            self._flushed.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until the queue is written or dropped, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._flushed.wait()
        except TimeoutError:
            self._drop(WriteDrop.FAILED, len(self._queue))
            self._queue.clear()

    def _wake(self) -> None:
        if self._queue or self._used or self._bad:
            self._flushed.clear()
            self._wanted.set()

    async def _tell(self) -> None:
        """Pass on what lookups learned; lost when the store is down, as it is only advice."""
        used, self._used = self._used, {}
        bad, self._bad = self._bad, set()
        with contextlib.suppress(PeerError):
            if bad:
                await self._backing.remove(sorted(bad))
            if used := {name: size for name, size in used.items() if name not in bad}:
                await self._backing.refresh(used)

    async def _write_batch(self) -> None:
        batch = self._take_batch()
        if not batch:
            return
        if (reason := self._hindrance()) is not None:
            self._drop(reason, len(batch))
            return
        values = await self._encoded(batch)
        if not values:
            return
        try:
            await self._backing.write(values)
        except PeerError as exc:
            # The breaker has logged it.
            refused = isinstance(exc, ValkeyNotWritable)
            self._drop(WriteDrop.REFUSED if refused else WriteDrop.FAILED, len(values))
        else:
            self._metrics.writes.inc(len(values))

    def _hindrance(self) -> WriteDrop | None:
        """Why nothing can be written now; None when something may be."""
        if not self._backing.up:
            return WriteDrop.DOWN
        return None if self._backing.writable else WriteDrop.REFUSED

    def _take_batch(self) -> list[_Write]:
        """Take blocks from the queue whose values fit one round trip, at least one."""
        most_bytes = min(self._config.valkey_batch_bytes, self._config.valkey_max_bytes)
        batch: list[_Write] = []
        num_bytes = 0
        while self._queue:
            write = self._queue[0]
            kind, block_bytes = write.arena.kind, write.arena.pool.shape.block_bytes
            size = value_bytes(kind.layout_fingerprint, write.key, block_bytes)
            if batch and num_bytes + size > most_bytes:
                break
            self._queue.popleft()
            if write.arena.is_closed or write.arena.index.slot_of(write.key) is None:
                self._drop(WriteDrop.EVICTED, 1)
            elif size > self._config.valkey_max_bytes:
                self._drop(WriteDrop.TOO_LARGE, 1)
            else:
                batch.append(write)
                num_bytes += size
        return batch

    async def _encoded(self, batch: list[_Write]) -> dict[str, bytes]:
        pin_id = f"write {next(self._numbers)}"
        slots = [write.arena.index.pin(pin_id, [write.key])[0] for write in batch]
        encoding = asyncio.ensure_future(asyncio.to_thread(self._encode, batch, slots))
        try:
            values = await asyncio.shield(encoding)
            self._drop(WriteDrop.DAMAGED, len(batch) - len(values))
            return values
        finally:
            # A thread cannot be cancelled: the slots stay pinned until it has read them.
            await asyncio.wait([encoding])
            for arena in {write.arena for write in batch}:
                arena.index.unpin(pin_id)

    def _encode(self, batch: list[_Write], slots: list[int]) -> dict[str, bytes]:
        values: dict[str, bytes] = {}
        for write, slot in zip(batch, slots, strict=True):
            if write.arena.damaged([slot]):
                continue
            layout = write.arena.kind.layout_fingerprint
            payload = memoryview(write.arena.pool.blocks[slot])
            values[storage_key(layout, write.key)] = encode(self._secret, layout, write.key, payload)
        return values

    def _drop(self, reason: WriteDrop, num: int) -> None:
        if num:
            self._metrics.writes_dropped.labels(reason).inc(num)
