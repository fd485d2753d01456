"""Valkey behind the tier: blocks outlive the service, bounds hold, damage is a miss, and its death costs hits only."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from pdmesh import embedded_valkey
from pdmesh.errors import ConfigError, PeerUnavailable
from pdmesh.security import MeshSecret
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.valkey import INDEX_KEY, SIZES_KEY, Valkey
from pdmesh_kvcache.value import encode, storage_key
from support.tier import BLOCK_BYTES, LAYOUT, SECRET, Engine, RunningTier, chain, running_engine, running_tier

pytestmark = pytest.mark.timeout(60)

ARENA_OF_16_BYTES = 4096 + 16 * (BLOCK_BYTES + 8)
SERVERS = {"valkey": embedded_valkey.find_binary(), "redis": Path(shutil.which("redis-server") or "")}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[embedded_valkey.EmbeddedValkey]:
    binary = SERVERS[request.param]
    if not binary.name:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    started = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=64 << 20, binary=binary)
    yield started
    started.stop()


def at_least(num: float) -> Any:
    return lambda value: value >= num


def equals(num: float) -> Any:
    return lambda value: value == num


async def stored(tier: RunningTier, engine: Engine, keys: list[bytes], seed: int) -> np.ndarray[Any, Any]:
    """Store blocks and wait until they are in Valkey."""
    before = await tier.metric("backing_writes_total")
    ids = list(range(len(keys)))
    content = engine.fill(ids, seed)
    assert await engine.store(tier, keys, ids) == len(keys)
    await tier.until("backing_writes_total", at_least(before + len(keys)))
    return content


def test_blocks_outlive_the_service(server: embedded_valkey.EmbeddedValkey) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 5)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=server.url) as tier:
                assert await tier.metric("backing_up") == 1
                content = await stored(tier, prefill, keys, seed=1)
            # Batches smaller than the run: more than one round trip.
            async with running_tier(valkey=server.url, valkey_batch_bytes=1 << 16) as tier:
                prefill.fill([0, 1, 2, 3, 4], seed=2)
                reply = await tier.lookup([*keys, *chain("unknown", 3)])
                assert (reply.num_hits, reply.num_arena, reply.num_backing) == (5, 0, 5)
                assert (await prefill.pull(tier, reply)).reason == ""
                assert np.array_equal(prefill.pool.blocks[:5], content)
                again = await tier.lookup(keys)
                assert (again.num_hits, again.num_arena, again.num_backing) == (5, 5, 0)
                assert await tier.metric("hits_total", source="backing") == 5
                assert await tier.num_hits(keys, layout="layout-other") == 0

    asyncio.run(scenario())


def test_hits_behind_the_arena_continue_those_in_it(valkey: embedded_valkey.EmbeddedValkey) -> None:
    async def scenario() -> None:
        long, other = chain("long", 20), chain("other", 12)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, long, seed=1)
            async with running_tier(valkey=valkey.url, arena_bytes=ARENA_OF_16_BYTES) as tier:
                await stored(tier, prefill, other, seed=2)
                # 16 slots: 4 of the long chain fit, then the other one goes; the end of the chain finds no slot.
                reply = await tier.lookup(long, transfer_id="t")
                assert (reply.num_hits, reply.num_arena, reply.num_backing) == (16, 0, 16)
                assert await tier.metric("lookups_cut_total", reason="full") >= 1
                await tier.end("t")
                reply = await tier.lookup([*long[:16], *other])
                assert (reply.num_hits, reply.num_arena) == (16, 16)

    asyncio.run(scenario())


@pytest.mark.parametrize("broken", [(INDEX_KEY,), (SIZES_KEY,), (INDEX_KEY, SIZES_KEY)])
def test_book_of_a_wrong_type_is_rebuilt_from_the_values(
    valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis, broken: tuple[str, ...]
) -> None:
    """Every write was refused until somebody flushed the server."""

    async def scenario() -> None:
        async with running_tier(valkey=valkey.url) as tier, running_engine("prefill") as prefill:
            keys = chain("old", 3)
            await stored(tier, prefill, keys, seed=1)
            size = client.strlen(storage_key(LAYOUT, keys[0]))
            for name in broken:
                client.delete(name)
                client.set(name, b"not a book")
            # One of the values is no value any more either.
            client.delete(storage_key(LAYOUT, keys[2]))
            client.hset(storage_key(LAYOUT, keys[2]), "a", "b")
            await stored(tier, prefill, chain("new", 1), seed=2)
            assert client.zcard(INDEX_KEY) == 3
            assert int(client.hget(SIZES_KEY, "total")) == 3 * size
            client.hset(SIZES_KEY, mapping={"total": "many", storage_key(LAYOUT, keys[0]): "large"})
            await stored(tier, prefill, chain("newer", 1), seed=3)
            assert int(client.hget(SIZES_KEY, "total")) == 4 * size

    asyncio.run(scenario())


def test_damaged_values_are_one_line_of_log(
    valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Each block was a line: a damaged store flooded the log."""

    async def scenario() -> None:
        keys = chain("damaged", 6)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, keys, seed=1)
            for key in keys:
                client.setrange(storage_key(LAYOUT, key), 100, b"\0\1\2\3")
            async with running_tier(valkey=valkey.url) as tier:
                for key in keys:
                    assert await tier.num_hits([key]) == 0
                assert await tier.metric("values_rejected_total", reason="mac") == 6

    asyncio.run(scenario())
    assert sum("failed their check" in record.message for record in caplog.records) == 1


