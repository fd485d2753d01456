"""KV events: their bytes as vLLM's consumers read them, their settings, and what the publisher promises over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from pdmesh.config import EngineConfig
from pdmesh.engine import kv_events
from pdmesh.engine.block_hash import BlockHasher, ExtraKeys
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.kv_events_config import (
    KVEventsConfig,
    bound_address,
    check_addresses,
    kv_events_config,
    make_event_log,
)
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.messages import PrefixCacheReset, ResetPrefixCache
from pdmesh.engine.server.kv_event_publisher import KVEventPublisher
from pdmesh.engine.server.prefix_cache_reset import MAX_WAITING, PrefixCacheResets
from pdmesh.errors import ConfigError, Overloaded, PeerUnavailable

FULL, SLIDING = KVGroup(16), KVGroup(16, "sliding", 64)
KEYS = [bytes([number]) * 32 for number in range(1, 6)]
INTS = [int.from_bytes(key[-8:], "big") for key in KEYS]


def taken(log: KVEventLog) -> list[Any]:
    """The events of a batch, read without any of our types."""
    ts, events, rank = msgspec.msgpack.decode(log.take())
    assert abs(ts - time.time()) < 60
    assert rank == 0
    assert isinstance(events, list)
    return events


def test_a_stored_event_has_vllms_fields() -> None:
    log = KVEventLog([FULL])
    log.stored(0, KEYS[:2], None, list(range(32)), 16)
    assert taken(log) == [
        {
            "type": "BlockStored",
            "block_hashes": INTS[:2],
            "parent_block_hash": None,
            "token_ids": list(range(32)),
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def test_a_sliding_group_says_its_window_and_extra_keys_are_untagged() -> None:
    log = KVEventLog([FULL, SLIDING])
    extras = ExtraKeys(cache_salt="tenant", lora_name="sql", lora_path="/adapters/sql")
    log.stored(1, KEYS[:2], None, list(range(32)), 16, extras)
    log.stored(1, KEYS[2:3], KEYS[1], list(range(16)), 16, extras)
    first, second = taken(log)
    assert first["kv_cache_spec_kind"] == "sliding_window"
    assert first["kv_cache_spec_sliding_window"] == 64
    assert first["group_idx"] == 1
    assert first["lora_name"] == "sql"
    assert first["extra_keys"] == [["sql", "tenant"], ["sql"]]
    assert second["parent_block_hash"] == INTS[1]
    assert second["extra_keys"] == [["sql"]]


def test_names_are_told_whole_when_asked_for() -> None:
    log = KVEventLog([FULL], use_int_block_hashes=False)
    log.stored(0, KEYS[1:2], KEYS[0], list(range(16)), 16)
    log.removed(0, KEYS[:1])
    stored, removed = taken(log)
    assert stored["block_hashes"] == KEYS[1:2]
    assert stored["parent_block_hash"] == KEYS[0]
    assert removed == {"type": "BlockRemoved", "block_hashes": KEYS[:1], "medium": "GPU", "group_idx": 0}


def test_older_consumers_get_arrays_in_vllms_order() -> None:
    log = KVEventLog([FULL, SLIDING], as_arrays=True)
    log.cleared()
    log.stored(1, KEYS[1:2], KEYS[0], list(range(16)), 16)
    log.removed(0, KEYS[:1])
    log.removed(0, KEYS[1:2])
    assert taken(log) == [
        ["AllBlocksCleared"],
        ["BlockStored", INTS[1:2], INTS[0], list(range(16)), 16, None, "GPU", None, [None], 1, "sliding_window", 64],
        ["BlockRemoved", INTS[:2], "GPU", 0],
    ]


def test_short_names_become_their_last_64_bits() -> None:
    chain: list[bytes] = []
    BlockHasher("xxhash", "s", 16).extend(chain, np.arange(16))
    log = KVEventLog([FULL])
    log.stored(0, chain, None, list(range(16)), 16)
    assert taken(log)[0]["block_hashes"] == [int.from_bytes(chain[0], "big") % 2**64]


def test_removals_in_a_row_are_one_event_per_group() -> None:
    log = KVEventLog([FULL, SLIDING])
    for group, key in ((0, 0), (0, 1), (1, 2), (0, 3)):
        log.removed(group, [KEYS[key]])
    log.stored(0, KEYS[4:], None, list(range(16)), 16)
    log.removed(0, [KEYS[4]])
    events = taken(log)
    assert [(event["type"], event["group_idx"], event["block_hashes"]) for event in events] == [
        ("BlockRemoved", 0, INTS[:2]),
        ("BlockRemoved", 1, INTS[2:3]),
        ("BlockRemoved", 0, INTS[3:4]),
        ("BlockStored", 0, INTS[4:]),
        ("BlockRemoved", 0, INTS[4:]),
    ]


def test_clearing_voids_what_was_before_and_nothing_behind() -> None:
    log = KVEventLog([FULL])
    log.stored(0, KEYS[:1], None, list(range(16)), 16)
    log.cleared()
    log.removed(0, KEYS[1:2])
    assert [event["type"] for event in taken(log)] == ["AllBlocksCleared", "BlockRemoved"]
    assert not log.has_events
    assert log.take() == b""


def test_a_log_that_overflows_tells_its_consumers_to_forget_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_EVENTS", 4)
    log = KVEventLog([FULL])
    for number in range(6):
        log.stored(0, [bytes([number]) * 32], None, list(range(16)), 16)
    events = taken(log)
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored", "BlockStored"]


# ---- settings ------------------------------------------------------------------------------------


def parsed(values: Any, **fields: Any) -> KVEventsConfig | None:
    text = values if isinstance(values, str) else json.dumps(values)
    return kv_events_config(EngineConfig(kv_events_config=text, **fields))


def test_vllms_json_and_defaults() -> None:
    settings = parsed({"enable_kv_cache_events": True})
    assert settings is not None
    assert settings.endpoint == "tcp://*:5557"
    assert settings.replay_endpoint is None
    assert (settings.buffer_steps, settings.hwm, settings.max_queue_size) == (10_000, 100_000, 100_000)
    assert settings.topic == ""
    for off in ("", "{}", {"enable_kv_cache_events": False}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert parsed(off) is None
        assert (
            make_event_log(EngineConfig(kv_events_config=off if isinstance(off, str) else json.dumps(off)), [FULL])
            is None
        )
    log = make_event_log(
        EngineConfig(kv_events_config='{"enable_kv_cache_events": true, "use_int_block_hashes": false}'), [FULL]
    )
    assert log is not None
    log.removed(0, KEYS[:1])
    assert taken(log)[0]["block_hashes"] == KEYS[:1]


ON = {"enable_kv_cache_events": True}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ("{", ["is not JSON"]),
        ("[" * 100_000, ["is not JSON"]),
        ("[1]", ["is not a JSON object"]),
        (ON | {"endpont": "x"}, ["unknown key 'endpont'", "replay_endpoint"]),
        (ON | {"hwm": 0}, ["hwm", "greater than or equal to 1", "got 0"]),
        (ON | {"buffer_steps": -1}, ["buffer_steps", "-1"]),
        (ON | {"buffer_steps": "many"}, ["buffer_steps", "many"]),
        (ON | {"publisher": "kafka"}, ["publisher", "'zmq'", "'null'", "kafka"]),
        (ON | {"topic": "t" * 300}, ["topic", "256"]),
        ({"enable_kv_cache_events": "yes"}, ["enable_kv_cache_events", "yes"]),
        (ON | {"endpoint": "http://*:5557"}, ["endpoint", "http://*:5557", "tcp://*:PORT"]),
        (ON | {"endpoint": "inproc://events"}, ["endpoint", "inproc"]),
        (ON | {"endpoint": "tcp://*:70000"}, ["endpoint", "70000", "0…65535"]),
        (ON | {"endpoint": "tcp://*"}, ["endpoint"]),
        (ON | {"endpoint": "tcp://collector:0"}, ["endpoint", "1…65535"]),
        (ON | {"endpoint": "tcp://[::]:5557"}, ["endpoint", "tcp://*:5557", "host 127.0.0.1"]),
        (ON | {"replay_endpoint": "tcp://0.0.0.0:5558"}, ["replay_endpoint", "tcp://*:5558"]),
        (ON | {"replay_endpoint": "tcp://*:5557"}, ["endpoint and replay_endpoint", "5557"]),
        ({"publisher": "zmq"}, ["enable_kv_cache_events is false"]),
        ({"topic": "x"}, ["topic has no use without enable_kv_cache_events"]),
    ],
)
def test_bad_settings_are_one_line_that_names_key_value_and_range(values: Any, told: list[str]) -> None:
    with pytest.raises(ConfigError) as failed:
        parsed(values)
    assert "\n" not in failed.value.message
    for text in ["kv-events-config", *told]:
        assert text in failed.value.message


def test_events_without_prefix_caching_are_refused() -> None:
    with pytest.raises(ConfigError, match="no-enable-prefix-caching"):
        parsed(ON, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("endpoint", "host", "address"),
    [
        ("tcp://*:5557", "127.0.0.1", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "localhost", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "::1", "tcp://[::1]:5557"),
        ("tcp://*:5557", "0.0.0.0", "tcp://*:5557"),
        ("tcp://*:5557", "::", "tcp://[::]:5557"),
        ("tcp://*:5557", "10.1.2.3", "tcp://10.1.2.3:5557"),
        ("tcp://127.0.0.1:5558", "0.0.0.0", "tcp://127.0.0.1:5558"),
        ("ipc:///run/events", "127.0.0.1", "ipc:///run/events"),
    ],
)
def test_a_star_is_where_the_engine_listens(endpoint: str, host: str, address: str) -> None:
    assert bound_address(endpoint, host) == address


def test_a_taken_port_is_found_before_the_model_is_loaded() -> None:
    with socket.socket() as taken_port:
        taken_port.bind(("127.0.0.1", 0))
        taken_port.listen()
        port = taken_port.getsockname()[1]
        settings = parsed(ON | {"endpoint": f"tcp://*:{port}"})
        assert settings is not None
        with pytest.raises(ConfigError, match=f"endpoint tcp://\\*:{port} cannot be bound"):
            check_addresses(settings, "127.0.0.1")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("missing/events", "there is no folder"),
        ("a-file", "there is something else than a socket"),
        ("listening", "another process listens there"),
        ("l" * 200, "too long"),
        ("left", ""),
        ("new", ""),
    ],
)
def test_a_path_that_cannot_be_bound_or_is_somebodys_is_refused(path: str, told: str, tmp_path: Path) -> None:
    """ZMQ deletes what lies where it binds: another engine's socket, or a file."""
    (tmp_path / "a-file").write_text("kept")
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as listening:
        left.bind(str(tmp_path / "left"))
        listening.bind(str(tmp_path / "listening"))
        listening.listen()
        settings = parsed(ON | {"endpoint": f"ipc://{tmp_path}/{path}"})
        assert settings is not None

        async def publish() -> None:
            async with KVEventPublisher(settings, host="127.0.0.1"):
                pass

        if told:
            with pytest.raises(ConfigError, match=f"endpoint ipc://.* cannot be bound: .*{told}"):
                check_addresses(settings, "127.0.0.1")
            with pytest.raises(ConfigError, match=told):
                asyncio.run(publish())
        else:
            check_addresses(settings, "127.0.0.1")
            asyncio.run(publish())
    assert (tmp_path / "a-file").read_text() == "kept"
    assert (tmp_path / "listening").exists()


