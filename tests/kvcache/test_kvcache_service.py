"""Store and lookup through the running service: what engines get is what they stored, and nothing else ever."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from pdmesh.connector.peers import PeerDirectory
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks
from pdmesh_kvcache.arena import Arena
from support.tier import BLOCK_BYTES, LAYOUT, MODEL, SECRET, chain, running_engine, running_tier

pytestmark = pytest.mark.timeout(60)

ARENA_OF_16_BYTES = 4096 + 16 * (BLOCK_BYTES + 8)


def at_least(num: float) -> Any:
    return lambda value: value >= num


def test_what_is_stored_is_found_and_read_by_another_engine() -> None:
    async def scenario(connectors: tuple[str, ...]) -> None:
        keys = chain("prompt", 5)
        async with (
            running_tier(connector=list(connectors)) as tier,
            running_engine("prefill", connectors=connectors) as prefill,
            running_engine("decode", connectors=connectors) as decode,
        ):
            content = prefill.fill([3, 4, 5, 9, 1], seed=1)
            assert await prefill.store(tier, keys, [3, 4, 5, 9, 1]) == 5
            await tier.until("store_blocks_committed_total", at_least(5))
            reply = await tier.lookup([*keys, *chain("unknown", 2)], transfer_id="t1")
            assert (reply.num_hits, reply.num_arena, reply.num_backing) == (5, 5, 0)
            assert (await tier.stats()).num_pinned == 5
            result = await decode.pull(tier, reply)
            assert result.reason == ""
            assert np.array_equal(decode.pool.blocks[:5], content)
            assert await tier.end("t1")
            assert not await tier.end("t1")
            assert (await tier.stats()).num_pinned == 0
            assert await prefill.store(tier, keys, [3, 4, 5, 9, 1]) == 0

    asyncio.run(scenario(("shm",)))
    asyncio.run(scenario(("grpc",)))
    asyncio.run(scenario(("nixl",)))


def test_the_end_of_an_unknown_lookup_is_answered_and_remembered() -> None:
    """The answer did not say who gave it, and a lookup that its own end had overtaken pinned slots for a lease."""

    async def scenario() -> None:
        keys = chain("prompt", 3)
        async with running_tier() as tier, running_engine("prefill") as prefill:

            async def end(transfer_id: str, peer_id: str = "", *, committed: bool = True) -> pb.EndTransferReply:
                request = pb.EndTransferRequest(transfer_id=transfer_id, committed=committed, peer_id=peer_id)
                reply: pb.EndTransferReply = await tier.peer.EndTransfer(request, timeout=5, metadata=tier.metadata)
                return reply

            # Before any arena there is only the service to answer.
            nobody = await end("never", "kvcache@12")
            assert nobody.peer_id.endswith("@0")
            prefill.fill([0, 1, 2], seed=1)
            await prefill.store(tier, keys, [0, 1, 2])
            await tier.until("store_blocks_committed_total", at_least(3))
            arena = (await tier.lookup(keys, transfer_id="t1")).peer_id
            assert (await end("t1", arena)).known
            again = await end("t1", arena)
            assert (again.known, again.outcome, again.peer_id) == (False, "committed", arena)
            # An engine of the release before names no arena.
            assert (await end("t1")).peer_id == arena
            overtaking = await end("t2", arena, committed=False)
            assert (overtaking.known, overtaking.peer_id) == (False, arena)
            with pytest.raises(grpc.aio.AioRpcError, match="transfer_id t2 was used before"):
                await tier.lookup(keys, transfer_id="t2")
            assert (await tier.stats()).num_pinned == 0
            # Of an arena that is no more.
            assert (await end("t3", "kvcache@12")).peer_id.endswith("@0")

    asyncio.run(scenario())


def test_blocks_that_the_engine_reused_are_dropped_and_those_before_them_kept() -> None:
    async def scenario() -> None:
        keys = chain("prompt", 12)
        async with running_tier() as tier, running_engine("prefill") as prefill:
            ids = list(range(12))
            prefill.fill(ids, seed=1)
            promised = prefill.pool.generations_of(ids)
            prefill.fill(ids[7:], seed=2)
            assert await prefill.store(tier, keys, ids, generations=promised) == 12
            assert await tier.until("store_blocks_dropped_total", at_least(5), reason="stale") == 5
            assert await tier.num_hits(keys) == 7
            assert (await tier.stats()).num_used == 7

    asyncio.run(scenario())


BROKEN_WAYS = ["peer_lost", "corrupt", "error:no such device"]


@pytest.mark.parametrize("reason", BROKEN_WAYS)
def test_blocks_that_one_connector_does_not_bring_come_over_the_next(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """They were dropped, and after `peer_lost` all that the engine had offered with them."""
    monkeypatch.setattr("pdmesh.connector.shm._Copy.step", lambda copy: reason)

    async def scenario() -> None:
        keys = chain("prompt", 5)
        async with (
            running_tier() as tier,
            running_engine("prefill", connectors=("shm", "grpc")) as prefill,
        ):
            content = prefill.fill([0, 1, 2, 3, 4], seed=1)
            await prefill.store(tier, keys, [0, 1, 2, 3, 4])
            await tier.until("store_blocks_committed_total", at_least(5))
            assert await tier.metric("pulls_rerouted_total", connector="shm") >= 1
            assert await tier.metric("store_blocks_dropped_total") == 0
            reply = await tier.lookup(keys, transfer_id="t1")
            assert reply.num_hits == 5
            monkeypatch.undo()
            prefill.fill([0, 1, 2, 3, 4], seed=2)
            assert (await prefill.pull(tier, reply)).reason == ""
            assert (prefill.pool.blocks[:5] == content).all()

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", BROKEN_WAYS)
def test_blocks_that_no_connector_brings_are_dropped_by_their_reason(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Bytes that came whole over no way are `corrupt`, whatever failed last."""
    monkeypatch.setattr("pdmesh.connector.shm._Copy.step", lambda copy: reason)
    monkeypatch.setattr("pdmesh.connector.grpc.GrpcConnector._copy", lambda *arguments: "error:broken")
    drop = "corrupt" if reason == "corrupt" else "pull_failed"

    async def scenario() -> None:
        async with (
            running_tier() as tier,
            running_engine("prefill", connectors=("shm", "grpc")) as prefill,
        ):
            prefill.fill([0], seed=1)
            await prefill.store(tier, chain("prompt", 1), [0])
            assert await tier.until("store_blocks_dropped_total", at_least(1), reason=drop) == 1
            assert (await tier.stats()).num_used == 0

    asyncio.run(scenario())


