"""What an engine does about the tier's bound on keys, and about its refusals: a real tier, and the engine's client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pdmesh.connector.peers import Ask, PeerDirectory
from pdmesh.engine.messages import BlocksComputed
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.tier_bound import TierBound
from pdmesh.engine.server.tier_client import TierClient
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OfferTable
from pdmesh.protocol.transfers import Begun
from support.held_engine import READY
from support.tier import BLOCK_BYTES, LAYOUT, MODEL, Engine, RunningTier, chain, running_engine, running_tier


class _Client:
    """An engine's client of a tier, and what it has counted."""

    def __init__(self, tier: RunningTier, engine: Engine, peers: PeerDirectory) -> None:
        engine_id, _, epoch = engine.peer_id.rpartition("@")
        identity = Identity(
            engine_id=engine_id, role="prefill", model_name="m", address=engine.address, epoch=int(epoch)
        )
        names = {"model_fingerprint": MODEL, "layout_fingerprints": [LAYOUT], "block_bytes": BLOCK_BYTES}
        ready = msgspec.structs.replace(READY, **names)
        self._registry = CollectorRegistry()
        board = LoadBoard(identity.epoch, OfferTable())
        metrics = EngineMetrics(self._registry, identity, ready, board, peers.fallbacks, peers.regained)
        self._engine, self._peers, self._num = engine, peers, 0
        self.parts = TierClient(
            address=tier.address,
            lookup_timeout_s=5.0,
            identity=identity,
            ready=ready,
            secret=engine.secret,
            peers=peers,
            metrics=metrics,
            sums=None,
            is_whole=_nothing_is_damaged,
        )

    async def find(self, keys: list[bytes]) -> int:
        """Number of tokens that are to be had."""
        peer = await self._peers.reach(self.parts.address, 5.0)
        self._num += 1

        async def attempt(ask: Ask) -> Begun:
            return await ask(peer, f"transfer-{self._num}", peer.connector)

        begun = await self.parts.find(attempt, keys, 5.0)
        return 0 if begun is None or begun.view is None else begun.view.num_tokens

    def store(self, keys: list[bytes]) -> None:
        block_ids = list(range(len(keys)))
        blocks = GroupBlocks(
            group=0, block_ids=block_ids, generations=self._engine.pool.generations_of(block_ids), checksums=[]
        )
        self.parts.store(BlocksComputed(request_id="r", keys=keys, blocks=blocks))

    def counted(self, name: str, outcome: str) -> float:
        return sum(
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == f"pdmesh_tier_{name}_total" and sample.labels["outcome"] == outcome
        )


@asynccontextmanager
async def _connected(tier: RunningTier, engine: Engine) -> AsyncIterator[_Client]:
    async with PeerDirectory(
        engine.peer_id,
        engine.secret,
        ["shm"],
        MODEL,
        [LAYOUT],
        engine._attach,
        lambda peer_id: None,
        block_bytes=[BLOCK_BYTES],
    ) as peers:
        client = _Client(tier, engine, peers)
        running = asyncio.create_task(client.parts.run())
        await client.parts.tried()
        try:
            yield client
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def test_a_prompt_of_more_blocks_than_the_tier_takes_keys_is_served_from_it_and_stored_in_parts() -> None:
    """The one request with all keys was refused, and the tier taken for lost: nobody's prompt was looked for any more."""

    async def scenes() -> None:
        keys = chain("x", 20)
        async with running_tier(max_keys=8) as tier, running_engine("engine") as engine, _connected(tier, engine) as it:
            engine.fill(list(range(20)), seed=1)
            it.store(keys)
            await tier.until("slots_used", lambda value: value == 20)
            assert it.counted("stores", "accepted") == 20
            # The bound is known by now: forget it, so that the lookup has to learn it as well.
            it.parts._bound.forget()
            assert await it.find(keys) == 8 * READY.block_size
            assert await it.find(keys[:4]) == 4 * READY.block_size
            assert it.counted("lookups", "hit") == 2
            assert [it.counted(name, "failed") for name in ("lookups", "stores")] == [0, 0]

    asyncio.run(scenes())


def test_a_call_that_the_tier_refuses_is_no_loss_of_the_tier() -> None:
    async def scenes() -> None:
        keys = chain("x", 2)
        async with running_tier() as tier, running_engine("engine") as engine, _connected(tier, engine) as it:
            engine.fill([0, 1], seed=1)
            it.store([b"short"])
            it.store(keys)
            await tier.until("slots_used", lambda value: value == 2)
            assert await it.find([b"short"]) == 0
            assert await it.find(keys) == 2 * READY.block_size
            counts = [it.counted(name, "refused") for name in ("stores", "lookups")]
            assert counts == [1, 1]

    asyncio.run(scenes())


@pytest.mark.parametrize("told", ["", "0", "-1", "no number", str(1 << 20)])
def test_a_tier_that_tells_no_smaller_bound_is_not_asked_again(told: str) -> None:
    """Where the refusal is for something else, the same call would go on for ever."""
    told_in = grpc.aio.Metadata(("pdmesh-max-keys", told))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, grpc.aio.Metadata(), told_in)
    assert not TierBound("kvcache:8301").learn(error)


async def _nothing_is_damaged(groups: list[GroupBlocks]) -> bool:
    return True