# ---- publisher -----------------------------------------------------------------------------------


class Consumer:
    """A subscriber with a socket for replays, that speaks vLLM's protocol."""

    def __init__(self, publisher: KVEventPublisher, topic: bytes = b"", hwm: int = 1000) -> None:
        self.context = zmq.asyncio.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.RCVHWM, hwm)
        self.events.setsockopt(zmq.SUBSCRIBE, topic)
        self.events.connect(publisher.endpoint)
        self.replays = self.context.socket(zmq.DEALER)
        if publisher.replay_endpoint is not None:
            self.replays.connect(publisher.replay_endpoint)

    async def next(self) -> tuple[bytes, int, bytes]:
        topic, number, batch = await asyncio.wait_for(self.events.recv_multipart(), 10)
        return topic, int.from_bytes(number, "big"), batch

    async def replay(self, start: int) -> list[tuple[bytes, int, bytes]]:
        await self.replays.send_multipart([b"", start.to_bytes(8, "big")])
        got = []
        while True:
            empty, topic, number, batch = await asyncio.wait_for(self.replays.recv_multipart(), 10)
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert (topic, batch) == (b"", b"")
                return got
            got.append((topic, int.from_bytes(number, "big"), batch))


@asynccontextmanager
async def published(**values: Any) -> AsyncIterator[tuple[KVEventPublisher, Consumer]]:
    values = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"} | values
    async with KVEventPublisher(KVEventsConfig(**values), host="127.0.0.1") as publisher:
        serving = asyncio.create_task(publisher.run())
        consumer = Consumer(publisher, values.get("topic", "").encode(), values.get("hwm", 1000))
        try:
            yield publisher, consumer
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            consumer.context.destroy(linger=0)


