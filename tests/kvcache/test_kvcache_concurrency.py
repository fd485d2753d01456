"""Lookups, stores and pulls that meet: nobody misses what is on its way, holds up others, or leaves anything behind."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from pdmesh import embedded_valkey
from pdmesh.connector.active import ActivePull
from pdmesh.connector.base import PeerPool
from pdmesh.connector.grpc import GrpcConnector
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.shm import ShmConnector
from pdmesh.errors import ConfigError, HandshakeRefused
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena, BlockKind
from pdmesh_kvcache.promotion import Promotion
from pdmesh_kvcache.puller import Puller
from support.tier import BLOCK_BYTES, LAYOUT, MODEL, SECRET, RunningTier, chain, running_engine, running_tier

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[embedded_valkey.EmbeddedValkey]:
    started = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=64 << 20)
    yield started
    started.stop()


def at_least(num: float) -> Any:
    return lambda value: value >= num


async def keep_in_valkey(url: str, keys: list[bytes]) -> np.ndarray[Any, Any]:
    """Leave blocks in Valkey alone, as a restart of everything else does."""
    async with running_engine("first") as engine, running_tier(valkey=url) as tier:
        content = engine.fill(list(range(len(keys))), seed=1)
        await engine.store(tier, keys, list(range(len(keys))))
        await tier.until("backing_writes_total", at_least(len(keys)))
        return content


async def num_pinned(tier: RunningTier) -> int:
    return int((await tier.stats()).num_pinned)


def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the copy of promoted values take its time."""
    copy = Promotion._copy

    def slow(self: Promotion, *arguments: Any) -> Any:
        time.sleep(seconds)
        return copy(self, *arguments)

    monkeypatch.setattr(Promotion, "_copy", slow)


def test_lookups_of_one_prompt_at_once_all_hit_and_it_is_fetched_once(
    valkey: embedded_valkey.EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch, 0.1)

    async def scenario() -> None:
        keys = chain("system", 16)
        content = await keep_in_valkey(valkey.url, keys)
        # Batches smaller than the prompt, so that others join on the way.
        async with running_tier(valkey=valkey.url, valkey_batch_bytes=1 << 16) as tier, running_engine("e") as engine:
            replies = await asyncio.gather(
                *(tier.lookup([*keys, *chain(f"user {at}", 2)], transfer_id=f"t{at}") for at in range(8))
            )
            assert [reply.num_hits for reply in replies] == [16] * 8
            assert sum(reply.num_backing for reply in replies) == 16
            # The values have a few bytes around the block.
            assert await tier.metric("backing_read_bytes_total") < 16 * BLOCK_BYTES * 1.1
            assert await tier.metric("lookups_cut_total") == 0
            assert await num_pinned(tier) == 16
            assert (await engine.pull(tier, replies[5])).reason == ""
            assert np.array_equal(engine.pool.blocks[:16], content)
            for at in range(8):
                assert await tier.end(f"t{at}")
            assert await num_pinned(tier) == 0

    asyncio.run(scenario())


