"""The stock flow over HTTP: a prefill leg with `do_remote_decode`, a decode leg with what it gave back."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.engines import Pair, running_pair

PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


async def _complete(url: str, prompt: list[int], params: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0} | fields
    if params is not None:
        body["kv_transfer_params"] = params
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await client.post("/v1/completions", json=body)


def _prompt(number: int, num_tokens: int = 50) -> list[int]:
    return [4 + (11 * index + number) % 300 for index in range(num_tokens)]


@pytest.fixture(scope="module")
def fresh_pair(tiny_model: str) -> Iterator[Pair]:
    """A pair that holds no offers of other tests, and knows each other."""
    with running_pair(tiny_model) as pair:

        async def meet() -> None:
            leg = await _complete(pair.prefill.http, _prompt(9), PREFILL_LEG, max_tokens=1)
            await _complete(pair.decode.http, _prompt(9), leg.json()["kv_transfer_params"])

        pair.loop.run(meet())
        yield pair


def _text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_decode_takes_what_prefill_gives_and_says_the_same_as_one_engine(pair: Any) -> None:
    async def body() -> None:
        prompt = _prompt(1)
        alone = await _complete(pair.prefill.http, prompt, cache_salt="alone")
        leg = await _complete(pair.prefill.http, prompt, PREFILL_LEG, max_tokens=1)
        params = leg.json()["kv_transfer_params"]
        assert params["remote_engine_id"] == pair.prefill.engine_id
        assert params["do_remote_prefill"] is True
        assert params["do_remote_decode"] is False
        assert params["remote_num_tokens"] == len(prompt)
        answer = await _complete(pair.decode.http, prompt, params)
        assert _text(answer) == _text(alone)
        route = answer.headers["x-pdmesh-route"]
        assert f"prefill={pair.prefill.engine_id}" in route
        assert "kv=shm" in route
        assert "kv_bytes=0" not in route
        # Fetched once: the offer is gone.
        late = await _complete(pair.decode.http, prompt, params)
        assert late.status_code == 502
        assert "committed" in late.json()["error"]["message"]

    pair.loop.run(body())


def test_a_block_that_prefill_goes_on_to_write_is_not_taken_for_damaged(pair: Any) -> None:
    """Two tokens of the prompt are in its last block when the offer is sealed; the leg's own tokens come behind them."""

    async def body() -> None:
        prompt = _prompt(6)
        alone = await _complete(pair.prefill.http, prompt, cache_salt="alone")
        leg = await _complete(pair.prefill.http, prompt, PREFILL_LEG, max_tokens=30)
        answer = await _complete(pair.decode.http, prompt, leg.json()["kv_transfer_params"])
        assert _text(answer) == _text(alone)
        assert "kv=shm" in answer.headers["x-pdmesh-route"]
        async with httpx.AsyncClient(base_url=pair.decode.http, timeout=10) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        assert not [line for line in lines if 'reason="corrupt"' in line and not line.endswith(" 0.0")]

    pair.loop.run(body())


def test_a_plain_request_has_no_params(pair: Any) -> None:
    async def body() -> None:
        answer = await _complete(pair.prefill.http, _prompt(2))
        assert answer.status_code == 200
        assert not answer.json().get("kv_transfer_params")

    pair.loop.run(body())


@pytest.mark.parametrize(
    ("change", "status", "says", "param"),
    [
        ({"remote_host": "192.0.2.7"}, 403, "kv-peers", "remote_host"),
        ({"remote_port": "x"}, 400, "remote_port", "remote_port"),
        ({"remote_request_id": "never-was"}, 502, "unknown", ""),
        ({"remote_block_ids": [[0, 1, 2, 500]]}, 403, "is not in offer", "remote_block_ids"),
        ({"remote_engine_id": "someone-else"}, 502, "other_engine: {address} is another engine's", ""),
        ({"remote_num_tokens": 10**30}, 400, "must be between 1 and 4294967295", "remote_num_tokens"),
        ({"surprise": 1}, 400, "surprise", "surprise"),
    ],
)
def test_params_that_are_not_the_prefills_are_refused(
    pair: Any, change: dict[str, Any], status: int, says: str, param: str
) -> None:
    async def body() -> None:
        prompt = _prompt(3)
        leg = await _complete(pair.prefill.http, prompt, PREFILL_LEG, max_tokens=1)
        params = leg.json()["kv_transfer_params"] | change
        answer = await _complete(pair.decode.http, prompt, params)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert says.format(address=f"{params['remote_host']}:{params['remote_port']}") in error["message"]
        assert error["param"] == (f"kv_transfer_params.{param}" if param else None)

    pair.loop.run(body())


