"""How streams end: errors after the first byte, clients that leave or do not read, silence, deadlines."""

import asyncio
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

import openai
from pdmesh.config import HttpConfig
from pdmesh.errors import PeerUnavailable
from pdmesh.openai.text import TextModel
from support.api_server import ApiServer, api_server
from support.echo_generator import EchoGenerator
from support.sse import chunks_of, stream_frames

LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


def wait_until_idle(server: ApiServer, timeout_s: float = 3.0) -> None:
    deadline = time.monotonic() + timeout_s
    while server.generator.num_running or server.raw("GET", "/load").json()["server_load"]:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.01)


@pytest.mark.parametrize("failure", [PeerUnavailable("decode died"), RuntimeError("secret")])
def test_catalogue_15_20_a_late_failure_is_an_event_then_done(text: TextModel, failure: Exception) -> None:
    with api_server(text, EchoGenerator(fail_after=2, failure=failure)) as server:
        frames = stream_frames(server, "/v1/completions", {"prompt": "x"})
        assert frames[-1] == "data: [DONE]"
        error = chunks_of(frames)[-1]["error"]
        assert error["code"] == (503 if isinstance(failure, PeerUnavailable) else 500)
        assert "secret" not in error["message"]
        assert [chunk["choices"][0]["text"] for chunk in chunks_of(frames)[:-1]] == ["The", " capital"]
        with server.client() as client, pytest.raises(openai.APIError):
            for _ in client.completions.create(model="echo", prompt="x", stream=True):
                pass
        assert server.generator.num_running == 0


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.05])
def test_one_prompts_late_failure_ends_the_stream_and_its_siblings(text: TextModel, keep_alive_s: float) -> None:
    failing = EchoGenerator(fail_after=3, failure=PeerUnavailable("gone"), fail_prompt=[2], delay_s=0.02)
    config = HttpConfig(sse_keep_alive_interval_s=keep_alive_s)
    with api_server(text, failing, config=config) as server:
        frames = stream_frames(server, "/v1/completions", {**LONG, "prompt": [[1], [2], [3]], "n": 2})
        assert frames[-1] == "data: [DONE]"
        assert frames[-2].startswith(": pdmesh prefill=")
        errors = [chunk for chunk in chunks_of(frames) if "error" in chunk]
        assert [error["error"]["code"] for error in errors] == [503]
        assert "error" in chunks_of(frames)[-1]
        assert {chunk["choices"][0]["index"] for chunk in chunks_of(frames)[:-1]} == set(range(6))
        assert server.generator.num_running == 0
        assert len(server.generator.aborted) == 3
        assert server.generator.num_yielded < 60


def test_catalogue_19_a_client_that_leaves_a_stream_stops_it(text: TextModel) -> None:
    with api_server(text, EchoGenerator(delay_s=0.01)) as server:
        with server.http() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            next(answer.iter_raw())
        wait_until_idle(server)
        assert len(server.generator.aborted) == 1
        assert server.generator.num_yielded < 300
        assert 'pdmesh_api_requests_total{outcome="client_gone"} 1.0' in server.raw("GET", "/metrics").text


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
def test_catalogue_19_a_client_that_leaves_a_whole_answer_stops_it(text: TextModel, prompt: object) -> None:
    with api_server(text, EchoGenerator(delay_s=0.01)) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.raw("POST", "/v1/completions", json={**LONG, "prompt": prompt}, timeout=0.2)
        wait_until_idle(server)
        assert len(server.generator.aborted) == len(server.generator.requests) == (1 if prompt == "x" else 3)


def test_one_prompts_failure_aborts_the_others(text: TextModel) -> None:
    failing = EchoGenerator(fail_after=3, failure=PeerUnavailable("gone"), delay_s=0.005)
    with api_server(text, failing) as server:
        assert server.post("/v1/completions", {**LONG, "prompt": ["x", "y"]}).status_code == 503
        assert server.generator.num_running == 0


def test_a_client_that_does_not_read_holds_back_its_own_stream_only(text: TextModel) -> None:
    """The generator is not drained into memory for it."""
    with api_server(text, EchoGenerator(max_model_len=1_000_000)) as server:
        address = urlsplit(server.url)
        body = json.dumps({"prompt": "x" * 8, "max_tokens": 200_000, "ignore_eos": True, "stream": True, "user": "u"})
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        request = "\r\n".join([*head, f"Content-Length: {len(body)}", "", body])
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((address.hostname, address.port))
            slow.sendall(request.encode())
            seen = wait_until_still(server)
            # What the sockets of both ends hold, some MB at about 200 bytes a token.
            assert 0 < seen < 50_000
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
        wait_until_idle(server)


def wait_until_still(server: ApiServer, timeout_s: float = 15.0) -> int:
    """Return the number of deltas taken once no more are."""
    deadline = time.monotonic() + timeout_s
    seen = -1
    while seen != server.generator.num_yielded or seen == 0:
        assert time.monotonic() < deadline, "the generator is still being read"
        seen = server.generator.num_yielded
        time.sleep(0.3)
    return seen


def test_catalogue_18_keep_alive_comments_fill_silence(text: TextModel) -> None:
    config = HttpConfig(sse_keep_alive_interval_s=0.05)
    with api_server(text, EchoGenerator(first_delay_s=0.2, delay_s=0.12), config=config) as server:
        frames = stream_frames(server, "/v1/completions", {"prompt": "x", "max_tokens": 3})
        assert frames[0] == ": keep-alive"
        assert frames.count(": keep-alive") >= 5
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks_of(frames)) == "The capital of"
        with server.client() as client:
            stream = client.completions.create(model="echo", prompt="x", max_tokens=2, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "The capital"


def test_keep_alives_do_not_outlive_the_client(text: TextModel) -> None:
    config = HttpConfig(sse_keep_alive_interval_s=0.02)
    with api_server(text, EchoGenerator(first_delay_s=30), config=config) as server:
        with server.http() as client, client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            assert next(answer.iter_raw()) == b": keep-alive\n\n"
        wait_until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_over_its_time_is_a_504(text: TextModel, stream: bool) -> None:
    with api_server(text, EchoGenerator(first_delay_s=30), config=HttpConfig(request_timeout_s=0.2)) as server:
        answer = server.post("/v1/completions", {**LONG, "stream": stream})
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "TimeoutError"
        assert 0.1 < server.generator.requests[0].deadline_s <= 0.2
        wait_until_idle(server)


def test_a_stream_over_its_time_ends_with_an_error_event(text: TextModel) -> None:
    with api_server(text, EchoGenerator(delay_s=0.05), config=HttpConfig(request_timeout_s=0.3)) as server:
        frames = stream_frames(server, "/v1/completions", LONG)
        assert frames[-1] == "data: [DONE]"
        assert chunks_of(frames)[-1]["error"]["code"] == 504


def test_the_first_token_does_not_wait_for_the_second(text: TextModel) -> None:
    async def first_event(url: str) -> float:
        started = time.monotonic()
        async with (
            httpx.AsyncClient(timeout=10, verify=False) as client,
            client.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer,
        ):
            await anext(answer.aiter_raw())
            return time.monotonic() - started

    with api_server(text, EchoGenerator(delay_s=5)) as server:
        assert asyncio.run(first_event(server.url)) < 2
        wait_until_idle(server)
