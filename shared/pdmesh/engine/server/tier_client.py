"""The engine's client of the kvcache service: what of a prompt it holds, and what it should come and take.

The tier helps or is left alone: a lookup waits no longer than its deadline, and after a fault none is made until a
connection in the background has succeeded again. Every miss that a fault caused is counted. A call that the tier refuses is no
such fault: the next one is made as if nothing had been.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

import grpc
import grpc.aio

from pdmesh.channels import open_channel
from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.handshake import translated
from pdmesh.connector.peers import Ask, Peer, PeerDirectory
from pdmesh.engine.messages import BlocksComputed, CoreReady
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.tier_bound import TierBound
from pdmesh.errors import MeshError, PeerUnavailable
from pdmesh.protocol import mesh_pb2
from pdmesh.protocol.mesh_pb2_grpc import KVCacheStub
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.transfers import Begun, OfferView
from pdmesh.protocol.wire import blocks_from_pb, to_ms
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

BegunT = TypeVar("BegunT")

CONNECT_TIMEOUT_S = 15.0
STORE_TIMEOUT_S = 5.0
FIRST_ATTEMPT_S = 2.0
BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 15.0
# Blocks are not pinned for a store: what waits longer than a few steps is likely gone.
MAX_QUEUED_STORES = 256


class Lookup(StrEnum):
    """How a lookup ended. All but hit and miss are misses by fault."""

    HIT = "hit"
    MISS = "miss"
    UNCONNECTED = "unconnected"
    PAUSED = "paused"
    """A call took too long just now."""
    TIMEOUT = "timeout"
    FAILED = "failed"
    REFUSED = "refused"
    """The tier would not have this one."""
    RESTARTED = "restarted"


class Store(StrEnum):
    """What became of blocks that could be stored."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    DROPPED = "dropped"
    FAILED = "failed"
    REFUSED = "refused"
    DAMAGED = "damaged"
    """Computed behind KV that has changed in this engine's memory: the tier is not told of them."""