def test_a_prefill_that_has_gone_is_what_the_failure_policy_is_for(pair: Any) -> None:
    """It was a 403, also with `recompute`: nobody listened there, so it was nobody of this engine's user."""

    async def body() -> None:
        prompt = _prompt(8)
        leg = await _complete(pair.prefill.http, prompt, PREFILL_LEG, max_tokens=1)
        with socket.socket() as gone:
            gone.bind(("127.0.0.1", 0))
            params = leg.json()["kv_transfer_params"] | {"remote_port": gone.getsockname()[1]}
            answer = await _complete(pair.decode.http, prompt, params)
        assert answer.status_code == 502, answer.text
        assert "nothing listens" in answer.json()["error"]["message"]

    pair.loop.run(body())


def test_params_of_another_prompt_are_refused(pair: Any) -> None:
    async def body() -> None:
        leg = await _complete(pair.prefill.http, _prompt(4), PREFILL_LEG, max_tokens=1)
        answer = await _complete(pair.decode.http, _prompt(5), leg.json()["kv_transfer_params"])
        assert answer.status_code == 502
        assert "another request" in answer.json()["error"]["message"]

    pair.loop.run(body())


async def _offers_end(url: str) -> None:
    """Return when a prefill holds no offer any more: long before a stock offer's lease ends."""
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=url, timeout=10) as client:
        while True:
            lines = (await client.get("/metrics")).text.splitlines()
            if [line.rpartition(" ")[2] for line in lines if line.startswith("pdmesh_offers_open{")] == ["0.0"]:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (400, {"max_tokens": 99999}),
        (400, {"stream_options": {"include_usage": True}}),
        (404, {"model": "another"}),
        (400, {"prompt": [4, 5, 6], "kv": {"prompt_token_ids": [4, 5, 7]}}),
        # What is wrong may be in the parameters themselves: they name the offer all the same.
        (400, {"kv": {"tp_size": 4}}),
        (400, {"kv": {"surprise": 1}}),
        (400, {"kv": {"do_remote_prefill": "yes"}}),
        (400, {"kv": {"remote_block_ids": None}}),
        # The prompt tells that the leg is the offer's.
        (403, {"kv": {"remote_block_ids": [[0, 1, 2, 500]]}}),
    ],
    ids=str,
)
def test_prefill_lets_go_of_what_a_refused_decode_leg_would_have_fetched(
    fresh_pair: Any, status: int, fields: dict[str, Any]
) -> None:
    """It kept the blocks for 30 s."""

    async def body() -> None:
        prompt = _prompt(7)
        leg = await _complete(fresh_pair.prefill.http, prompt, PREFILL_LEG, max_tokens=1)
        params = leg.json()["kv_transfer_params"] | fields.pop("kv", {})
        answer = await _complete(fresh_pair.decode.http, fields.pop("prompt", prompt), params, **fields)
        assert answer.status_code == status, answer.text
        await _offers_end(fresh_pair.prefill.http)

    fresh_pair.loop.run(body())


@pytest.mark.parametrize("length", [1, 8])
def test_a_first_token_that_ends_the_answer_is_said_by_decode_too(fresh_pair: Any, length: int) -> None:
    """A router sends the decode leg whatever ended the prefill leg, and answers with what that says."""
    ends = {"logit_bias": {"77": 100}, "stop_token_ids": [77], "ignore_eos": False}

    async def body() -> None:
        prompt = _prompt(8)
        alone = await _complete(fresh_pair.prefill.http, prompt, cache_salt="alone", max_tokens=8, **ends)
        leg = await _complete(fresh_pair.prefill.http, prompt, PREFILL_LEG, max_tokens=length, **ends)
        assert leg.json()["choices"][0]["finish_reason"] == "stop"
        params = leg.json()["kv_transfer_params"]
        answer = await _complete(fresh_pair.decode.http, prompt, params, max_tokens=8, **ends)
        [said], [expected] = answer.json()["choices"], alone.json()["choices"]
        for name in ("text", "finish_reason", "stop_reason"):
            assert said[name] == expected[name]
        assert said["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        assert "kv=shm" in answer.headers["x-pdmesh-route"]
        await _offers_end(fresh_pair.prefill.http)

    fresh_pair.loop.run(body())


def test_health_and_metrics_answer(pair: Any) -> None:
    async def body() -> None:
        async with httpx.AsyncClient(base_url=pair.decode.http, timeout=10) as client:
            assert (await client.get("/health")).status_code == 200
            text = (await client.get("/metrics")).text
        for name in (
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
            "vllm:prefix_cache_hits_total",
            "vllm:request_success_total",
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:request_queue_time_seconds_bucket",
            "vllm:request_prefill_time_seconds_bucket",
            "vllm:request_decode_time_seconds_bucket",
            "vllm:request_time_per_output_token_seconds_bucket",
            "vllm:cache_config_info",
            "pdmesh_offers_open",
        ):
            assert name in text, name

    pair.loop.run(body())