def test_blocks_that_are_not_what_the_engine_summed_are_dropped_and_those_before_them_kept() -> None:
    async def scenario() -> None:
        keys = chain("prompt", 12)
        async with running_tier() as tier, running_engine("prefill") as prefill:
            ids = list(range(12))
            prefill.fill(ids, seed=1)
            sums = sum_blocks(prefill.pool.blocks, ids).tolist()
            prefill.pool.blocks[7, 100] ^= 1
            assert await prefill.store(tier, keys, ids, checksums=sums) == 12
            assert await tier.until("store_blocks_dropped_total", at_least(5), reason="corrupt") == 5
            assert await tier.num_hits(keys) == 7

    asyncio.run(scenario())


def test_a_block_whose_sum_an_engine_does_not_tell_is_summed_here_and_the_others_are_checked() -> None:
    async def scenario() -> None:
        keys, other = chain("prompt", 3), chain("other", 3)
        async with running_tier() as tier, running_engine("prefill") as prefill:
            prefill.fill([0, 1, 2], seed=1)
            sums = sum_blocks(prefill.pool.blocks, [0, 1, 2]).tolist()
            await prefill.store(tier, keys, [0, 1, 2], checksums=[0, 0, sums[2]])
            await tier.until("store_blocks_committed_total", at_least(3))
            assert list((await tier.lookup(keys, transfer_id="t1")).blocks.checksums) == sums
            await prefill.store(tier, other, [0, 1, 2], checksums=[0, sums[1], sums[2] ^ 1])
            assert await tier.until("store_blocks_dropped_total", at_least(1), reason="corrupt") == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("tells_sums", [True, False])