class TierClient:
    """Speaks to one kvcache service. `run` keeps it connected and hands over stores."""

    def __init__(
        self,
        *,
        address: str,
        lookup_timeout_s: float,
        identity: Identity,
        ready: CoreReady,
        secret: MeshSecret,
        peers: PeerDirectory,
        metrics: EngineMetrics,
        sums: PoolSums | None,
        is_whole: Callable[[list[GroupBlocks]], Awaitable[bool]],
    ) -> None:
        """`is_whole` says whether blocks here are what was computed, as far as that is known."""
        self.address = address
        self._lookup_timeout_s = lookup_timeout_s
        self._identity = identity
        self._ready = ready
        self._secret = secret
        self._peers = peers
        self._metrics = metrics
        self._sums = sums
        self._is_whole = is_whole
        self._channel = open_channel(address, secret)
        self._stub = KVCacheStub(self._channel)
        self._is_connected = False
        self._attempted = asyncio.Event()
        self._stores: deque[BlocksComputed] = deque()
        self._wake = asyncio.Event()
        self._bound = TierBound(address)
        self._backoff_s = BACKOFF_MIN_S
        self._paused_until_s = 0.0
        self._is_reported = False
        """Whether the log says already that it is away."""

    async def find(
        self, attempt: Callable[[Ask], Awaitable[BegunT | None]], keys: list[bytes], remaining_s: float
    ) -> BegunT | None:
        """Have `attempt` begin a pull of the longest prefix of `keys` that the tier holds.

        None for a miss of any kind, never later than the lookup timeout.
        """
        if not self._is_connected or time.monotonic() < self._paused_until_s:
            self._count(Lookup.PAUSED if self._is_connected else Lookup.UNCONNECTED)
            return None
        timeout_s = min(self._lookup_timeout_s, remaining_s)

        async def ask(peer: Peer, transfer_id: str, _connector: str) -> Begun:
            return await self._lookup(peer, transfer_id, keys, timeout_s)

        try:
            async with asyncio.timeout(timeout_s):
                return await attempt(ask)
        except TimeoutError:
            self._count(Lookup.TIMEOUT)
            # A request that had hardly any time left says nothing of the tier.
            if timeout_s >= self._lookup_timeout_s:
                self._pause()
        except MeshError as exc:
            self._count(Lookup.FAILED)
            self._lost(exc.message)
        return None

    async def _lookup(self, peer: Peer, transfer_id: str, keys: list[bytes], timeout_s: float) -> Begun:
        """Ask for as many leading blocks as the tier takes keys in one call. Raises TimeoutError or PeerUnavailable."""
        request = mesh_pb2.LookupRequest(
            transfer_id=transfer_id,
            consumer_id=self._identity.peer_id,
            group=0,
            keys=keys[: self._bound.num_keys],
            remaining_ms=to_ms(timeout_s),
            layout_fingerprint=self._ready.layout_fingerprints[0],
            model_fingerprint=self._ready.model_fingerprint,
        )
        try:
            reply = await self._stub.Lookup(request, timeout=timeout_s, metadata=self._secret.call_metadata())
        except grpc.aio.UsageError as exc:
            raise PeerUnavailable(f"the channel to {self.address} was closed") from exc
        except grpc.aio.AioRpcError as exc:
            if _timed_out(exc):
                raise TimeoutError from exc
            if self._bound.learn(exc):
                return await self._lookup(peer, transfer_id, keys, timeout_s)
            if self._bound.refused("lookup", exc):
                self._count(Lookup.REFUSED)
                return Begun(peer_id="")
            raise translated(exc, self.address) from exc
        self._backoff_s = BACKOFF_MIN_S
        if not reply.num_hits:
            self._count(Lookup.MISS)
            return Begun(peer_id="")
        if reply.peer_id != peer.peer_id:
            # Whoever made the attempt shakes hands with the new one and asks again.
            self._bound.forget()
            self._count(Lookup.RESTARTED)
            return Begun(peer_id=reply.peer_id)
        self._count(Lookup.HIT)
        self._metrics.tier_hit_blocks.inc(reply.num_hits)
        self._peers.track(peer, transfer_id)
        num_tokens = reply.num_hits * self._ready.block_size
        return Begun(peer_id=peer.peer_id, view=OfferView(groups=[blocks_from_pb(reply.blocks)], num_tokens=num_tokens))

    def store(self, computed: BlocksComputed) -> None:
        """Let the tier know of new blocks, soon; never blocks. Over the bound the oldest are dropped and counted."""
        if len(self._stores) >= MAX_QUEUED_STORES:
            self._metrics.tier_stores.inc(Store.DROPPED, amount=len(self._stores.popleft().keys))
        self._stores.append(computed)
        self._wake.set()

    async def tried(self) -> None:
        """Wait for the first attempt to connect, so that a reachable tier serves the first request; not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ATTEMPT_S):
                await self._attempted.wait()

    async def run(self) -> None:
        """Stay connected and hand over stores until cancelled."""
        try:
            while True:
                if not self._is_connected and not await self._connect():
                    continue
                await self._wake.wait()
                self._wake.clear()
                while self._stores and self._is_connected:
                    await self._hand_over(self._stores.popleft())
        finally:
            # Nobody connects it again: whoever looks further must not ask over a closed channel.
            self._is_connected = False
            await self._channel.close(None)

    async def _connect(self) -> bool:
        # Not before the first attempt: a reachable tier serves the first request.
        if self._attempted.is_set():
            await asyncio.sleep(self._longer_backoff_s())
        try:
            peer = await self._peers.reach(self.address, CONNECT_TIMEOUT_S)
        except MeshError as exc:
            if not self._is_reported:
                log.warning("kvcache %s is not used until it answers: %s", self.address, exc.message)
                self._is_reported = True
            return False
        finally:
            self._attempted.set()
        # With certificates of now: those of the channel before may have run out.
        former, self._channel = self._channel, open_channel(self.address, self._secret)
        self._stub = KVCacheStub(self._channel)
        await former.close(STORE_TIMEOUT_S)
        self._bound.forget()
        log.info("kvcache %s connected over %s", self.address, peer.connector)
        self._is_connected = True
        self._is_reported = False
        return True

    async def _hand_over(self, computed: BlocksComputed) -> None:
        blocks, num_keys = computed.blocks, len(computed.keys)
        # Those among them that were summed before were found here too.
        if not await self._is_whole([*computed.reused, blocks]):
            self._metrics.tier_stores.inc(Store.DAMAGED, amount=num_keys)
            return
        if self._sums is not None:
            num_tokens = (blocks.first_block + len(blocks.block_ids)) * self._ready.block_size
            [blocks] = await self._sums.of([blocks], num_tokens)
            # Whoever rests on them next is to be told apart from damage since now.
            for each in computed.reused:
                self._sums.prepare([each], len(each.block_ids) * self._ready.block_size)
        first = 0
        while first < num_keys:
            part = self._store_request(computed.keys, blocks, slice(first, first + self._bound.num_keys))
            try:
                reply = await self._stub.Store(part, timeout=STORE_TIMEOUT_S, metadata=self._secret.call_metadata())
            except grpc.aio.AioRpcError as exc:
                if self._bound.learn(exc):
                    continue
                if not self._bound.refused("store", exc):
                    self._metrics.tier_stores.inc(Store.FAILED, amount=num_keys - first)
                    if _timed_out(exc):
                        self._pause()
                    else:
                        self._lost(f"store: {exc.code().name} {exc.details()}")
                    return
                self._metrics.tier_stores.inc(Store.REFUSED, amount=len(part.keys))
            else:
                self._metrics.tier_stores.inc(Store.ACCEPTED, amount=reply.num_accepted)
                self._metrics.tier_stores.inc(Store.KNOWN, amount=len(part.keys) - reply.num_accepted)
            first += len(part.keys)

    def _store_request(self, keys: list[bytes], blocks: GroupBlocks, places: slice) -> mesh_pb2.StoreRequest:
        return mesh_pb2.StoreRequest(
            owner_id=self._identity.peer_id,
            owner_address=self._identity.address,
            group=blocks.group,
            keys=keys[places],
            block_ids=blocks.block_ids[places],
            generations=blocks.generations[places],
            layout_fingerprint=self._ready.layout_fingerprints[blocks.group],
            model_fingerprint=self._ready.model_fingerprint,
            block_bytes=self._ready.block_bytes,
            checksums=blocks.checksums[places],
        )

    def _count(self, outcome: Lookup) -> None:
        self._metrics.tier_lookups.inc(outcome)

    def _pause(self) -> None:
        """Ask nothing for a while: it is slow."""
        self._paused_until_s = time.monotonic() + self._longer_backoff_s()

    def _lost(self, why: str) -> None:
        """Ask nothing until another handshake has succeeded."""
        if self._is_connected:
            log.warning("kvcache %s: %s; computing without it until it answers again", self.address, why)
            self._is_connected = False
            self._is_reported = True
            self._wake.set()

    def _longer_backoff_s(self) -> float:
        """The next pause; each is twice as long as the one before, until a lookup succeeds."""
        pause_s, self._backoff_s = self._backoff_s, min(self._backoff_s * 2, BACKOFF_MAX_S)
        return pause_s


def _timed_out(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