def test_values_expire_and_leave_the_book(valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis) -> None:
    async def scenario() -> None:
        async with (
            running_tier(valkey=valkey.url, valkey_ttl_s=1) as tier,
            running_engine("prefill") as prefill,
        ):
            await stored(tier, prefill, chain("old", 2), seed=1)
            name = storage_key(LAYOUT, chain("old", 2)[0])
            assert 0 < client.pttl(name) <= 1000
            await asyncio.sleep(1.2)
            assert client.get(name) is None
            await stored(tier, prefill, chain("new", 1), seed=2)
            assert client.zcard(INDEX_KEY) == 1

    asyncio.run(scenario())


def test_size_bound_removes_what_was_used_longest_ago(
    valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis
) -> None:
    client = redis.Redis.from_url(valkey.url)
    first, second, third = chain("first", 3), chain("second", 3), chain("third", 3)

    def present(keys: list[bytes]) -> int:
        return client.exists(*(storage_key(LAYOUT, key) for key in keys))

    async def scenario() -> None:
        # Room for eight values of a block and a header.
        bound = 8 * (BLOCK_BYTES + 200)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url, valkey_max_bytes=bound) as tier:
                await stored(tier, prefill, first, seed=1)
                await stored(tier, prefill, second, seed=2)
            async with running_tier(valkey=valkey.url, valkey_max_bytes=bound) as tier:
                # Fetched again, the first chain is no longer the oldest.
                assert (await tier.lookup(first)).num_backing == 3
                deadline = time.monotonic() + 5
                scores = [min(client.zmscore(INDEX_KEY, [storage_key(LAYOUT, key) for key in first]))]
                while scores[0] < max(client.zmscore(INDEX_KEY, [storage_key(LAYOUT, key) for key in second])):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
                    scores[0] = min(client.zmscore(INDEX_KEY, [storage_key(LAYOUT, key) for key in first]))
                await stored(tier, prefill, third, seed=3)
                assert (present(first), present(second), present(third)) == (3, 2, 3)
                total = int(client.hget(SIZES_KEY, "total"))
                names = client.keys("pdmesh:v1:layout*")
                assert total == sum(client.strlen(name) for name in names) <= bound
                # The book was lost: it is made anew from the values.
                client.delete(SIZES_KEY)
                await stored(tier, prefill, chain("fourth", 1), seed=4)
                assert int(client.hget(SIZES_KEY, "total")) == sum(
                    client.strlen(name) for name in client.keys("pdmesh:v1:layout*")
                )

    asyncio.run(scenario())


def _flip(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def _forged(keys: list[bytes], value: bytes) -> bytes:
    return encode(MeshSecret("another secret, not the mesh's"), LAYOUT, keys[1], bytes(BLOCK_BYTES))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda keys, values: _flip(values[1]), "mac"),
        (lambda keys, values: values[1][:-1], "mac"),
        (lambda keys, values: values[1] + bytes(8 << 20), "mac"),
        (lambda keys, values: b"", "short"),
        (lambda keys, values: values[2], "key"),
        (lambda keys, values: _forged(keys, values[1]), "mac"),
        (lambda keys, values: encode(MeshSecret(SECRET), "layout-other", keys[1], bytes(BLOCK_BYTES)), "layout"),
        (lambda keys, values: encode(MeshSecret(SECRET), LAYOUT, keys[1], bytes(BLOCK_BYTES - 1)), "length"),
    ],
    ids=["flipped", "cut", "huge", "emptied", "moved", "forged", "other-layout", "other-size"],
)
def test_damaged_value_is_a_miss_and_is_removed(
    valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis, damage: Any, reason: str
) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 3)
        names = [storage_key(LAYOUT, key) for key in keys]
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, keys, seed=1)
            client.set(names[1], damage(keys, client.mget(names)))
            async with running_tier(valkey=valkey.url) as tier:
                assert await tier.num_hits(keys) == 1
                assert await tier.metric("values_rejected_total", reason=reason) == 1
                # Whoever can write there cannot fill our memory.
                assert await tier.metric("backing_read_bytes_total") < 4 * BLOCK_BYTES
                deadline = time.monotonic() + 5
                while client.exists(names[1]):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
                assert client.zscore(INDEX_KEY, names[1]) is None
                # The engine computes it again, and all is well.
                await prefill.store(tier, keys, [0, 1, 2])
                await tier.until("store_blocks_committed_total", at_least(1))
                assert await tier.num_hits(keys) == 3

    asyncio.run(scenario())