async def subscribed(publisher: KVEventPublisher, consumer: Consumer) -> int:
    """Publish until the subscription has arrived; returns the number of the last batch sent."""
    for number in range(200):
        publisher.publish(b"hello")
        if await consumer.events.poll(50):
            seen = number
            while seen != (await consumer.next())[1]:
                pass
            return seen
    raise AssertionError("the subscription never arrived")


def test_numbers_have_no_gaps_and_topics_come_first() -> None:
    async def scenario() -> None:
        async with published(topic="kv@engine") as (publisher, consumer):
            first = await subscribed(publisher, consumer)
            for index in range(20):
                publisher.publish(b"batch %d" % index)
            got = [await consumer.next() for _ in range(20)]
            assert got == [(b"kv@engine", first + 1 + index, b"batch %d" % index) for index in range(20)]

    asyncio.run(scenario())


def test_a_gap_is_filled_from_the_replay_socket() -> None:
    async def scenario() -> None:
        async with published(buffer_steps=300, topic="t") as (publisher, consumer):
            for index in range(400):
                publisher.publish(b"batch %d" % index)
            # More than a slice, up to the end; what is not kept any more is missing at the front, and seen to be.
            assert await consumer.replay(250) == [(b"t", n, b"batch %d" % n) for n in range(250, 400)]
            assert [number for _, number, _ in await consumer.replay(0)] == list(range(100, 400))
            assert await consumer.replay(400) == []

    asyncio.run(scenario())