def test_those_who_wait_for_a_prompt_that_is_not_there_do_not_ask_one_after_the_other(
    valkey: embedded_valkey.EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = []
    fetch = Promotion.fetch

    async def slow(self: Promotion, *arguments: Any) -> Any:
        fetches.append(arguments)
        await asyncio.sleep(0.2)
        return await fetch(self, *arguments)

    monkeypatch.setattr(Promotion, "fetch", slow)

    async def scenario() -> None:
        async with running_tier(valkey=valkey.url) as tier:
            replies = await asyncio.gather(*(tier.lookup(chain("unknown", 4)) for _ in range(8)))
            assert [reply.num_hits for reply in replies] == [0] * 8
            assert len(fetches) == 1
            assert await tier.num_hits(chain("unknown", 4)) == 0
            assert len(fetches) == 2

    asyncio.run(scenario())


def test_lookup_that_fetches_and_gives_up_leaves_the_rest_to_others(
    valkey: embedded_valkey.EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch, 0.3)

    async def scenario() -> None:
        keys = chain("system", 20)
        await keep_in_valkey(valkey.url, keys)
        async with running_tier(valkey=valkey.url, valkey_batch_bytes=1 << 16) as tier:
            hasty = asyncio.create_task(tier.lookup(keys, remaining_ms=200))
            await asyncio.sleep(0.05)
            patient = await tier.lookup(keys, remaining_ms=8000)
            assert (await hasty).num_hits < 20
            assert patient.num_hits == 20

    asyncio.run(scenario())


def test_lookup_waits_for_what_a_store_is_bringing_and_counts_when_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    interruption = ActivePull.interruption

    def held_up(self: ActivePull) -> str:
        may_copy.wait(8)
        return interruption(self)

    monkeypatch.setattr(ActivePull, "interruption", held_up)

    async def scenario() -> None:
        keys = chain("prompt", 3)
        async with running_tier() as tier, running_engine("prefill") as prefill:
            prefill.fill([0, 1, 2], seed=1)
            await prefill.store(tier, keys, [0, 1, 2])
            # The slots are reserved a moment after the store was accepted.
            deadline_s = time.monotonic() + 5
            while not await tier.metric("lookups_cut_total", reason="filling"):
                assert time.monotonic() < deadline_s, "nobody said that more was on its way"
                assert (await tier.lookup(keys, remaining_ms=100)).num_hits == 0
            waiting = [asyncio.create_task(tier.lookup(keys, remaining_ms=8000)) for _ in range(3)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in waiting)
            may_copy.set()
            assert [(await task).num_hits for task in waiting] == [3] * 3

    asyncio.run(scenario())


def test_lookup_that_was_overtaken_by_its_own_lease_pins_nothing(
    valkey: embedded_valkey.EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh_kvcache.lookups.SEAL_GRACE_S", 0.0)

    async def scenario() -> None:
        keys = chain("prompt", 6)
        await keep_in_valkey(valkey.url, keys)
        async with running_tier(valkey=valkey.url, valkey_batch_bytes=1 << 16) as tier:
            # What is pinned before the stall goes with the offer; what comes after it finds the offer gone.
            assert await tier.num_hits(keys[:2]) == 2
            slow_copies(monkeypatch, 0.6)
            reply = await tier.lookup(keys, remaining_ms=300)
            assert reply.num_hits == 0
            assert await num_pinned(tier) == 0
            assert await tier.metric("open_lookups") == 0
            assert await tier.metric("lookups_cut_total", reason="deadline") >= 1

    asyncio.run(scenario())


def test_engine_that_does_not_answer_holds_up_no_other() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with (
                running_tier(store_timeout_s=2.5) as tier,
                running_engine("silent") as silent,
                running_engine("alive") as alive,
            ):
                silent.address = f"127.0.0.1:{listener.getsockname()[1]}"
                for at in range(4):
                    await silent.store(tier, chain(f"silent {at}", 1), [at])
                alive.fill([0], seed=1)
                started_s = time.monotonic()
                await alive.store(tier, chain("alive", 1), [0])
                await tier.until("slots_used", at_least(1))
                assert time.monotonic() - started_s < 2
                # Its stores go together: the handshake is not waited for four times.
                await tier.until("store_blocks_dropped_total", at_least(4), reason="owner_gone")
                assert time.monotonic() - started_s < 4

    asyncio.run(scenario())


def test_engine_whose_memory_does_not_open_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    connect = ShmConnector.connect

    def hanging(self: ShmConnector, peer: PeerPool) -> None:
        if peer.peer_id.startswith("silent"):
            given_up.wait(5)
        connect(self, peer)

    monkeypatch.setattr(ShmConnector, "connect", hanging)

    async def scenario() -> None:
        async with running_tier() as tier, running_engine("silent") as silent, running_engine("alive") as alive:
            await alive.store(tier, chain("before", 1), [0])
            await tier.until("slots_used", at_least(1))
            await silent.store(tier, chain("silent", 1), [0])
            await asyncio.sleep(0.2)
            started_s = time.monotonic()
            await alive.store(tier, chain("alive", 1), [1])
            await tier.until("slots_used", at_least(2))
            assert time.monotonic() - started_s < 2
            given_up.set()
            await tier.until("slots_used", at_least(3))

    asyncio.run(scenario())


def test_pull_whose_connector_overlooks_the_deadline_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_kvcache.puller.CANCEL_GRACE_S", 0.1)

    def careless(self: ActivePull) -> str:
        time.sleep(0.01)
        return "cancelled" if self.cancelled else ""

    monkeypatch.setattr(ActivePull, "interruption", careless)
    monkeypatch.setattr("pdmesh.connector.shm._Copy.step", lambda copy: copy.active.interruption() or None)

    async def scenario() -> None:
        async with running_tier(store_timeout_s=0.3) as tier, running_engine("prefill") as prefill:
            await prefill.store(tier, chain("prompt", 2), [0, 1])
            assert await tier.until("store_blocks_dropped_total", at_least(2), reason="pull_failed") == 2
            assert (await tier.stats()).num_used == 0

    asyncio.run(scenario())


def small_puller() -> tuple[Arena, Puller]:
    arena = Arena(
        BlockKind(model_fingerprint=MODEL, layout_fingerprint=LAYOUT),
        peer_id="tier@1",
        num_slots=4,
        block_bytes=BLOCK_BYTES,
        on_evict=lambda: None,
    )
    puller = Puller(
        arena,
        ["shm"],
        MeshSecret(SECRET),
        on_loopback=True,
        options={},
        on_metadata=lambda name, data: None,
        on_left_out=lambda name: None,
    )
    return arena, puller


def test_whatever_a_connector_raises_is_a_refusal_of_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's own error passed by all who try the next connector, and ended the attempts to get a better one back."""

    def broken(connector: ShmConnector, peer: PeerPool) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(ShmConnector, "connect", broken)

    async def scenario() -> None:
        arena, puller = small_puller()
        async with puller, running_engine("engine") as engine:
            with pytest.raises(HandshakeRefused, match="shm: OSError: no such device"):
                await puller.reach(engine.peer_id, engine.address, 5.0)
        arena.close()

    asyncio.run(scenario())


def test_nothing_of_engines_that_are_gone_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_kvcache.puller.PEER_IDLE_S", 0.1)

    async def scenario() -> None:
        arena, puller = small_puller()
        async with puller:
            for at in range(4):
                async with running_engine(f"engine-{at}") as engine:
                    engine.fill([0], seed=at)
                    peer = await puller.reach(engine.peer_id, engine.address, 5.0)
                    words = engine.pool.generations_of([0])
                    assert (await puller.pull(peer, [0], words, [at], 5.0, checksums=[])).reason == ""
                    # Lost while a pull runs, so that what the pull does at its end comes after.
                    pulling = asyncio.create_task(puller.pull(peer, [0], words, [at], 5.0, checksums=[]))
                    await asyncio.sleep(0)
                    puller.peers.forget(peer.peer_id)
                    await pulling
            await asyncio.sleep(0.3)
            assert not puller._idle_timers
            assert not any((puller._num_pulls, puller._connectors_of, puller._waiting, puller._leaving))
        arena.close()

    asyncio.run(scenario())


def test_lookup_that_is_cancelled_twice_while_it_copies_gives_its_slots_back(
    valkey: embedded_valkey.EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed reserved for ever, and whoever wanted those blocks waited for them until its time was over."""
    slow_copies(monkeypatch, 0.3)
    kept: list[asyncio.Task[Any]] = []
    keep = Promotion.keep

    async def cancelled(self: Promotion, *arguments: Any) -> Any:
        task = asyncio.create_task(keep(self, *arguments))
        kept.append(task)
        for _ in range(2):
            await asyncio.sleep(0.05)
            task.cancel()
        return await task

    async def scenario() -> None:
        keys = chain("system", 4)
        await keep_in_valkey(valkey.url, keys)
        async with running_tier(valkey=valkey.url) as tier:
            monkeypatch.setattr(Promotion, "keep", cancelled)
            with pytest.raises(grpc.aio.AioRpcError):
                await tier.lookup(keys, remaining_ms=2000)
            assert kept
            assert all(task.cancelled() for task in kept)
            monkeypatch.setattr(Promotion, "keep", keep)
            assert (await tier.lookup(keys, remaining_ms=2000)).num_hits == 4
            assert await tier.metric("lookups_cut_total") == 0

    asyncio.run(scenario())


def test_key_that_is_looked_up_twice_at_once_is_refused() -> None:
    """It ended the call by a defect, and left those waiting who wanted the same block."""

    async def scenario() -> None:
        async with running_tier() as tier:
            with pytest.raises(grpc.aio.AioRpcError, match="keys: one is given twice"):
                await tier.lookup(chain("prompt", 2) * 2)

    asyncio.run(scenario())


def test_connector_that_does_not_start_is_left_out_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the arena along, and left a thread of each of the others behind, at every attempt."""

    def refuse(self: GrpcConnector, pool: Any) -> bytes:
        raise ConfigError("connector grpc: it does not start here")

    monkeypatch.setattr(GrpcConnector, "register", refuse)

    async def scenario() -> None:
        async with running_tier(connector=("grpc", "shm")) as tier, running_engine("engine") as engine:
            content = engine.fill([0], seed=1)
            keys = chain("prompt", 1)
            assert await engine.store(tier, keys, [0]) == 1
            await tier.until("store_blocks_committed_total", at_least(1))
            assert await tier.metric("connectors_left_out_total", connector="grpc") == 1
            engine.fill([0], seed=2)
            reply = await tier.lookup(keys)
            assert (await engine.pull(tier, reply)).reason == ""
            assert np.array_equal(engine.pool.blocks[:1], content)

    asyncio.run(scenario())


def test_leases_are_kept_although_the_end_of_one_meets_a_defect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdmesh_kvcache.host.REAPER_PAUSE_S", 0.01)
    run, failures = PoolOwner.run, [RuntimeError("a defect")]

    async def failing(self: PoolOwner) -> None:
        if failures:
            raise failures.pop()
        await run(self)

    monkeypatch.setattr(PoolOwner, "run", failing)

    async def scenario() -> None:
        async with running_tier() as tier, running_engine("engine") as engine:
            engine.fill([0], seed=1)
            keys = chain("prompt", 1)
            assert await engine.store(tier, keys, [0]) == 1
            await tier.until("store_blocks_committed_total", at_least(1))
            await tier.lookup(keys, remaining_ms=300)
            assert await num_pinned(tier) == 1
            until = time.monotonic() + 20
            while await num_pinned(tier):
                assert time.monotonic() < until
                await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert "could not be kept" in caplog.text