def test_a_block_that_is_damaged_in_the_arena_reaches_nobody(tells_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[Arena] = []
    make = Arena.__init__

    def remember(arena: Arena, *arguments: Any, **named: Any) -> None:
        make(arena, *arguments, **named)
        arenas.append(arena)

    monkeypatch.setattr(Arena, "__init__", remember)

    async def scenario() -> None:
        keys = chain("prompt", 5)
        async with (
            running_tier() as tier,
            running_engine("prefill") as prefill,
            running_engine("decode") as decode,
        ):
            prefill.fill(list(range(5)), seed=1)
            await prefill.store(tier, keys, list(range(5)), checksums=None if tells_sums else [])
            await tier.until("store_blocks_committed_total", at_least(5))
            [arena] = arenas
            slot = arena.index.slot_of(keys[3])
            assert slot is not None
            arena.pool.blocks[slot, 4000] ^= 0x80
            reply = await tier.lookup(keys, transfer_id="t1")
            assert (await decode.pull(tier, reply)).reason == "corrupt"
            assert await tier.end("t1", committed=False, reason="corrupt")
            assert await tier.metric("damaged_blocks_total") == 1
            # What was good stays, and the bad one may come again.
            assert await tier.num_hits(keys) == 3
            assert (await tier.stats()).num_pinned == 0
            assert await prefill.store(tier, keys, list(range(5))) == 1
            await tier.until("store_blocks_committed_total", at_least(6))
            assert (await decode.pull(tier, await tier.lookup(keys, transfer_id="t2"))).reason == ""
            assert await tier.end("t2")

    asyncio.run(scenario())


def test_without_checksums_nothing_is_told_or_checked() -> None:
    async def scenario() -> None:
        keys = chain("prompt", 3)
        async with running_tier(kv_checksums=False) as tier, running_engine("prefill") as prefill:
            prefill.fill([0, 1, 2], seed=1)
            assert await prefill.store(tier, keys, [0, 1, 2], checksums=[1, 2, 3]) == 3
            await tier.until("store_blocks_committed_total", at_least(3))
            reply = await tier.lookup(keys, transfer_id="t1")
            assert (reply.num_hits, list(reply.blocks.checksums)) == (3, [])

    asyncio.run(scenario())


def test_hit_is_a_leading_run_of_the_request() -> None:
    async def scenario() -> None:
        keys = chain("prompt", 4)
        async with running_tier() as tier, running_engine("prefill") as prefill:
            prefill.fill([0, 1, 2], seed=1)
            await prefill.store(tier, [keys[0], keys[1], keys[3]], [0, 1, 2])
            await tier.until("slots_used", at_least(3))
            assert await tier.num_hits(keys) == 2
            assert await tier.num_hits(keys[2:]) == 0

    asyncio.run(scenario())


def test_two_engines_storing_at_once_keep_each_block_once() -> None:
    async def scenario() -> None:
        shared, own = chain("shared", 8), chain("own", 8)
        async with (
            running_tier() as tier,
            running_engine("prefill-0") as first,
            running_engine("prefill-1") as second,
        ):
            ids = list(range(16))
            for engine, keys in ((first, shared), (second, shared + own)):
                engine.fill(ids, seed=7)
                assert len(keys) <= 16
            await asyncio.gather(
                first.store(tier, shared, ids[:8]),
                second.store(tier, shared + own, ids),
                *(first.store(tier, shared[:num], ids[:num]) for num in range(1, 8)),
            )
            await tier.until("slots_used", at_least(16))
            assert await tier.num_hits(shared) == 8
            assert await tier.num_hits(own) == 8
            assert (await tier.stats()).num_used == 16
            reply = await tier.lookup(shared)
            assert (await second.pull(tier, reply)).reason == ""
            assert np.array_equal(second.pool.blocks[:8], first.pool.blocks[:8])

    asyncio.run(scenario())


def test_pinned_blocks_stay_and_others_make_room() -> None:
    async def scenario() -> None:
        pinned, others = chain("pinned", 6), [chain(f"other-{at}", 6) for at in range(4)]
        async with running_tier(arena_bytes=ARENA_OF_16_BYTES) as tier, running_engine("prefill") as prefill:
            ids = list(range(6))
            content = prefill.fill(ids, seed=1)
            await prefill.store(tier, pinned, ids)
            await tier.until("slots_used", at_least(6))
            reply = await tier.lookup(pinned, transfer_id="reader")
            for at, keys in enumerate(others):
                prefill.fill(ids, seed=10 + at)
                await prefill.store(tier, keys, ids)
                await tier.until("store_blocks_committed_total", at_least(6 * (at + 2)))
            assert await tier.metric("evictions_total") == 30 - 16
            assert (await prefill.pull(tier, reply)).reason == ""
            assert np.array_equal(prefill.pool.blocks[:6], content)
            await tier.end("reader")
            assert await tier.num_hits(pinned) == 6
            assert await tier.num_hits(others[0]) == 0

    asyncio.run(scenario())


def test_slot_that_got_new_content_is_never_read_as_the_old_block() -> None:
    async def scenario() -> None:
        async with running_tier(arena_bytes=ARENA_OF_16_BYTES) as tier, running_engine("prefill") as prefill:
            ids = list(range(16))
            prefill.fill(ids, seed=1)
            await prefill.store(tier, chain("old", 16), ids)
            await tier.until("store_blocks_committed_total", at_least(16))
            late = await tier.lookup(chain("old", 16), transfer_id="late")
            await tier.end("late")
            prefill.fill(ids, seed=2)
            await prefill.store(tier, chain("new", 16), ids)
            await tier.until("store_blocks_committed_total", at_least(32))
            assert (await prefill.pull(tier, late)).reason == "stale"

    asyncio.run(scenario())


def test_lookup_that_nobody_ends_is_unpinned_when_its_lease_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.protocol.offers.TRANSFER_LEASE_S", 0.4)
    monkeypatch.setattr("pdmesh_kvcache.host.OFFER_LEASE_S", 0.1)

    async def scenario() -> None:
        keys = chain("prompt", 3)
        async with running_tier() as tier, running_engine("prefill") as prefill:
            prefill.fill([0, 1, 2], seed=1)
            await prefill.store(tier, keys, [0, 1, 2])
            await tier.until("slots_used", at_least(3))
            await tier.lookup(keys, transfer_id="forgotten")
            await tier.lookup(keys, transfer_id="renewed")
            for _ in range(6):
                await asyncio.sleep(0.1)
                request = pb.RenewTransfersRequest(transfer_ids=["renewed", "unknown"])
                reply = await tier.peer.RenewTransfers(request, timeout=5, metadata=tier.metadata)
                assert list(reply.ended) == ["unknown"]
            assert await tier.metric("open_lookups") == 1
            assert (await tier.stats()).num_pinned == 3
            assert not await tier.end("forgotten")
            await tier.until("slots_pinned", lambda value: value == 0)
            assert await tier.metric("open_lookups") == 0

    asyncio.run(scenario())


def test_failed_transfer_lets_go_at_once() -> None:
    async def scenario() -> None:
        async with running_tier() as tier, running_engine("prefill") as prefill:
            prefill.fill([0], seed=1)
            await prefill.store(tier, chain("prompt", 1), [0])
            await tier.until("slots_used", at_least(1))
            await tier.lookup(chain("prompt", 1), transfer_id="t")
            await tier.end("t", committed=False)
            assert (await tier.stats()).num_pinned == 0

    asyncio.run(scenario())


def test_engine_that_is_gone_or_restarted_costs_only_its_blocks() -> None:
    async def scenario() -> None:
        async with running_tier(store_timeout_s=1.0) as tier:
            async with running_engine("gone") as gone:
                gone.fill([0], seed=1)
                await gone.store(tier, chain("a", 1), [0])
                await tier.until("slots_used", at_least(1))
                await gone.store(tier, chain("b", 1), [0], owner_id="gone@1")
                await tier.until("store_blocks_dropped_total", at_least(1), reason="owner_gone")
            request = pb.StoreRequest(
                owner_id=gone.peer_id,
                owner_address=gone.address,
                keys=chain("c", 2),
                block_ids=[0, 1],
                generations=[1, 1],
                layout_fingerprint=LAYOUT,
                model_fingerprint=MODEL,
                block_bytes=BLOCK_BYTES,
            )
            await tier.stub.Store(request, timeout=5, metadata=tier.metadata)
            await tier.until("store_blocks_dropped_total", at_least(3))
            async with running_engine("alive") as alive:
                content = alive.fill([0, 1], seed=2)
                await alive.store(tier, chain("c", 2), [0, 1])
                await tier.until("slots_used", at_least(3))
                assert (await alive.pull(tier, await tier.lookup(chain("c", 2)))).reason == ""
                assert np.array_equal(alive.pool.blocks[:2], content)

    asyncio.run(scenario())


def test_pool_of_an_idle_engine_does_not_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh_kvcache.puller.PEER_IDLE_S", 0.3)

    def num_maps() -> int:
        return Path("/proc/self/maps").read_text().count("pdmesh-idler")

    async def scenario() -> None:
        async with running_tier() as tier, running_engine("idler") as idler:
            assert num_maps() == 1
            for at in range(2):
                idler.fill([at], seed=at)
                await idler.store(tier, chain(f"prompt {at}", 1), [at])
                await tier.until("slots_used", at_least(at + 1))
                assert num_maps() == 2
                deadline = time.monotonic() + 5
                while num_maps() > 1:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_stores_over_the_bound_are_dropped_and_counted() -> None:
    async def scenario() -> None:
        settings = {"max_queued_stores": 1, "num_store_workers": 1, "store_timeout_s": 0.5}
        # Nobody answers at this engine's address: the one worker is busy, one store waits, the rest is too much.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with running_tier(**settings) as tier, running_engine("silent") as silent:
                silent.address = f"127.0.0.1:{listener.getsockname()[1]}"
                accepted = [await silent.store(tier, chain(f"p{at}", 2), [0, 1]) for at in range(4)]
                assert accepted[0] == 2
                assert accepted[3] == 0
                assert await tier.metric("store_blocks_dropped_total", reason="queue_full") >= 2
                await tier.until("store_blocks_dropped_total", at_least(8))

    asyncio.run(scenario())


def test_layouts_share_the_arena_and_never_blocks() -> None:
    async def scenario() -> None:
        keys = chain("prompt", 4)
        settings = {"arena_bytes": 2 * ARENA_OF_16_BYTES, "max_layouts": 2}
        async with (
            running_tier(**settings) as tier,
            running_engine("a", layout="layout-a") as a,
            running_engine("b", layout="layout-b") as b,
        ):
            ids = [0, 1, 2, 3]
            a.fill(ids, seed=1)
            await a.store(tier, keys, ids)
            await tier.until("slots_used", at_least(4))
            assert (await tier.stats()).num_slots > 30
            assert await tier.num_hits(keys, layout="layout-b") == 0
            await tier.lookup(keys, transfer_id="reader")

            # b asks for half: a is emptied, but not while somebody reads from it.
            content = b.fill(ids, seed=2)
            await b.store(tier, keys, ids, layout="layout-b")
            await tier.until("store_blocks_dropped_total", at_least(4), reason="no_arena")
            assert await tier.num_hits(keys) == 0
            await tier.end("reader")
            await b.store(tier, keys, ids, layout="layout-b")
            await tier.until("slots_used", lambda value: value == 4)
            assert await tier.num_hits(keys) == 0
            await a.store(tier, keys, ids)
            await tier.until("slots_used", at_least(8))
            stats = await tier.stats()
            assert stats.num_slots == 32
            assert await tier.metric("slot_bytes") <= 2 * ARENA_OF_16_BYTES

            reply = await tier.lookup(keys, layout="layout-b")
            assert (await b.pull(tier, reply, layout="layout-b")).reason == ""
            assert np.array_equal(b.pool.blocks[:4], content)
            # Both parts are taken.
            await b.store(tier, keys, ids, layout="layout-c")
            await tier.until("store_blocks_dropped_total", at_least(8), reason="no_arena")

    asyncio.run(scenario())


def test_consumer_shakes_hands_with_the_arena_of_its_layout_only() -> None:
    async def attach(pool: Any, name: str) -> None:
        assert name == "shm"

    async def reach(address: str, layout: str, block_bytes: list[int]) -> tuple[str, int]:
        directory = PeerDirectory(
            "engine-y@1",
            MeshSecret(SECRET),
            ["shm"],
            MODEL,
            [layout],
            attach,
            lambda peer_id: None,
            block_bytes=block_bytes,
        )
        async with directory as peers:
            peer = await peers.reach(address, 5)
            return peer.peer_id, peer.block_bytes

    async def scenario() -> None:
        async with running_tier() as tier:
            with pytest.raises(Exception, match="no arena for layout layout-a"):
                await reach(tier.address, "layout-a", [])
            a, a_bytes = await reach(tier.address, "layout-a", [4096])
            b, b_bytes = await reach(tier.address, "layout-b", [8192])
            assert (a_bytes, b_bytes) == (4096, 8192)
            assert a != b
            assert (await reach(tier.address, "layout-b", []))[0] == b
            with pytest.raises(Exception, match="block_bytes differ"):
                await reach(tier.address, "layout-b", [4096])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (pb.LookupRequest(transfer_id="t", consumer_id="e@1", keys=[b"short"]), "32 bytes"),
        (pb.LookupRequest(transfer_id="t", consumer_id="e@1", keys=chain("x", 9)), "at most 8"),
        (pb.LookupRequest(consumer_id="e@1", keys=chain("x", 1)), "transfer_id"),
    ],
)
def test_malformed_lookup_is_refused_with_the_field(request_: pb.LookupRequest, complaint: str) -> None:
    async def scenario() -> None:
        request_.layout_fingerprint, request_.model_fingerprint = LAYOUT, MODEL
        async with running_tier(max_keys=8) as tier:
            with pytest.raises(grpc.aio.AioRpcError, match=complaint) as caught:
                await tier.stub.Lookup(request_, timeout=5, metadata=tier.metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_malformed_store_and_a_stranger_are_refused() -> None:
    async def scenario() -> None:
        async with running_tier() as tier, running_engine("prefill") as prefill:
            with pytest.raises(grpc.aio.AioRpcError, match="equal length"):
                await prefill.store(tier, chain("x", 2), [0])
            with pytest.raises(grpc.aio.AioRpcError, match="mesh secret"):
                await tier.stub.Stats(pb.StatsRequest(), timeout=5)
            # Ids outside the engine's pool: the pull fails, the service goes on.
            await prefill.store(tier, chain("x", 1), [10_000], generations=[1])
            await tier.until("store_blocks_dropped_total", at_least(1), reason="pull_failed")
            await tier.lookup(chain("x", 1), transfer_id="used")
            assert (await tier.stats()).num_pinned == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("block_bytes", [1, 511, 1 << 40])
def test_absurd_block_bytes_are_refused_with_the_limit(block_bytes: int) -> None:
    """One handshake with blocks of one byte booked 40 million slots, and the service stood still for seconds."""

    async def scenario() -> None:
        async with running_tier() as tier:
            hello = pb.HandshakeRequest(
                model_fingerprint=MODEL, layout_fingerprints=[LAYOUT], block_bytes=[block_bytes], protocol_max=1
            )
            store = pb.StoreRequest(
                model_fingerprint=MODEL,
                layout_fingerprint=LAYOUT,
                owner_id="engine-x@1",
                owner_address="127.0.0.1:1",
                block_bytes=block_bytes,
            )
            for call, request in ((tier.peer.Handshake, hello), (tier.stub.Store, store)):
                with pytest.raises(grpc.aio.AioRpcError, match="block_bytes must be 4096 to 1073741824") as refused:
                    await call(request, timeout=5, metadata=tier.metadata)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await tier.metric("layouts") == 0

    asyncio.run(scenario())


def test_arena_has_a_bounded_number_of_slots(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("pdmesh_kvcache.arenas.MAX_SLOTS", 10)

    async def scenario() -> None:
        async with running_tier(arena_bytes=1 << 20) as tier, running_engine("prefill") as prefill:
            await prefill.store(tier, chain("x", 12), list(range(12)))
            await tier.until("slots_used", at_least(10))
            assert (await tier.stats()).num_slots == 10

    asyncio.run(scenario())
    assert any("leaves memory unused" in record.message for record in caplog.records)


def test_transfer_id_of_a_running_lookup_is_not_taken_twice() -> None:
    async def scenario() -> None:
        async with running_tier() as tier, running_engine("prefill") as prefill:
            prefill.fill([0], seed=1)
            await prefill.store(tier, chain("x", 1), [0])
            await tier.until("slots_used", at_least(1))
            await tier.lookup(chain("x", 1), transfer_id="t")
            with pytest.raises(grpc.aio.AioRpcError, match="used before"):
                await tier.lookup(chain("x", 1), transfer_id="t")
            assert (await tier.stats()).num_pinned == 1
            await tier.end("t")
            assert (await tier.stats()).num_pinned == 0

    asyncio.run(scenario())


def test_block_larger_than_the_arena_is_refused_not_fatal() -> None:
    async def scenario() -> None:
        async with (
            running_tier(arena_bytes=1 << 16) as tier,
            running_engine("big", num_blocks=1, block_bytes=1 << 17) as big,
        ):
            await big.store(tier, chain("x", 1), [0])
            await tier.until("store_blocks_dropped_total", at_least(1), reason="no_arena")

    asyncio.run(scenario())