def test_a_req_socket_can_ask_as_vllms_examples_do() -> None:
    async def scenario() -> None:
        async with published() as (publisher, consumer):
            publisher.publish(b"only")
            request = consumer.context.socket(zmq.REQ)
            assert publisher.replay_endpoint is not None
            request.connect(publisher.replay_endpoint)
            await request.send((0).to_bytes(8, "big"))
            topic, number, batch = await asyncio.wait_for(request.recv_multipart(), 10)
            assert (topic, number, batch) == (b"", bytes(8), b"only")

    asyncio.run(scenario())


def test_nonsense_on_the_replay_socket_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with published() as (publisher, consumer):
            publisher.publish(b"only")
            for frames in ([b""], [b"", b"short"], [b"", bytes(8), b"more"], [b"x", bytes(8)]):
                await consumer.replays.send_multipart(frames)
            assert await consumer.replay(0) == [(b"", 0, b"only")]
            ignored = [each for each in caplog.messages if each.startswith("a replay request of")]
            assert len(ignored) == 4
            # An oversized message costs its sender the connection, which ZMQ makes anew; others are served.
            monitor = consumer.replays.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            await consumer.replays.send_multipart([b"", bytes(4000)])
            await asyncio.wait_for(monitor.recv_multipart(), 10)
            consumer.replays.disable_monitor()
            again = Consumer(publisher)
            assert await again.replay(0) == [(b"", 0, b"only")]
            again.context.destroy(linger=0)

    asyncio.run(scenario())


