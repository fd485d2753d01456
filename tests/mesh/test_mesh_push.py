"""Prompts that are pushed while they are computed, over real NIXL, and what becomes of them when somebody dies or freezes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, Service, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

CHUNK = 64
ENGINE = (
    "--kv-transfer-mode", "push", "--max-num-batched-tokens", str(CHUNK), "--max-num-seqs", "8", "--block-size", "32",
    # A piece of a push takes as long as a chunk's step: faults hit a write that is under way.
    "--connector-options", '{"nixl": {"throttle_bytes_s": 20000000}}',
)  # fmt: skip
PROXY = (
    "--pd-min-prompt-tokens", "0", "--heartbeat-interval-s", "0.3", "--heartbeat-timeout-s", "2",
    "--engine-wait-timeout-s", "5",
)  # fmt: skip
NUM_TOKENS = 700
MAX_TOKENS = 6


def prompt(number: int, length: int = NUM_TOKENS) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(1000, 40000, length)]


@pytest.fixture(scope="module")
def expected() -> Iterator[Callable[[list[int]], list[int]]]:
    """What one engine alone says."""
    with mesh(DEMO_MODEL, prefill=0, engine_flags=("--max-num-batched-tokens", "512")) as single:
        yield lambda tokens: tokens_of(single.complete(tokens, max_tokens=MAX_TOKENS))


@pytest.fixture(scope="module")
def pushing() -> Iterator[Mesh]:
    with mesh(DEMO_MODEL, connector="nixl", engine_flags=ENGINE, proxy_flags=PROXY) as running:
        yield running


@pytest.fixture
def doomed() -> Iterator[Mesh]:
    """A mesh of its own, for a test after which processes are others than before."""
    with mesh(DEMO_MODEL, connector="nixl", engine_flags=ENGINE, proxy_flags=PROXY) as running:
        yield running


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


class Serving:
    """A request in a thread of its own."""

    def __init__(self, running: Mesh, tokens: list[int]) -> None:
        self.answer: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._running, self._tokens = running, tokens
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def result(self) -> dict[str, Any]:
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.answer

    def _run(self) -> None:
        try:
            self.answer = self._running.complete(self._tokens, max_tokens=MAX_TOKENS)
        except BaseException as exc:
            self.error = exc


def sent(running: Mesh) -> float:
    return sum(v for k, v in running.prefill[0].metrics().items() if "push_bytes_total" in k and "sent" in k)


def quarantined(running: Mesh) -> float:
    return running.decode[0].metric("pdmesh_kv_blocks_quarantined")


def outcomes(service: Service, name: str) -> dict[str, float]:
    return {key: value for key, value in service.metrics().items() if key.startswith(f"{name}_total") and value}


def wait_mid_push(running: Mesh, before: float) -> None:
    """Until some of a prompt is at decode, and much of it is not computed."""
    end_s = time.monotonic() + 20
    while sent(running) <= before:
        assert time.monotonic() < end_s, f"nothing is pushed: {running.prefill[0].log[-2000:]}"
        time.sleep(0.02)


def wait(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.05)


@contextlib.contextmanager
def leaving(running: Mesh, tokens: list[int]) -> Iterator[None]:
    """A client that has asked for these tokens' continuation, and is gone behind the block."""
    body = json.dumps({"prompt": tokens, "max_tokens": MAX_TOKENS, "stream": True})
    url = httpx.URL(running.url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield


@contextlib.contextmanager
def frozen(service: Service) -> Iterator[None]:
    """All processes of a service."""
    parent = psutil.Process(service.process.pid)
    processes = [parent, *parent.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def test_a_long_prompt_is_found_where_it_was_pushed(pushing: Mesh, expected: Callable[[list[int]], list[int]]) -> None:
    before = pushing.decode[0].metric("pdmesh_pushed_tokens_total")
    answer = pushing.complete(prompt(1), max_tokens=MAX_TOKENS)
    assert "kv=push" in answer["headers"]["x-pdmesh-route"]
    assert tokens_of(answer) == expected(prompt(1))
    # All full blocks; the rest was pulled.
    assert pushing.decode[0].metric("pdmesh_pushed_tokens_total") - before == NUM_TOKENS // 32 * 32
    assert pushing.decode[0].metric("pdmesh_fallbacks_total") == 0
    pushing.wait_nothing_held()


def test_a_prompt_of_one_chunk_is_pulled(pushing: Mesh, expected: Callable[[list[int]], list[int]]) -> None:
    answer = pushing.complete(prompt(2, CHUNK), max_tokens=MAX_TOKENS)
    assert "kv=nixl" in answer["headers"]["x-pdmesh-route"]
    assert tokens_of(answer) == expected(prompt(2, CHUNK))


def test_two_at_once_that_begin_alike_are_told_apart(pushing: Mesh, expected: Callable[[list[int]], list[int]]) -> None:
    """Both expect the same blocks at first: what is there twice is named once."""
    beginning = prompt(3, 320)
    prompts = [beginning + prompt(number, 300) for number in (4, 5)]
    serving = [Serving(pushing, each) for each in prompts]
    assert [tokens_of(each.result()) for each in serving] == [expected(each) for each in prompts]
    pushing.wait_nothing_held()


def test_a_client_that_leaves_while_prefill_computes_leaves_nothing_behind(pushing: Mesh) -> None:
    before, over = sent(pushing), outcomes(pushing.decode[0], "pdmesh_pushes_over")
    with leaving(pushing, prompt(6)):
        wait_mid_push(pushing, before)
    wait(lambda: outcomes(pushing.decode[0], "pdmesh_pushes_over") != over, 5.0, "the expectation was not withdrawn")
    [why] = [key for key, num in outcomes(pushing.decode[0], "pdmesh_pushes_over").items() if num != over.get(key)]
    # Decode hears it from the proxy, or sooner from prefill, which the proxy has told as well and which breaks off.
    assert why.endswith(('why="withdrawn"}', 'why="failed"}'))
    pushing.wait_nothing_held(5.0)
    wait(lambda: quarantined(pushing) == 0, 5.0, "blocks stay in quarantine although their writer can be asked")


def test_prefill_dies_in_the_middle_of_a_push(doomed: Mesh, expected: Callable[[list[int]], list[int]]) -> None:
    before = sent(doomed)
    serving = Serving(doomed, prompt(7))
    wait_mid_push(doomed, before)
    doomed.prefill[0].kill()
    assert tokens_of(serving.result()) == expected(prompt(7))
    doomed.prefill.clear()
    wait(lambda: quarantined(doomed) == 0 and doomed.blocks_used() == 0, 12.0, "blocks stay in quarantine")
    assert any("failed" in key for key in outcomes(doomed.decode[0], "pdmesh_pushes_received"))


def test_the_core_of_a_prefill_dies_in_the_middle_of_a_push(
    doomed: Mesh, expected: Callable[[list[int]], list[int]]
) -> None:
    """Its server waited for the core's word on what it wrote: it was down for as long as it may drain."""
    before, prefill = sent(doomed), doomed.prefill[0]
    serving = Serving(doomed, prompt(12))
    wait_mid_push(doomed, before)
    [core] = [
        each
        for each in psutil.Process(prefill.process.pid).children()
        if "pdmesh.engine.core_process" in each.cmdline()
    ]
    core.kill()
    assert prefill.reap(20) == 1
    assert "not drained" not in prefill.log
    doomed.prefill.clear()
    assert tokens_of(serving.result()) == expected(prompt(12))
    wait(lambda: quarantined(doomed) == 0 and doomed.blocks_used() == 0, 12.0, "blocks stay in quarantine")


def test_decode_dies_in_the_middle_of_a_push(doomed: Mesh, expected: Callable[[list[int]], list[int]]) -> None:
    before = sent(doomed)
    serving = Serving(doomed, prompt(8))
    wait_mid_push(doomed, before)
    doomed.decode[0].kill()
    assert tokens_of(serving.result()) == expected(prompt(8))
    doomed.decode.clear()
    doomed.wait_nothing_held()
    assert "kv=push" not in serving.answer["headers"]["x-pdmesh-route"]


def test_a_frozen_owner_is_waited_for_by_blocks_and_by_nobody_else(
    doomed: Mesh, expected: Callable[[list[int]], list[int]]
) -> None:
    """Its word is missing, so the blocks it may write are nobody's, until it is shut out; then it may thaw."""
    before = sent(doomed)
    serving = Serving(doomed, prompt(9))
    wait_mid_push(doomed, before)
    with frozen(doomed.prefill[0]):
        wait(lambda: quarantined(doomed) > 0, 12.0, "blocks that may still be written were given away")
        assert tokens_of(serving.result()) == expected(prompt(9))
        wait(lambda: quarantined(doomed) == 0, 12.0, "blocks stay in quarantine although their writer can be shut out")
        assert doomed.decode[0].metric("pdmesh_kv_blocks_used") == 0
    doomed.wait_healthy()
    doomed.wait_nothing_held(15.0)
    # With what its helper process has registered anew.
    answer = doomed.complete(prompt(10), max_tokens=MAX_TOKENS)
    assert tokens_of(answer) == expected(prompt(10))
    doomed.wait_nothing_held()


def test_an_owner_that_thaws_in_time_says_itself_that_it_has_stopped(doomed: Mesh) -> None:
    before, signals = sent(doomed), doomed.decode[0].log.count("all writers are shut out")
    with leaving(doomed, prompt(11)):
        wait_mid_push(doomed, before)
        parent = psutil.Process(doomed.prefill[0].process.pid)
        parent.send_signal(signal.SIGSTOP)
    try:
        wait(lambda: quarantined(doomed) > 0, 5.0, "blocks that may still be written were given away")
    finally:
        parent.send_signal(signal.SIGCONT)
    wait(lambda: quarantined(doomed) == 0, 8.0, "blocks stay in quarantine")
    doomed.wait_healthy()
    doomed.wait_nothing_held()
    assert doomed.decode[0].log.count("all writers are shut out") == signals
