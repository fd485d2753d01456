"""A client of the OpenAI API that shows how far its answer has come, and can leave at any moment."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from faults.matrix import Answer

ANSWER_OF_STATUS = {503: Answer.UNAVAILABLE, 502: Answer.TRANSFER_FAILED}
POLL_S = 0.01


class Client:
    """One streamed completion, read in a thread. It asks at the next of `addresses` when its connection ended too soon: give it
    more than one only where a proxy is taken from it, else a stream that was cut short would be hidden.
    """

    def __init__(self, addresses: list[tuple[str, int]], body: dict[str, Any], *, timeout_s: float) -> None:
        self._addresses = addresses
        self._body = body | {"stream": True, "return_token_ids": True}
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._connection: http.client.HTTPConnection | None = None
        self._has_left = False
        self.tokens: list[int] = []
        self.past_tokens: list[list[int]] = []
        """Of connections that ended too soon."""
        self.route = ""
        self.error: dict[str, Any] = {}
        self.failure = ""
        self.is_done = False
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Close the connection, whatever has come."""
        self._has_left = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def wait_tokens(self, count: int, within_s: float) -> None:
        wait_until(lambda: len(self.tokens) >= count or self.is_over, within_s, f"{count} tokens")
        assert len(self.tokens) >= count, f"the answer was over after {len(self.tokens)} tokens: {self.told}"

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def told(self) -> str:
        """Whatever was said beside tokens."""
        return str(self.error.get("message", "")) or self.failure

    def wait_over(self) -> None:
        """Wait for the answer's end; longer than the mesh may take."""
        self._thread.join(max(0.0, self._began_s + self._timeout_s - time.monotonic()))
        self.seconds = self.seconds or time.monotonic() - self._began_s

    def answer(self, expected: list[int]) -> Answer:
        """Judge what has come against the single engine's tokens."""
        for tokens in (*self.past_tokens, self.tokens):
            if tokens != expected[: len(tokens)]:
                return Answer.WRONG
        if self._has_left:
            return Answer.LEFT
        if not self.is_over:
            return Answer.LATE
        if self.error:
            return ANSWER_OF_STATUS.get(int(self.error.get("code") or 0), Answer.OTHER)
        if self.failure:
            return Answer.BROKEN
        return Answer.RIGHT if self.tokens == expected else Answer.WRONG

    def _run(self) -> None:
        for address in self._addresses:
            self.failure = ""
            try:
                self._ask(*address)
            except (OSError, http.client.HTTPException) as exc:
                self.failure = f"{type(exc).__name__}: {exc}"
            if self.error or self.is_done or self._has_left:
                break
            self.failure = self.failure or "the stream ended without its end mark"
            self.past_tokens.append(self.tokens)
            self.tokens = []
        if not self.tokens and self.past_tokens and self.failure:
            self.tokens = self.past_tokens.pop()
        self.seconds = time.monotonic() - self._began_s

    def _ask(self, host: str, port: int) -> None:
        connection = self._connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.error = {"code": response.status} | json.loads(response.read()).get("error", {})
                return
            for line in response:
                self._take(line.decode().rstrip("\n"))

    def _take(self, line: str) -> None:
        if line.startswith(": pdmesh "):
            self.route = line.removeprefix(": pdmesh ")
        elif line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = event["error"]
            for choice in event.get("choices", ()):
                self.tokens += choice.get("token_ids") or []


class Ballast:
    """A request straight to one engine that nobody reads: it takes a row there, and sets the pace of the engine's steps."""

    def __init__(self, host: str, port: int, prompt: list[int], *, pace_s: float, hold: str = "") -> None:
        body = {
            "prompt": prompt,
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "vllm_xargs": {"pace_s": pace_s, "hold": hold},
        }
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        self._socket = socket.create_connection((host, port), timeout=10)
        self._socket.sendall(head.encode() + data)

    def close(self) -> None:
        """Leave; the engine drops the request."""
        self._socket.close()


def wait_until(is_so: Callable[[], bool], within_s: float, what: str) -> None:
    """Look until something is so. Raises AssertionError, naming it, when that takes longer than `within_s`."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(POLL_S)
