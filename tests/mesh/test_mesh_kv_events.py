"""KV events of a real engine, read by a consumer that knows vLLM's wire format and nothing of ours."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import zmq

from pdmesh.engine.block_hash import BlockHasher, ExtraKeys
from pdmesh.openai.intake.identity import narrow_salt
from support.mesh import Service, start
from support.tiny_models import make_tiny

pytestmark = pytest.mark.mesh

BLOCK_SIZE = 16
BLOCK_BYTES = 8 << 10
NUM_BLOCKS = 24
LOW_64_BITS = 2**64 - 1


class Follower:
    """Follows one engine's stream and keeps the index that a router would."""

    def __init__(self, source: dict[str, Any]) -> None:
        self._context = zmq.Context()
        self.events = self._context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, b"")
        self.events.connect(source["endpoint"])
        self.replays = self._context.socket(zmq.DEALER)
        self.replays.connect(source["replay_endpoint"])
        self.batches: dict[int, bytes] = {}
        self.index: set[int] = set()
        self.seen: list[dict[str, Any]] = []

    def replay(self, start_number: int) -> dict[int, bytes]:
        self.replays.send_multipart([b"", start_number.to_bytes(8, "big")])
        got: dict[int, bytes] = {}
        while True:
            assert self.replays.poll(10_000)
            _, _, number, batch = self.replays.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return got
            got[int.from_bytes(number, "big")] = batch

    def read(self, timeout_s: float = 0.4) -> list[dict[str, Any]]:
        """Take in what has come, filling gaps, until nothing comes for a while; returns the new events."""
        new: list[dict[str, Any]] = []
        while self.events.poll(timeout_s * 1000):
            _, number_bytes, batch = self.events.recv_multipart()
            number = int.from_bytes(number_bytes, "big")
            due = len(self.batches)
            for missed, old in sorted(self.replay(due).items()) if number > due else []:
                if missed < number:
                    new += self._take(missed, old)
            new += self._take(number, batch)
        return new

    def _take(self, number: int, batch: bytes) -> list[dict[str, Any]]:
        assert number == len(self.batches), "a gap"
        self.batches[number] = batch
        ts, events, rank = msgspec.msgpack.decode(batch)
        assert abs(ts - time.time()) < 120
        assert rank == 0
        for event in events:
            self._apply(event)
        self.seen += events
        return list(events)

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                parent = event["parent_block_hash"]
                assert parent is None or parent in self.index
                assert len(event["token_ids"]) == BLOCK_SIZE * len(event["block_hashes"])
                assert len(event["extra_keys"]) == len(event["block_hashes"])
                self.index |= set(event["block_hashes"])
            case "BlockRemoved":
                assert set(event["block_hashes"]) <= self.index, "what was never stored"
                self.index -= set(event["block_hashes"])
            case "AllBlocksCleared":
                self.index.clear()
            case other:
                raise AssertionError(other)

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextlib.contextmanager
def engine(folder: Path, **events: Any) -> Iterator[Service]:
    settings = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"} | events
    service = start(
        "decode",
        *("--model", str(make_tiny("llama", folder / "tiny")), "--port", "0", "--grpc-port", "0", "--cpu-threads", "1"),
        *("--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(NUM_BLOCKS * BLOCK_BYTES)),
        *("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
        *("--kv-events-config", json.dumps(settings)),
        folder=folder,
    ).wait_ready()
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Service, Follower]]:
    with tempfile.TemporaryDirectory(prefix="pdmesh-test-") as name, engine(Path(name)) as service:
        follower = Follower(httpx.get(f"{service.http}/kv_event_sources").json()["0"])
        try:
            # The subscription is on its way; what was published before it is a gap, which `read` fills.
            while not follower.seen:
                httpx.post(f"{service.http}/reset_prefix_cache", timeout=30)
                follower.read(0.1)
            yield service, follower
        finally:
            follower.close()


