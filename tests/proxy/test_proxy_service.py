"""The proxy as clients and operators meet it: HTTP over fake engines, and the process itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pdmesh.errors import Overloaded
from pdmesh.lifecycle import Life
from pdmesh.models.source import DEMO_MODEL
from pdmesh.protocol.messages import RepetitionDetection
from pdmesh_proxy.config import ProxyConfig
from pdmesh_proxy.service import main, serve
from support.awaiting import until
from support.fake_engine import Behaviour, FakeEngine

VOCAB_SIZE = 49152
FORGED_TICKET = "AWZvcmdlZA=="


@contextlib.asynccontextmanager
async def proxy(*engines: FakeEngine, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Life]]:
    """The whole service in this loop, as `pdmesh proxy` runs it, behind a client."""
    read_end, write_end = os.pipe()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        listed = {role: [e.address for e in engines if e.info.role == role] for role in ("prefill", "decode")}
        defaults = {"model": DEMO_MODEL, "port": 0, "secret": "a-secret-for-the-fakes", "drain_timeout_s": 2.0}
        life = Life(write_end)
        serving = asyncio.create_task(serve(ProxyConfig(**(defaults | listed | settings)), life))
        # A service that fails to start closes the pipe, so that the read below ends.
        serving.add_done_callback(lambda _: os.close(write_end))
        messages = b""
        while b"http_port" not in messages:
            read = await asyncio.to_thread(os.read, read_end, 65536)
            assert read, f"the proxy did not start: {serving}"
            messages += read
        port = json.loads(messages.splitlines()[-1])["http_port"]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
                yield client, life
        finally:
            life.stop()
            await serving
            os.close(read_end)


def engines(**behaviour: Any) -> tuple[FakeEngine, FakeEngine]:
    made = [FakeEngine(role, vocab_size=VOCAB_SIZE, behaviour=Behaviour(**behaviour)) for role in ("prefill", "decode")]
    return made[0], made[1]


async def healthy(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(5):
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)


BODY = {"prompt": list(range(100, 200)), "max_tokens": 6, "temperature": 0}


def test_a_completion_over_http_says_which_way_it_went() -> None:
    async def scenario() -> None:
        prefill, decode = engines()
        async with proxy(prefill, decode) as (client, _):
            await healthy(client)
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 6
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
            route = answer.headers["x-pdmesh-route"]
            assert f"prefill={prefill.engine_id}; decode={decode.engine_id}; reason=disaggregated; kv=shm" in route
            assert "pdmesh_proxy_requests_total" in (await client.get("/metrics")).text

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "forged",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 80}},
        {"kv_transfer_params": {"ticket": FORGED_TICKET}},
        {"ticket": FORGED_TICKET},
    ],
)
def test_transfer_fields_of_clients_reach_no_engine(forged: dict[str, Any]) -> None:
    async def scenario() -> None:
        prefill, decode = engines()
        async with proxy(prefill, decode) as (client, _):
            await healthy(client)
            answer = await client.post("/v1/completions", json=BODY | forged)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(forged)))
            assert decode.requests == prefill.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"heartbeat_interval_s": 3, "heartbeat_timeout_s": 3},
            ["heartbeat-timeout-s 3", "heartbeat-interval-s 3", "dead"],
        ),
        ({"heartbeat_interval_s": 5.5, "heartbeat_timeout_s": 9}, ["heartbeat-interval-s 5.5", "lease of 10 s"]),
        ({"heartbeat_timeout_s": 10}, ["heartbeat-timeout-s 10", "lease of 10 s", "ticket"]),
    ],
)
def test_heartbeats_that_contradict_leases_are_refused(settings: dict[str, float], words: list[str]) -> None:
    """A frozen decode was found after its ticket had run out, so that the retry had to compute the prompt again."""
    with pytest.raises(ValueError, match="heartbeat") as caught:
        ProxyConfig(**settings)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_mesh_is_a_503_that_says_when_to_come_back(stream: bool) -> None:
    async def scenario() -> None:
        full = [FakeEngine("decode", vocab_size=VOCAB_SIZE) for _ in range(2)]
        async with proxy(*full) as (client, _):
            await healthy(client)
            full[0].behaviour.refuse = full[1].behaviour.refuse = Overloaded("prompts of 9 tokens wait already")
            answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"] == {
                "message": "prompts of 9 tokens wait already",
                "type": "Service Unavailable",
                "param": None,
                "code": 503,
            }
            assert all(engine.requests for engine in full), "both were asked"
            full[1].behaviour.refuse = None
            for _ in range(4):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("priority", [2**63 - 1, -(2**63)])
def test_what_only_the_engine_acts_on_comes_to_it_as_it_was_sent(priority: int) -> None:
    """A priority of more than 32 bits was a 500: the wire had no room for it."""

    async def scenario() -> None:
        engine = FakeEngine("decode", vocab_size=VOCAB_SIZE)
        async with proxy(engine, reasoning_start_str="<think>", reasoning_end_str="</think>") as (client, _):
            await healthy(client)
            fields = {
                "priority": priority,
                "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
                "thinking_token_budget": 7,
                "vllm_xargs": {"x": [2**64 - 1, "y"]},
            }
            answer = await client.post("/v1/completions", json=BODY | fields)
            assert answer.status_code == 200, answer.text
            [asked] = engine.requests
            assert asked.priority == priority
            assert asked.sampling.repetition_detection == RepetitionDetection(max_pattern_size=3, min_count=2)
            assert asked.sampling.extra_args == fields["vllm_xargs"]
            thinking = asked.sampling.thinking
            assert thinking is not None
            assert thinking.budget == 7
            assert thinking.start_token_ids
            assert thinking.end_token_ids

    asyncio.run(scenario())


def test_an_http_client_that_leaves_stops_the_engines() -> None:
    async def scenario() -> None:
        prefill, decode = engines(step_s=0.02)
        async with proxy(prefill, decode) as (client, _):
            await healthy(client)
            async with client.stream(
                "POST", "/v1/completions", json=BODY | {"max_tokens": 1000, "stream": True}
            ) as answer:
                async for _line in answer.aiter_lines():
                    if decode.requests:
                        break
            await until(lambda: not prefill.running and not decode.running and not prefill.offers.open)

    asyncio.run(scenario())


def test_health_follows_the_engines_and_shutdown_lets_a_stream_end() -> None:
    async def scenario() -> None:
        prefill, decode = engines(step_s=0.02)
        async with proxy(prefill, decode, drain_grace_s=1.0) as (client, life):
            await healthy(client)
            asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 20}))
            await until(lambda: decode.requests)
            life.stop()
            async with asyncio.timeout(2):
                while (await client.get("/health")).status_code != 503:
                    await asyncio.sleep(0.01)
            # Whoever has not heard of it yet is served.
            late = await client.post("/v1/completions", json=BODY)
            assert (late.status_code, late.headers["connection"]) == (200, "close")
            answer = await asking
            assert answer.json()["usage"]["completion_tokens"] == 20

    asyncio.run(scenario())


def test_a_request_beyond_the_drain_timeout_is_told() -> None:
    async def scenario() -> None:
        decode = FakeEngine("decode", vocab_size=VOCAB_SIZE, behaviour=Behaviour(hold=asyncio.Event()))
        async with proxy(decode, drain_timeout_s=0.3) as (client, life):
            await healthy(client)
            asking = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await until(lambda: decode.requests)
            life.stop()
            answer = await asking
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            # It was what the wait for connections had left of it: "0 s".
            assert "the proxy shut down; the request had 0.3 s to end" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_without_engines_the_service_runs_and_says_so() -> None:
    async def scenario() -> None:
        async with proxy(decode=["127.0.0.1:1"]) as (client, _):
            assert (await client.get("/health")).status_code == 503
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 503
            assert "no engine" in answer.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "model is required"),
        (["smollm2-135m", "--port", "0", "--prefill", "", "--decode", "nowhere"], "nowhere"),
        (["/no/such/model", "--port", "0"], "/no/such/model"),
        (["smollm2-135m", "--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (["smollm2-135m", "--host", "0.0.0.0"], "mesh secret is required"),
        (["smollm2-135m", "--max-retries", "many"], "max-retries"),
    ],
)
def test_a_bad_start_is_one_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.lifecycle.setup_logging", lambda *_: None)
    for name in list(os.environ):
        if name.startswith("PDMESH_"):
            monkeypatch.delenv(name)
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_the_proxy_loads_neither_torch_nor_zmq() -> None:
    code = "import sys, pdmesh_proxy.service; print([m for m in ('torch', 'zmq', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
