"""A small streaming client of the OpenAI API, for people at a terminal."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import httpx

from pdmesh.errors import ConfigError, InternalError, PeerUnavailable

CONNECT_TIMEOUT_S = 5.0
# The wait for one more token; a long prompt on a slow machine takes this long.
READ_TIMEOUT_S = 600.0
ROUTE_HEADER = "x-pdmesh-route"


class Client:
    """One server and one model; `connect` before use.

    Raises PeerUnavailable when the server is not there, InternalError for what it answers.
    """

    def __init__(self, url: str, model: str, api_key: str, max_tokens: int, temperature: float | None) -> None:
        # PDMESH_API_KEY may hold several.
        key = api_key.partition(",")[0].strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/") + "/",
                headers=headers,
                timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            )
        except httpx.InvalidURL as exc:
            raise ConfigError(f"url: {url!r} is no URL: {exc}") from None
        self._url = url
        self._model = model
        self._options: dict[str, Any] = {"max_tokens": max_tokens}
        if temperature is not None:
            self._options["temperature"] = temperature
        self.last: dict[str, Any] = {}
        """Time to first token, speed, usage and route of the last answer."""

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def connect(self) -> None:
        """See that the server answers, and learn which model it has when none was named. Raises as a request would."""
        try:
            response = self._http.get("models")
        except httpx.HTTPError as exc:
            raise PeerUnavailable(f"{self._url} cannot be reached: {str(exc) or type(exc).__name__}") from None
        if self._model:
            return
        if response.status_code != 200:
            raise InternalError(_message(response))
        self._model = response.json()["data"][0]["id"]

    def chat(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Yield the answer's text as it comes."""
        return self._stream("chat/completions", {"messages": messages}, _chat_text)

    def complete(self, prompt: str) -> Iterator[str]:
        """Yield the continuation's text as it comes."""
        return self._stream("completions", {"prompt": prompt}, _completion_text)

    def _stream(self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str]) -> Iterator[str]:
        request = (
            {"model": self._model, "stream": True, "stream_options": {"include_usage": True}} | self._options | body
        )
        began_s = time.perf_counter()
        first_s = 0.0
        usage: dict[str, Any] = {}
        try:
            with self._http.stream("POST", path, json=request) as response:
                if response.status_code != 200:
                    response.read()
                    raise InternalError(_message(response))
                for event in _events(response):
                    if "error" in event:
                        raise InternalError(str(event["error"].get("message", event["error"])))
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", [])[:1]:
                        if text := text_of(choice):
                            first_s = first_s or time.perf_counter()
                            yield text
                self.last = _statistics(began_s, first_s, usage) | {"route": response.headers.get(ROUTE_HEADER, "")}
        except httpx.HTTPError as exc:
            raise PeerUnavailable(f"{self._url}: {str(exc) or type(exc).__name__}") from None


def run_chat(client: Client, system_prompt: str, quick: str, stats: bool) -> None:
    """Hold a conversation on the terminal, or one turn of it."""
    client.connect()
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for line in [quick] if quick else _lines():
        messages.append({"role": "user", "content": line})
        answer = _print(client, client.chat(messages), stats)
        messages.append({"role": "assistant", "content": answer})


def run_complete(client: Client, quick: str, stats: bool) -> None:
    """Continue each line typed, or one text."""
    client.connect()
    for line in [quick] if quick else _lines():
        _print(client, client.complete(line), stats)


def _lines() -> Iterator[str]:
    """Lines from the terminal or a pipe until it ends; empty ones are skipped."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            return
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _print(client: Client, pieces: Iterator[str], stats: bool) -> str:
    answer = []
    for piece in pieces:
        answer.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if stats:
        last = client.last
        sys.stderr.write(
            f"[{last['tokens']} tokens, first after {last['first_token_ms']:.0f} ms, then {last['tokens_per_s']:.1f}/s; "
            f"prompt {last['prompt_tokens']} ({last['cached_tokens']} cached)] {last['route']}\n"
        )
    return "".join(answer)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _statistics(began_s: float, first_s: float, usage: dict[str, Any]) -> dict[str, Any]:
    tokens = int(usage.get("completion_tokens", 0))
    spent_s = time.perf_counter() - first_s if first_s else 0.0
    return {
        "tokens": tokens,
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        "first_token_ms": (first_s - began_s) * 1e3 if first_s else 0.0,
        "tokens_per_s": (tokens - 1) / spent_s if tokens > 1 and spent_s > 0 else 0.0,
    }


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"


def _chat_text(choice: dict[str, Any]) -> str:
    return (choice.get("delta") or {}).get("content") or ""


def _completion_text(choice: dict[str, Any]) -> str:
    return choice.get("text") or ""