def test_valkey_that_is_down_at_the_start_is_used_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "v"

    async def scenario() -> None:
        keys = chain("prompt", 2)
        url = embedded_valkey.prepare(folder, maxmemory_bytes=64 << 20).url
        async with running_tier(valkey=url) as tier, running_engine("prefill") as prefill:
            assert await tier.metric("backing_up") == 0
            assert not (await tier.stats()).backing_up
            prefill.fill([0, 1], seed=1)
            await prefill.store(tier, keys, [0, 1])
            await tier.until("backing_writes_dropped_total", at_least(2), reason="down")
            assert await tier.num_hits(keys) == 2
            await asyncio.sleep(1.0)
            assert sum("is down" in record.message for record in caplog.records) == 1
            server = embedded_valkey.start(folder, maxmemory_bytes=64 << 20)
            try:
                await tier.until("backing_up", equals(1))
                await stored(tier, prefill, chain("later", 2), seed=2)
            finally:
                server.stop()

    asyncio.run(scenario())


def test_valkey_that_dies_and_comes_back_costs_hits_only(
    valkey: embedded_valkey.EmbeddedValkey, tmp_path: Path
) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 2)
        async with running_tier(valkey=valkey.url) as tier, running_engine("prefill") as prefill:
            await stored(tier, prefill, keys, seed=1)
            os.kill(valkey.process.pid, signal.SIGKILL)
            valkey.process.wait()
            assert await tier.num_hits([*keys, *chain("more", 2)]) == 2
            await tier.until("backing_up", equals(0))
            prefill.fill([0, 1], seed=2)
            await prefill.store(tier, chain("while down", 2), [0, 1])
            await tier.until("store_blocks_committed_total", at_least(4))
            assert await tier.num_hits(chain("while down", 2)) == 2
            back = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=64 << 20)
            try:
                await tier.until("backing_up", equals(1))
                await stored(tier, prefill, chain("later", 2), seed=3)
            finally:
                back.stop()

    asyncio.run(scenario())


def test_lookup_does_not_wait_for_a_valkey_that_hangs(valkey: embedded_valkey.EmbeddedValkey) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 2)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, keys, seed=1)
            async with running_tier(valkey=valkey.url, valkey_timeout_s=0.6) as tier:
                valkey.process.send_signal(signal.SIGSTOP)
                try:
                    started_s = time.monotonic()
                    assert await tier.num_hits(keys, remaining_ms=150) == 0
                    assert time.monotonic() - started_s < 0.5
                    assert await tier.metric("lookups_cut_total", reason="deadline") == 1
                    # The call's own deadline counts too.
                    assert await tier.num_hits(keys, remaining_ms=60_000, timeout_s=0.3) == 0
                    await tier.until("backing_up", equals(0))
                finally:
                    valkey.process.send_signal(signal.SIGCONT)
                await tier.until("backing_up", equals(1))
                # Answers to calls that were given up must not be taken for those of later ones.
                reply = await tier.lookup(keys)
                assert reply.num_backing == 2
                assert await tier.metric("values_rejected_total") == 0

    asyncio.run(scenario())


def test_server_that_refuses_writes_is_still_read(valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 2)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, keys, seed=1)
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            async with running_tier(valkey=valkey.url) as tier:
                prefill.fill([0, 1], seed=2)
                await prefill.store(tier, chain("refused", 2), [0, 1])
                await tier.until("backing_writes_dropped_total", at_least(2), reason="refused")
                assert await tier.metric("backing_up") == 1
                assert await tier.metric("backing_writable") == 0
                assert (await tier.lookup(keys)).num_backing == 2

    asyncio.run(scenario())


def test_write_queue_is_bounded(valkey: embedded_valkey.EmbeddedValkey) -> None:
    async def scenario() -> None:
        async with running_tier(valkey=valkey.url, max_queued_writes=4) as tier, running_engine("prefill") as prefill:
            prefill.fill(list(range(20)), seed=1)
            await prefill.store(tier, chain("prompt", 20), list(range(20)))
            await tier.until("backing_writes_dropped_total", at_least(16), reason="queue_full")
            assert await tier.num_hits(chain("prompt", 20)) == 20

    asyncio.run(scenario())


def test_shutdown_writes_what_is_queued(valkey: embedded_valkey.EmbeddedValkey) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 30)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url, valkey_batch_bytes=1 << 16) as tier:
                prefill.fill(list(range(30)), seed=1)
                await prefill.store(tier, keys, list(range(30)))
                await tier.until("store_blocks_committed_total", at_least(30))
            async with running_tier(valkey=valkey.url) as tier:
                assert (await tier.lookup(keys)).num_backing == 30

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:6379", "127.0.0.1:6379", "redis://127.0.0.1:999999/0", "redis://127.0.0.1:port/0"]
)
def test_url_that_is_none_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="valkey: "):
        Valkey(KVCacheConfig(valkey=url))


def test_password_is_not_shown() -> None:
    async def scenario() -> None:
        config = KVCacheConfig(valkey="redis://user:a-password@127.0.0.1:1/0")
        async with Valkey(config) as client:
            assert "a-password" not in client.shown_url
            with pytest.raises(PeerUnavailable) as caught:
                await client.ping()
            assert "a-password" not in caught.value.message
        assert "a-password" not in repr(config)

    asyncio.run(scenario())
