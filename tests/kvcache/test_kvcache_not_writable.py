"""A Valkey that is up and takes no writes, for a full disk or as a replica: it is read, and its state is seen."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import pytest
import redis

from pdmesh import embedded_valkey
from pdmesh_kvcache import backing
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.server import check
from support.tier import SECRET, Engine, RunningTier, chain, running_engine, running_tier

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "CHECK_INTERVAL_S", 0.1)


class FailingDisk:
    """Makes Valkey's snapshots fail, after which it answers MISCONF to writes and to pings."""

    def __init__(self, folder: Path, client: redis.Redis) -> None:
        # What a snapshot is renamed to.
        self._in_its_way = folder / "dump.rdb"
        self._client = client
        # Seldom enough that it makes none by itself.
        client.config_set("save", "86400 1000000")

    def fail(self) -> None:
        self._in_its_way.mkdir()
        assert self._snapshot() == "err"
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            self._client.ping()

    def recover(self) -> None:
        self._in_its_way.rmdir()
        assert self._snapshot() == "ok"

    def _snapshot(self) -> str:
        self._client.bgsave()
        deadline = time.monotonic() + 20
        while (state := self._client.info("persistence"))["rdb_bgsave_in_progress"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return str(state["rdb_last_bgsave_status"])


async def stored(tier: RunningTier, engine: Engine, keys: list[bytes], seed: int) -> None:
    """Store blocks and wait until they are in Valkey."""
    before = await tier.metric("backing_writes_total")
    await offer(tier, engine, keys, seed)
    await tier.until("backing_writes_total", lambda value: value == before + len(keys))


async def offer(tier: RunningTier, engine: Engine, keys: list[bytes], seed: int) -> None:
    ids = list(range(len(keys)))
    engine.fill(ids, seed)
    assert await engine.store(tier, keys, ids) == len(keys)


async def refused(tier: RunningTier, engine: Engine, keys: list[bytes], seed: int) -> None:
    """Store blocks that stay in the arena alone."""
    before = await tier.metric("backing_writes_dropped_total", reason="refused")
    await offer(tier, engine, keys, seed)
    await tier.until("backing_writes_dropped_total", lambda value: value == before + len(keys), reason="refused")
    assert await tier.num_hits(keys) == len(keys)


def is_set(value: float) -> bool:
    return value == 1


@pytest.fixture
def failing_disk(valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis, tmp_path: Path) -> FailingDisk:
    return FailingDisk(tmp_path / "v", client)


def test_server_whose_disk_has_failed_is_still_read(
    valkey: embedded_valkey.EmbeddedValkey, failing_disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers pings by MISCONF too, and was taken for down: all that it held was computed again."""

    async def scenario() -> None:
        keys, config = chain("prompt", 2), KVCacheConfig(valkey=valkey.url, secret=SECRET, port=0, grpc_port=0)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, keys, seed=1)
                failing_disk.fail()
                await refused(tier, prefill, chain("refused", 2), seed=2)
                assert await tier.health() == {
                    "status": "ok",
                    "backing_up": True,
                    "backing_writable": False,
                    "layouts": 1,
                }
            # What `pdmesh kvcache` looks at first: it ended with code 2.
            await check(config)
            async with running_tier(valkey=valkey.url) as tier:
                assert await tier.metric("backing_writable") == 0
                assert (await tier.lookup(keys)).num_backing == 2
                # Known before it was tried.
                await refused(tier, prefill, chain("refused too", 2), seed=3)
                failing_disk.recover()
                await tier.until("backing_writable", is_set)
                await stored(tier, prefill, chain("later", 2), seed=4)
                assert await tier.metric("backing_up") == 1

    with caplog.at_level(logging.INFO, "pdmesh_kvcache.backing"):
        asyncio.run(scenario())
    told = [record.message.split(": ")[0].split(" ", 1)[1] for record in caplog.records if "writes" in record.message]
    refusal, recovery = "takes no writes, blocks in it are still read", "takes writes again"
    # By the one service, and by the other.
    assert told == [refusal, refusal, recovery]
    assert not any("is down" in record.message for record in caplog.records)


def test_replica_is_read_and_known_not_to_take_writes(
    valkey: embedded_valkey.EmbeddedValkey, client: redis.Redis
) -> None:
    async def scenario() -> None:
        keys = chain("prompt", 2)
        async with running_engine("prefill") as prefill:
            async with running_tier(valkey=valkey.url) as tier:
                await stored(tier, prefill, keys, seed=1)
            # Of nobody who is there: it serves what it has.
            client.replicaof("127.0.0.1", "1")
            async with running_tier(valkey=valkey.url) as tier:
                # Known before anything was to be written: pings are answered.
                assert await tier.health() == {
                    "status": "ok",
                    "backing_up": True,
                    "backing_writable": False,
                    "layouts": 0,
                }
                assert (await tier.lookup(keys)).num_backing == 2
                client.replicaof("NO", "ONE")
                await tier.until("backing_writable", is_set)
                await stored(tier, prefill, chain("later", 2), seed=2)

    asyncio.run(scenario())
