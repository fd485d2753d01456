"""Prefill and decode whose KV is laid out differently: real processes, right tokens, and what was done is said."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from support.mesh import Mesh, Service, mesh
from support.tiny_models import Kind, make_tiny

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

TORCH = ("--backend", "torch", "--dtype", "float32")
CPU = ("--backend", "cpu", "--dtype", "float32")
BF16 = ("--backend", "cpu", "--dtype", "bfloat16")
INT8 = (*BF16, "--kv-cache-dtype", "int8_per_token_head")
LENGTHS = (1, 16, 31, 33, 95, 300)


def prompt_of(length: int, start: int = 5) -> list[int]:
    return [5 + (start + index * 7) % 250 for index in range(length)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    kinds: tuple[Kind, ...] = ("llama", "gemma3")
    return {kind: str(make_tiny(kind, folder / kind)) for kind in kinds}


@pytest.fixture
def model(models: dict[str, str]) -> str:
    return models["llama"]


def unlike(
    model: str, prefill: tuple[str, ...], decode: tuple[str, ...], connector: str = "shm", **options: Any
) -> Any:
    """A mesh whose two engines are started with flags of their own."""
    # Small enough that a prompt comes in pieces.
    common = ("--kv-cache-memory-bytes", str(8 << 20), "--kv-staging-bytes", str(256 << 10))
    return mesh(model, connector=connector, engine_flags=common, prefill_flags=prefill, decode_flags=decode, **options)


def generated(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def staged(engine: Service) -> float:
    return engine.metric("pdmesh_kv_staging_lanes_used")


def wait_nothing_staged(running: Mesh) -> None:
    running.wait_nothing_held()
    deadline_s = time.monotonic() + 12
    while any(staged(engine) for engine in running.decode):
        assert time.monotonic() < deadline_s, "lanes of the staging area are in use"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode", "connector"),
    [
        ("llama", (*TORCH, "--block-size", "16"), (*TORCH, "--block-size", "32"), "shm"),
        ("gemma3", (*TORCH, "--block-size", "16"), (*TORCH, "--block-size", "32"), "shm"),
        ("llama", (*CPU, "--block-size", "64"), (*TORCH, "--block-size", "16"), "grpc"),
        ("llama", (*TORCH, "--block-size", "32"), (*CPU, "--block-size", "32"), "nixl"),
    ],
    ids=["block size", "block size and windows", "packing and block size", "packing"],
)
def test_equal_dtypes_give_the_tokens_of_one_engine(
    models: dict[str, str], kind: str, prefill: tuple[str, ...], decode: tuple[str, ...], connector: str
) -> None:
    with unlike(models[kind], prefill, decode, connector) as running:
        (one,), (other,) = running.prefill, running.decode
        for length in LENGTHS:
            body = {"max_tokens": 24, "ignore_eos": True}
            answer = running.complete(prompt_of(length), **body)
            assert f"kv={connector}+converted; " in answer["headers"]["x-pdmesh-route"]
            for engine in (one, other):
                # Not from what the mesh has left in its cache.
                alone = running.complete(prompt_of(length), engine.http, cache_salt="alone", **body)
                assert generated(answer) == generated(alone)
            # A second one with the same prompt finds here what was converted.
            assert generated(answer) == generated(running.complete(prompt_of(length), **body))
        seeded = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0, "seed": 7, "n": 2}
        prompt = prompt_of(200, start=9)
        choices = [choice["token_ids"] for choice in running.complete(prompt, **seeded)["choices"]]
        answer = running.complete(prompt, other.http, cache_salt="alone", **seeded)
        alone = [choice["token_ids"] for choice in answer["choices"]]
        assert choices == alone
        metrics = other.metrics()
        converted = [
            key for key in metrics if key.startswith("pdmesh_transfers_converted_total") and 'numbers="kept"' in key
        ]
        assert sum(metrics[key] for key in converted) >= len(LENGTHS)
        # As a stock router does it, who knows nothing of layouts.
        prompt, body = prompt_of(170, start=13), {"max_tokens": 16, "ignore_eos": True}
        alone = running.complete(prompt, one.http, cache_salt="alone", **body)
        asked = running.complete(prompt, one.http, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        answer = running.complete(prompt, other.http, kv_transfer_params=asked["kv_transfer_params"], **body)
        assert generated(answer) == generated(alone)
        assert f"kv={connector}+converted; " in answer["headers"]["x-pdmesh-route"]
        wait_nothing_staged(running)
        assert running.proxy is not None
        assert "hands over to" in running.proxy.log
        assert "by conversion" in running.proxy.log


@pytest.mark.parametrize(
    ("prefill", "decode", "connector"),
    [(BF16, INT8, "shm"), (INT8, BF16, "grpc"), ((*TORCH, "--block-size", "16"), BF16, "shm")],
    ids=["to int8", "from int8", "to bfloat16"],
)
def test_other_dtypes_are_near_one_engine_and_repeat_themselves(
    model: str, prefill: tuple[str, ...], decode: tuple[str, ...], connector: str
) -> None:
    """Tokens may be others than those of either engine alone, so what is compared are probabilities."""
    with unlike(model, prefill, decode, connector) as running:
        (engine,) = running.decode
        # Which token comes is given; what the model thought of it is told.
        body = {"max_tokens": 16, "ignore_eos": True, "allowed_token_ids": [7], "logprobs": 0}

        def told(prompt: list[int], url: str | None = None) -> list[float]:
            salted = body if url is None else body | {"cache_salt": "alone"}
            values: list[float] = running.complete(prompt, url, **salted)["choices"][0]["logprobs"]["token_logprobs"]
            return values[1:]

        def far(one: list[float], other: list[float]) -> float:
            return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)

        for length in (31, 95, 300):
            prompt = prompt_of(length)
            answer = running.complete(prompt, **body)
            assert f"kv={connector}+converted+rounded; " in answer["headers"]["x-pdmesh-route"]
            here, alone = told(prompt), told(prompt, engine.http)
            another = told(prompt_of(length, start=11), engine.http)
            assert far(here, alone) < 0.1 * far(here, another)
            assert here == answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        metrics = engine.metrics()
        assert any(value >= 3 for key, value in metrics.items() if 'numbers="rounded"' in key and "converted" in key)
        wait_nothing_staged(running)


def test_an_engine_of_other_weights_is_not_used_and_one_that_does_not_convert_says_why(model: str) -> None:
    flags = (*TORCH, "--block-size", "16")
    with unlike(model, flags, (*TORCH, "--block-size", "32", "--kv-staging-bytes", "0")) as running:
        answer = running.complete(prompt_of(95), max_tokens=8, ignore_eos=True)
        assert "no_compatible_pair" in answer["headers"]["x-pdmesh-route"]
        assert running.proxy is not None
        assert "it converts at most 0 at a time (kv-staging-bytes)" in running.proxy.log
        alone = running.complete(prompt_of(95), running.decode[0].http, max_tokens=8, ignore_eos=True)
        assert generated(answer) == generated(alone)


SLOW = ("--connector-options", '{"shm": {"throttle_bytes_s": 30000}, "grpc": {"throttle_bytes_s": 30000}}')


@pytest.mark.parametrize(
    ("connector", "fault"), [("shm", "killed owner"), ("grpc", "killed owner"), ("shm", "client left")]
)
def test_what_goes_wrong_in_the_middle_ends_right_and_leaves_nothing(model: str, connector: str, fault: str) -> None:
    flags = (*TORCH, "--block-size", "16"), (*TORCH, "--block-size", "32", *SLOW)
    with unlike(model, *flags, connector) as running:
        (owner,), (engine,) = running.prefill, running.decode
        prompt, body = prompt_of(400), {"max_tokens": 8, "ignore_eos": True}
        alone = generated(running.complete(prompt, engine.http, cache_salt="alone", **body))
        with ThreadPoolExecutor(1) as threads, httpx.Client(timeout=60 if fault == "killed owner" else 2) as client:
            asked = {"prompt": prompt, "temperature": 0, "return_token_ids": True} | body
            answer = threads.submit(client.post, f"{running.url}/v1/completions", json=asked)
            deadline_s = time.monotonic() + 20
            while not staged(engine):
                assert time.monotonic() < deadline_s, "nothing was staged"
                time.sleep(0.02)
            if fault == "killed owner":
                owner.kill()
                assert generated(answer.result().json()) == alone
                assert "recompute" in answer.result().headers["x-pdmesh-route"]
                running.prefill.clear()
            else:
                with pytest.raises(httpx.ReadTimeout):
                    answer.result()
        wait_nothing_staged(running)
        assert generated(running.complete(prompt, engine.http, cache_salt="after", **body)) == alone
