"""A proxy that is restarted under load: whoever shares its listening socket loses no request, and nobody waits for its port."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from faults.client import wait_until
from support import mesh
from support.mesh import Service
from support.tiny_models import make_tiny

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

TESTS = Path(__file__).resolve().parents[1]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NUM_TOKENS = 6
NUM_RESTARTS = 2
ANSWERS_BETWEEN = 20
WITHIN_S = 30.0
LONG_TOKENS = 400
PACE_S = 0.1
"""A step of the engine while the long stream runs: that lasts longer than a proxy takes to start, or until it is let go."""


class Proxy:
    """One start of a proxy, with what it tells about itself."""

    def __init__(self, folder: Path, decode: Service, *flags: str, fd: int = -1) -> None:
        self._told, write_end = os.pipe()
        passed = [write_end, *([fd] if fd >= 0 else [])]
        flags = (*flags, *(("--listen-fd", str(fd)) if fd >= 0 else ()))
        command = ("--model", str(folder / "model"), "--prefill", "", "--decode", decode.grpc)
        self.log_path = folder / f"proxy-{len(list(folder.glob('proxy-*')))}.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdmesh_proxy", "--notify-fd", str(write_end), *command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=passed,
                env=os.environ | {"PDMESH_SECRET": "a-secret-for-the-tests"},
            )
        os.close(write_end)
        self._text = b""

    def wait_told(self, what: str) -> dict[str, Any]:
        """Wait until it says so of itself."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            for line in self._text.split(b"\n")[:-1]:
                if (message := json.loads(line)).get(what):
                    return dict(message)
            assert time.monotonic() < deadline, f"not {what}:\n{self.log_path.read_text()}"
            if select.select([self._told], [], [], 0.2)[0]:
                data = os.read(self._told, 65536)
                assert data, f"it ended, and was not {what}:\n{self.log_path.read_text()}"
                self._text += data

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._told)


class Load:
    """Clients that ask again and again, some with one connection, some with a new one each time."""

    def __init__(self, url: str, *, retry_refused: bool = False) -> None:
        self._url, self._retry_refused = url, retry_refused
        self._over = threading.Event()
        self.tokens: list[tuple[int, ...]] = []
        self.failures: list[str] = []
        self.refused = 0
        self._threads = [threading.Thread(target=self._ask_on, args=(keeps,)) for keeps in (True, True, False, False)]
        for thread in self._threads:
            thread.start()

    def wait_more(self, count: int) -> None:
        """Wait until so many more answers have come."""
        goal = len(self.tokens) + count
        wait_until(lambda: len(self.tokens) >= goal or bool(self.failures), WITHIN_S, f"{count} more answers")

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, keeps_connection: bool) -> None:
        with contextlib.ExitStack() as stack:
            kept = stack.enter_context(httpx.Client(timeout=WITHIN_S, verify=False)) if keeps_connection else None
            while not self._over.is_set():
                try:
                    self.tokens.append(ask(self._url, kept))
                except httpx.ConnectError as exc:
                    self.refused += 1
                    if not self._retry_refused:
                        self.failures.append(f"{type(exc).__name__}: {exc}")
                    self._over.wait(0.02)
                except (httpx.HTTPError, AssertionError) as exc:
                    self.failures.append(f"{type(exc).__name__}: {exc}")
                # As long as a client thinks: its connection is at rest meanwhile.
                self._over.wait(0.02)


