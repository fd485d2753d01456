"""Brings blocks from Redis or Valkey into an arena: fetched in batches, checked, copied into slots, then held like any other."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from pdmesh.errors import DeadlineExceeded, PeerError
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena, BlockKind
from pdmesh_kvcache.arenas import ArenaSet
from pdmesh_kvcache.backing import Backing
from pdmesh_kvcache.host import ArenaHost
from pdmesh_kvcache.index import Reservation
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.seldom import Seldom
from pdmesh_kvcache.value import ValueRejected, decode, storage_key, value_bytes
from pdmesh_kvcache.writer import Writer

log = logging.getLogger(__name__)


class Cut(StrEnum):
    """Why a lookup may have found less than there was."""

    DEADLINE = "deadline"
    FILLING = "filling"
    """Others were bringing the next block when the time was over."""
    BACKING = "backing"
    """Redis or Valkey failed."""
    FULL = "full"
    """No slot could be freed for what was found there."""
    OVERLOADED = "overloaded"


@dataclass(slots=True, eq=False)
class Flight:
    """One lookup's promotion of a batch; others that want the same wait for it instead of fetching it again."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    missing: bytes | None = None
    """The first key that the store does not have, as far as that is known."""


class Promotion:
    """The steps of a promotion; `lookups` takes them in order. What it learns goes to the store through `writer`."""

    def __init__(
        self, *, arenas: ArenaSet, backing: Backing, writer: Writer, secret: MeshSecret, metrics: Metrics
    ) -> None:
        self._arenas = arenas
        self._backing = backing
        self._writer = writer
        self._secret = secret
        self._metrics = metrics
        self._rejects = Seldom()
        self._flights: dict[tuple[BlockKind, bytes], Flight] = {}

    def flight_of(self, kind: BlockKind, key: bytes) -> Flight | None:
        """Return the promotion under way that a key is part of."""
        return self._flights.get((kind, key))

    @contextmanager
    def flight(self, kind: BlockKind, keys: list[bytes]) -> Iterator[Flight]:
        """Let others know that `keys`, none of them in flight, are being brought."""
        flight = Flight()
        self._flights |= dict.fromkeys([(kind, key) for key in keys], flight)
        try:
            yield flight
        finally:
            flight.ended.set()
            for key in keys:
                self._flights.pop((kind, key), None)

    async def fetch(
        self, kind: BlockKind, keys: list[bytes], block_bytes: int, remaining_s: float, flight: Flight
    ) -> list[bytes]:
        """Read the values of the leading keys that are there, unchecked; none when the time is over or the store fails.

        `block_bytes` is the most that a block may have: of a longer value so much is read that its check must fail.
        """
        try:
            if remaining_s <= 0:
                raise DeadlineExceeded("the lookup's time was over")
            names = [storage_key(kind.layout_fingerprint, key) for key in keys]
            most_bytes = value_bytes(kind.layout_fingerprint, keys[0], block_bytes)
            values = _leading(await self._backing.fetch(names, most_bytes, remaining_s))
        except DeadlineExceeded:
            self._cut(Cut.DEADLINE)
        except PeerError:
            self._cut(Cut.BACKING)
        else:
            if len(values) < len(keys):
                flight.missing = keys[len(values)]
            return values
        return []

    async def open_arena(self, kind: BlockKind, key: bytes, value: bytes) -> ArenaHost | None:
        """Make the arena of a layout of which a value shows how large its blocks are; None when it is bad or has no room."""
        try:
            block_bytes = len(decode(self._secret, kind.layout_fingerprint, key, value))
        except ValueRejected as exc:
            self._reject(kind, key, exc)
            return None
        host = await self._arenas.open(kind, block_bytes)
        if host is None:
            self._cut(Cut.FULL)
        return host

    async def keep(self, host: ArenaHost, keys: list[bytes], values: list[bytes]) -> int:
        """Copy checked values, of the first `keys`, into slots and show them; returns how many keys are now held in a row.

        Nothing is awaited after they became visible, so the caller can pin them.
        """
        keys = keys[: len(values)]
        num_new = sum(not host.index.is_known(key) for key in keys)
        reserved = host.index.reserve(keys)
        by_key = dict(zip(keys, values, strict=True))
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, host.arena, reserved, by_key))
        rejected: dict[bytes, ValueRejected] = {}
        good: list[Reservation] = []
        try:
            await asyncio.shield(copying)
        finally:
            # A thread cannot be cancelled: however often we are, the slots are given back or shown when it has written them.
            while not copying.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            if copying.exception() is None:
                rejected = copying.result()
                good = [each for each in reserved if each.key not in rejected]
            kept = {each.key for each in good}
            host.index.abort([each for each in reserved if each.key not in kept])
            host.index.commit(good)
        if len(reserved) < num_new:
            self._cut(Cut.FULL)
        for key, error in rejected.items():
            self._reject(host.arena.kind, key, error)
        layout = host.arena.kind.layout_fingerprint
        self._writer.refresh({storage_key(layout, each.key): len(by_key[each.key]) for each in good})
        return host.index.num_leading(keys)

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
                arena.fill(each.slot, payload)
        return rejected

    def _reject(self, kind: BlockKind, key: bytes, error: ValueRejected) -> None:
        """Count a value that failed its checks, and have it deleted."""
        self._metrics.values_rejected.labels(str(error)).inc()
        name = storage_key(kind.layout_fingerprint, key)
        if num := self._rejects.due(str(error)):
            log.warning("values that failed their check (%s) and are removed: %d, the last %s", error, num, name)
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
