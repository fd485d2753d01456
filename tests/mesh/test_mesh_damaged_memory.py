"""An engine's memory changes under it: what it has cached is found out when somebody reads it, and nobody is answered from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from support.damage import damage_pool
from support.mesh import Mesh, Service, mesh
from support.tiny_models import make_tiny
from support.until import until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", str(8 << 20), "--block-size", "32")
PREFIX = [random.Random(5).randrange(10, 370) for _ in range(256)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny")))


def prompt(number: int) -> list[int]:
    numbers = random.Random(number)
    return [*PREFIX, *(numbers.randrange(10, 370) for _ in range(40))]


def reset(*engines: Service) -> None:
    for engine in engines:
        httpx.post(f"{engine.http}/reset_prefix_cache", timeout=30).raise_for_status()


def ask(running: Mesh, number: int) -> httpx.Response:
    body = {"prompt": prompt(number), "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def right_tokens(running: Mesh, numbers: range) -> dict[int, list[int]]:
    """From the decode alone, where nothing is damaged and nothing of it is shared."""
    [decode] = running.decode
    return {
        number: running.complete(prompt(number), url=decode.http, max_tokens=6, cache_salt="alone")["choices"][0][
            "token_ids"
        ]
        for number in numbers
    }


@contextmanager
def damaged_prefill(model: str) -> Iterator[tuple[Mesh, dict[int, list[int]]]]:
    """A mesh whose prefill, and its decode, have a beginning that is damaged in prefill's memory; and what is right."""
    with mesh(model, connector="shm,grpc", engine_flags=FLAGS) as running:
        right = right_tokens(running, range(1, 6))
        reset(*running.decode)
        assert tokens(ask(running, 1)) == right[1]
        assert damage_pool(*running.prefill) > 0
        yield running, right
        running.wait_nothing_held()


def test_an_owner_that_is_told_of_damage_lets_go_of_its_cache(model: str) -> None:
    """It went on to answer from it: wrong tokens to every prompt that began alike, with status 200."""
    with damaged_prefill(model) as (running, right):
        (prefill,), (decode,) = running.prefill, running.decode
        reset(decode)
        # Its first token is out when decode finds that it was drawn from other KV than was computed.
        answer = ask(running, 2)
        assert answer.status_code == 502 or tokens(answer) == right[2], answer.text
        assert answer.status_code == 200 or "damaged" in answer.text
        until(lambda: prefill.metric("pdmesh_kv_damaged_blocks_total") > 0, 20)
        reset(decode)
        for number in range(3, 6):
            assert tokens(ask(running, number)) == right[number]
            reset(decode)
        assert "not what was computed" in prefill.log
        assert httpx.get(f"{prefill.http}/health", timeout=10).status_code == 200


def test_damage_is_found_where_everybody_else_has_the_beginning_itself(model: str) -> None:
    """What is read then was computed behind it and is as it was summed: wrong tokens for as long as the engine lived."""
    with damaged_prefill(model) as (running, right):
        [prefill] = running.prefill
        # What it draws nobody can know to be wrong yet.
        ask(running, 2)
        until(lambda: prefill.metric("pdmesh_kv_damaged_blocks_total") > 0, 20)
        for number in range(3, 6):
            assert tokens(ask(running, number)) == right[number]


def test_nothing_that_was_computed_behind_damage_gets_into_the_tier(model: str) -> None:
    """It did, under right names and with sums of its own: every engine that fetched it went on from it."""
    patient = ("--kvcache-lookup-timeout-s", "10")
    with mesh(model, prefill=0, engine_flags=(*FLAGS, *patient), kvcache_flags=()) as running:
        [decode] = running.decode
        right = right_tokens(running, range(1, 4))
        reset(decode)
        before = stored(decode, "accepted")
        assert tokens(ask(running, 1)) == right[1]
        until(lambda: stored(decode, "accepted") >= before + 9, 20)
        assert damage_pool(decode) > 0
        # What it draws from them nobody can know to be wrong yet.
        ask(running, 2)
        until(lambda: stored(decode, "damaged") > 0, 20)
        assert decode.metric("pdmesh_kv_damaged_blocks_total") > 0
        # Of its beginning the tier has what is right.
        assert tokens(ask(running, 2)) == right[2]
        assert tokens(ask(running, 3)) == right[3]
        assert decode.metric("vllm:external_prefix_cache_hits_total") >= len(PREFIX)


def stored(engine: Service, outcome: str) -> float:
    return sum(
        value
        for name, value in engine.metrics().items()
        if name.startswith("pdmesh_tier_stores_total") and f'outcome="{outcome}"' in name
    )