def test_a_consumer_too_slow_for_hwm_sees_a_gap_and_can_fill_it() -> None:
    async def scenario() -> None:
        async with published(hwm=1) as (publisher, consumer):
            last = await subscribed(publisher, consumer)
            # Larger than what the kernel buffers, so that the bound is met.
            for _ in range(60):
                publisher.publish(bytes(1 << 20))
            seen = []
            while await consumer.events.poll(300):
                seen.append((await consumer.next())[1])
            publisher.publish(b"news")
            assert (await consumer.next())[1] == last + 61
            missed = set(range(last + 1, last + 61)) - set(seen)
            assert missed
            assert missed <= {number for _, number, _ in await consumer.replay(min(missed))}

    asyncio.run(scenario())


def test_without_a_replay_endpoint_nothing_is_kept() -> None:
    async def scenario() -> None:
        async with published(replay_endpoint=None) as (publisher, _):
            publisher.publish(b"batch")
            assert publisher.replay_endpoint is None
            assert not publisher._kept
            await asyncio.wait_for(publisher.run(), 5)

    asyncio.run(scenario())


def test_a_publisher_dials_where_the_endpoint_is_no_wildcard() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        events = context.socket(zmq.SUB)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        port = events.bind_to_random_port("tcp://127.0.0.1")
        settings = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
        async with KVEventPublisher(settings, host="127.0.0.1") as publisher:
            for _ in range(100):
                publisher.publish(b"batch")
                if await events.poll(50):
                    break
            assert (await asyncio.wait_for(events.recv_multipart(), 5))[2] == b"batch"
        context.destroy(linger=0)

    asyncio.run(scenario())


def test_sources_are_shown_as_vllm_shows_them() -> None:
    async def scenario() -> None:
        async with published() as (publisher, _):
            source = publisher.source()
            assert str(source["endpoint"]).startswith("tcp://127.0.0.1:")
            assert not str(source["endpoint"]).endswith(":0")
            assert source["publisher"] == "zmq"
            assert set(source) == {
                *("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"),
                *("buffer_steps", "hwm", "max_queue_size", "topic"),
            }

    asyncio.run(scenario())


# ---- resets --------------------------------------------------------------------------------------


class SilentCore:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_each_reset_waits_for_its_own_answer() -> None:
    async def scenario() -> None:
        core = SilentCore()
        resets = PrefixCacheResets(core)
        first, second = (asyncio.create_task(resets.reset()) for _ in range(2))
        await asyncio.sleep(0)
        assert core.sent == [ResetPrefixCache(number=1), ResetPrefixCache(number=2)]
        resets.done(PrefixCacheReset(number=2))
        await second
        assert not first.done()
        resets.done(PrefixCacheReset(number=7))
        resets.fail(PeerUnavailable("the engine core died"))
        with pytest.raises(PeerUnavailable):
            await first

    asyncio.run(scenario())


def test_resets_are_bounded() -> None:
    async def scenario() -> None:
        resets = PrefixCacheResets(SilentCore())
        waiting = [asyncio.create_task(resets.reset()) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await resets.reset()
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert not resets._waiting

    asyncio.run(scenario())