def ask(url: str, client: httpx.Client | None = None, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    post = httpx.post if client is None else client.post
    answer = post(f"{url}/v1/completions", json=body, **({"timeout": WITHIN_S} if client is None else {}))
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
    return tuple(answer.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("restart")
    model = make_tiny("llama", folder / "model")
    flags = ("--model", str(model), "--dtype", "float32", "--port", "0", "--grpc-port", "0", "--cpu-threads", "1")
    more = ("--kv-cache-memory-bytes", str(8 << 20), "--logits-processors", "faults.pacer:Pacer")
    service = mesh.start("decode", *flags, *more, folder=folder, env={"PYTHONPATH": _path()})
    try:
        yield service.wait_ready()
    finally:
        service.stop()


@pytest.fixture(autouse=True)
def no_processes_left() -> None:
    """The decode of this module outlives its first test."""


def _path() -> str:
    return os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def folder(decode: Service) -> Path:
    return decode.log_path.parent


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """While this file is there, long streams are slow."""
    path = tmp_path / "slow"
    path.touch()
    return path


def stream(url: str, slow: Path) -> Iterator[str]:
    """The lines of a long answer, as they come."""
    body = {"prompt": PROMPT, "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body["vllm_xargs"] = {"pace_s": PACE_S, "pace_while": str(slow)}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WITHIN_S) as answer:
        assert answer.status_code == 200, answer.read()
        yield from answer.iter_lines()


def test_no_request_is_lost_while_one_proxy_takes_anothers_place(decode: Service, folder: Path, slow: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        proxies = [Proxy(folder, decode, fd=listener.fileno())]
        load = None
        try:
            proxies[0].wait_told("ready")
            right = ask(url)
            load = Load(url)
            load.wait_more(ANSWERS_BETWEEN)
            for _ in range(NUM_RESTARTS):
                slow.touch()
                lines = stream(url, slow)
                first = next(lines)
                proxies[-1].terminate()
                proxies[-1].wait_told("leaving")
                proxies.append(Proxy(folder, decode, fd=listener.fileno()))
                proxies[-1].wait_told("ready")
                load.wait_more(ANSWERS_BETWEEN)
                assert proxies[-2].process.poll() is None
                slow.unlink()
                # The stream that the old one had goes on beside the new one, and the old one ends with it.
                assert [first, *lines][-2:] == ["data: [DONE]", ""]
                assert proxies[-2].process.wait(WITHIN_S) == 0, proxies[-2].log_path.read_text()
                load.wait_more(ANSWERS_BETWEEN)
        finally:
            if load is not None:
                load.stop()
            for proxy in proxies:
                proxy.close()
    assert not load.failures, load.failures[:5]
    assert set(load.tokens) == {right}


def test_the_port_is_free_for_a_successor_as_soon_as_a_proxy_is_told_to_end(
    decode: Service, folder: Path, slow: Path
) -> None:
    first = Proxy(folder, decode, "--port", "0")
    proxies = [first]
    load = None
    try:
        port = first.wait_told("ready")["http_port"]
        url = f"http://127.0.0.1:{port}"
        right = ask(url)
        load = Load(url, retry_refused=True)
        load.wait_more(ANSWERS_BETWEEN)
        lines = stream(url, slow)
        started = next(lines)
        first.terminate()
        first.wait_told("leaving")
        proxies.append(Proxy(folder, decode, "--port", str(port)))
        proxies[-1].wait_told("ready")
        load.wait_more(ANSWERS_BETWEEN)
        assert first.process.poll() is None
        slow.unlink()
        assert [started, *lines][-2:] == ["data: [DONE]", ""]
        assert first.process.wait(WITHIN_S) == 0
    finally:
        if load is not None:
            load.stop()
        for proxy in proxies:
            proxy.close()
    # Who connected while nobody listened was refused, and may have asked again; no request that got in was lost.
    assert not load.failures, load.failures[:5]
    assert set(load.tokens) == {right}


def test_balancers_are_told_before_the_port_is_closed(decode: Service, folder: Path) -> None:
    proxy = Proxy(folder, decode, "--port", "0", "--drain-grace-s", "2")
    try:
        url = f"http://127.0.0.1:{proxy.wait_told('ready')['http_port']}"
        right = ask(url)
        assert httpx.get(f"{url}/health", timeout=WITHIN_S).status_code == 200
        proxy.terminate()
        wait_until(lambda: httpx.get(f"{url}/health", timeout=WITHIN_S).status_code == 503, 1.5, "unhealthy")
        # Endpoints are removed later than the signal comes.
        assert ask(url) == right
        assert httpx.get(f"{url}/health", timeout=WITHIN_S).headers["connection"] == "close"
        proxy.wait_told("leaving")
        with pytest.raises(httpx.ConnectError):
            ask(url)
        assert proxy.process.wait(WITHIN_S) == 0
    finally:
        proxy.close()