def complete(service: Service, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    answer = httpx.post(f"{service.http}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_of(number: int, length: int = 5 * BLOCK_SIZE) -> list[int]:
    return [4 + (13 * index + 7 * number) % 300 for index in range(length)]


def names(token_ids: list[int], salt: str = "") -> list[int]:
    chain: list[bytes] = []
    BlockHasher("sha256", "", BLOCK_SIZE).extend(chain, np.array(token_ids), ExtraKeys(cache_salt=salt))
    return [int.from_bytes(name, "big") & LOW_64_BITS for name in chain]


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def reset(service: Service, follower: Follower) -> None:
    assert httpx.post(f"{service.http}/reset_prefix_cache", timeout=30).json() == {"success": True}
    assert {"type": "AllBlocksCleared"} in follower.read()
    assert not follower.index


def test_prompt_and_output_are_stored_under_vllms_names(served: tuple[Service, Follower]) -> None:
    service, follower = served
    reset(service, follower)
    prompt = prompt_of(1, 40)
    answer = complete(service, prompt, max_tokens=30)
    # The last token sampled is not computed.
    computed = (prompt + answer["choices"][0]["token_ids"])[:-1]
    stored = [event for event in follower.read() if event["type"] == "BlockStored"]
    assert [hash_ for event in stored for hash_ in event["block_hashes"]] == names(computed)
    assert [token for event in stored for token in event["token_ids"]] == computed[: 4 * BLOCK_SIZE]
    assert stored[0]["parent_block_hash"] is None
    for event in stored:
        assert (event["medium"], event["group_idx"], event["kv_cache_spec_kind"]) == ("GPU", 0, "full_attention")
        assert (event["lora_id"], event["lora_name"], event["block_size"]) == (None, None, BLOCK_SIZE)
        assert not any(event["extra_keys"])
    # Nothing new is stored for what is found.
    assert cached(complete(service, prompt)) == 2 * BLOCK_SIZE
    assert follower.read() == []


def test_a_salted_prompt_has_names_of_its_own(served: tuple[Service, Follower]) -> None:
    service, follower = served
    reset(service, follower)
    complete(service, prompt_of(2))
    complete(service, prompt_of(2), cache_salt="mine")
    plain, salted = (event for event in follower.read() if event["parent_block_hash"] is None)
    salt = narrow_salt("", "mine")
    assert salted["extra_keys"][0] == [salt]
    assert not any(salted["extra_keys"][1:])
    assert salted["block_hashes"] == names(prompt_of(2), salt)[: len(salted["block_hashes"])]
    assert not set(salted["block_hashes"]) & set(plain["block_hashes"])


def test_the_index_is_what_the_engine_finds(served: tuple[Service, Follower]) -> None:
    """More prompts than blocks: each eviction is told, and what is left in the index is a hit, and nothing else."""
    service, follower = served
    reset(service, follower)
    for number in range(10, 18):
        complete(service, prompt_of(number))
    events = follower.read()
    assert any(event["type"] == "BlockRemoved" for event in events)
    assert 0 < len(follower.index) <= NUM_BLOCKS
    # The newest first, as a miss evicts.
    for number in reversed(range(10, 18)):
        held = 0
        for name in names(prompt_of(number))[:-1]:
            if name not in follower.index:
                break
            held += BLOCK_SIZE
        assert cached(complete(service, prompt_of(number))) == held
        follower.read(0.2)


def test_after_a_reset_nothing_is_found_and_all_is_stored_anew(served: tuple[Service, Follower]) -> None:
    service, follower = served
    reset(service, follower)
    complete(service, prompt_of(3))
    assert cached(complete(service, prompt_of(3))) == 4 * BLOCK_SIZE
    reset(service, follower)
    assert cached(complete(service, prompt_of(3))) == 0
    follower.read()
    assert set(names(prompt_of(3))) <= follower.index


def test_a_late_consumer_gets_everything_from_the_replay(served: tuple[Service, Follower]) -> None:
    service, follower = served
    complete(service, prompt_of(4))
    follower.read()
    late = Follower(httpx.get(f"{service.http}/kv_event_sources").json()["0"])
    try:
        assert late.replay(0) == follower.batches
        newest = len(follower.batches) - 1
        assert late.replay(newest) == {newest: follower.batches[newest]}
    finally:
        late.close()


def test_a_running_request_survives_a_reset(served: tuple[Service, Follower]) -> None:
    service, follower = served
    reset(service, follower)
    expected = complete(service, prompt_of(5), max_tokens=100)["choices"][0]["token_ids"]
    reset(service, follower)
    body = {"prompt": prompt_of(5), "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    got: list[int] = []
    with httpx.stream("POST", f"{service.http}/v1/completions", json=body | {"stream": True}, timeout=30) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            got += json.loads(line[6:])["choices"][0]["token_ids"] or []
            if len(got) == 1:
                assert httpx.post(f"{service.http}/reset_prefix_cache", timeout=30).json() == {"success": True}
    assert got == expected
    follower.read()
    # What the request computed behind the reset has no name either: its beginning has none.
    assert cached(complete(service, prompt_of(5))) == 0
