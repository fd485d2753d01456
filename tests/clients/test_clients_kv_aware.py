"""vllm-router 0.1.17, unchanged, with its kv_aware policy over two of our engines."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.mesh import Service, start
from support.router import free_port, running_router
from support.tiny_models import make_tiny

ROUTER = os.environ.get("PDMESH_TEST_VLLM_ROUTER") or shutil.which("vllm-router")
EVENTS = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
BLOCK_SIZE = 16

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not ROUTER, reason="vllm-router is not installed; ./dev test installs it"),
]

WORDS = ("one", "two", "three", "four", "five", "six")
TEXTS = [f"{word}: " + "The quick brown fox jumps over the lazy dog. " * 3 for word in WORDS]
CHAT = [{"role": "user", "content": "Tell me a story about the sea, the wind and the old town. " * 3}]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    folder = tmp_path_factory.mktemp("engines")
    model = make_tiny("llama", folder / "tiny")
    flags = ("--model", str(model), "--port", "0", "--grpc-port", "0", "--cpu-threads", "1")
    flags += ("--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(8 << 20), "--kv-events-config", EVENTS)
    services = [start("decode", *flags, folder=folder) for _ in range(2)]
    try:
        yield [service.wait_ready() for service in services]
    finally:
        for service in services:
            service.stop()


@contextlib.contextmanager
def router(engines: list[Service], folder: Path) -> Iterator[str]:
    port, metrics_port = free_port(), free_port()
    command = [str(ROUTER), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "kv_aware", "--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", "tiny"]
    for engine in engines:
        source = httpx.get(f"{engine.http}/kv_event_sources").json()["0"]
        command += ["--kv-event-source", f"{engine.http}={source['endpoint']}"]
        command += ["--kv-event-replay-source", f"{engine.http}={source['replay_endpoint']}"]
    command += ["--worker-urls", *(engine.http for engine in engines)]
    log_path = folder / "router.log"
    with running_router(command, port, log_path) as url:
        yield url


def ask(url: str, text: str) -> int:
    """The prompt's cached tokens, as whoever answered has them."""
    body = {"model": "tiny", "prompt": text, "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_requests_go_where_their_prefix_is(engines: list[Service], tmp_path: Path) -> None:
    """Each prompt is computed by one engine alone; the router, which was never asked for it, finds that engine."""
    with router(engines, tmp_path) as url:
        # The router's subscriptions are on their way; a batch behind the first ones makes it ask for those.
        for index, text in enumerate(TEXTS):
            assert ask(engines[index % 2].http, text) == 0
        wait_until_found(url, TEXTS[0])
        assert all(ask(url, text) >= 2 * BLOCK_SIZE for text in TEXTS)

        chat = {"model": "tiny", "messages": CHAT, "max_tokens": 1, "temperature": 0}
        for engine in engines[1:]:
            assert httpx.post(f"{engine.http}/v1/chat/completions", json=chat, timeout=30).status_code == 200
        time.sleep(1)
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=30)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * BLOCK_SIZE

        # Emptied and filled the other way round, they are found the other way round.
        for engine in engines:
            assert httpx.post(f"{engine.http}/reset_prefix_cache", timeout=30).json() == {"success": True}
        for index, text in enumerate(TEXTS):
            assert ask(engines[1 - index % 2].http, text) == 0
        wait_until_found(url, TEXTS[0])
        assert all(ask(url, text) >= 2 * BLOCK_SIZE for text in TEXTS)


def wait_until_found(url: str, text: str) -> None:
    """What is asked too early goes anywhere, and is then found there; so only the last answer counts."""
    time.sleep(1)
    deadline = time.monotonic() + 10
    while not ask(url, text):
        assert time.monotonic() < deadline
        time.sleep(0.2)
