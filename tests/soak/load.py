"""The clients of the soak: requests at a steady rate for as long as wanted, each answer judged; and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

from soak.answers import Answer, Judged, Verdict
from soak.shapes import Shape

REQUEST_TIMEOUT_S = 40.0
"""What the proxy is told to give a request."""
HANG_S = REQUEST_TIMEOUT_S + 15.0
"""An answer that has not ended by then hangs: a frozen proxy may have been late by its freeze."""
CONNECT_RETRY_S = 0.2
MAX_IN_FLIGHT = 24
SLOW_S = 0.03
"""Between two chunks of a client that reads slowly."""
MAX_KEPT = 200
BAD_BODIES: tuple[tuple[str, Any, int], ...] = (
    ("/v1/completions", b'{"prompt": [5, 6', 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": -3}, 400),
    ("/v1/completions", {"prompt": [5] * 5000, "max_tokens": 4}, 400),
    ("/v1/completions", {"prompt": [5, 1 << 40]}, 400),
    ("/v1/completions", {"prompt": [5, 6], "temperature": "hot"}, 400),
    ("/v1/completions", {"prompt": [5, 6], "kv_transfer_params": {"do_remote_prefill": True}}, 400),
    ("/v1/completions", {"prompt": [5, 6], "model": "no-such-model"}, 404),
    ("/v1/chat/completions", {"messages": "hello"}, 400),
    ("/v1/nothing", {}, 404),
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request that was not simply right."""

    at_s: float
    """Seconds since the load began."""
    took_s: float
    shape: int
    streamed: bool
    judged: Judged


class Load:
    """Runs on a thread of its own between `start` and `stop`."""

    def __init__(
        self, url: str, shapes: list[Shape], *, seed: int, rate: float, proxy_killed_since: Callable[[float], bool]
    ) -> None:
        """`proxy_killed_since`: whether one was killed after a time; a connection that was open then may break with it."""
        self.counts: Counter[Verdict] = Counter()
        self.reasons: Counter[str] = Counter()
        """The router's reasons, of right answers."""
        self.fallbacks: Counter[str] = Counter()
        self.kv_sources: Counter[str] = Counter()
        self.seen: deque[Seen] = deque(maxlen=MAX_KEPT)
        self.latencies_s: list[float] = []
        self.num_disconnects = 0
        self.bad_requests: Counter[str] = Counter()
        """Of deliberately bad requests: refused, or what came instead."""
        self._url, self._shapes, self._rate, self._proxy_killed_since = url, shapes, rate, proxy_killed_since
        self._rng = random.Random(seed)
        self._going = threading.Event()
        self._in_flight = 0
        self._stopping = False
        self._began_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._client: httpx.AsyncClient

    @property
    def num_requests(self) -> int:
        return self.counts.total()

    def start(self) -> None:
        self._going.set()
        self._thread.start()

    def pause(self, timeout_s: float) -> bool:
        """Begin nothing new; whether all that runs has ended in time."""
        self._going.clear()
        until = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < until:
            time.sleep(0.05)
        return not self._in_flight

    def resume(self) -> None:
        self._going.set()

    def stop(self) -> None:
        """End after what runs; it has a bounded time."""
        self._stopping = True
        self._going.set()
        self._thread.join(HANG_S + 30)
        if self._thread.is_alive():
            raise AssertionError("the load did not end")

    def beside(self, what: Coroutine[Any, Any, None]) -> Future[None]:
        """Have some clients do this now, beside the others."""
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._arrive())

    async def _arrive(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as self._client,
            asyncio.TaskGroup() as tasks,
        ):
            next_s = time.monotonic()
            while not self._stopping:
                next_s = max(next_s + self._rng.expovariate(self._rate), time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                while not self._stopping and (self._in_flight >= MAX_IN_FLIGHT or not self._going.is_set()):
                    await asyncio.sleep(0.02)
                if not self._stopping:
                    self._in_flight += 1
                    tasks.create_task(self._one(self._rng.choice(self._shapes), streamed=self._rng.random() < 0.6))

    async def _one(self, shape: Shape, *, streamed: bool, pause_s: float = 0.0) -> None:
        began_s = time.monotonic()
        answer = Answer(shape)
        try:
            async with asyncio.timeout(HANG_S):
                await self._ask(shape, answer, streamed=streamed, pause_s=pause_s)
            judged = answer.judge()
        except TimeoutError:
            judged = Judged(verdict=Verdict.HUNG)
        except httpx.TransportError as exc:
            judged = answer.judge()
            if judged.verdict is Verdict.TRUNCATED:
                judged = Judged(verdict=Verdict.TRUNCATED, detail=f"{type(exc).__name__}: {exc}")
        finally:
            self._in_flight -= 1
        if judged.verdict is Verdict.TRUNCATED and self._proxy_killed_since(began_s):
            judged = Judged(verdict=Verdict.LOST, detail=judged.detail)
        self._note(shape, judged, began_s, streamed=streamed)

    def _note(self, shape: Shape, judged: Judged, began_s: float, *, streamed: bool) -> None:
        took_s = time.monotonic() - began_s
        self.counts[judged.verdict] += 1
        self.latencies_s.append(took_s)
        route = dict(part.split("=", 1) for part in judged.route.split("; ") if "=" in part)
        if judged.verdict is Verdict.RIGHT:
            self.reasons[route.get("reason", "")] += 1
            self.kv_sources[route.get("kv", "")] += 1
            self.fallbacks.update(filter(None, route.get("fallbacks", "").split(",")))
            return
        at_s = began_s - self._began_s
        self.seen.append(Seen(at_s=at_s, took_s=took_s, shape=shape.number, streamed=streamed, judged=judged))

    async def _ask(self, shape: Shape, answer: Answer, *, streamed: bool, pause_s: float) -> None:
        body = shape.body | {"return_token_ids": True}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._sent(shape.path, body) as response:
            answer.route = response.headers.get("x-pdmesh-route", "")
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await answer.take_stream(_slowly(response.aiter_lines(), pause_s))
                return
            answer.take((await response.aread() and response.json()) or {})
            answer.ended = response.status_code == 200

    @contextlib.asynccontextmanager
    async def _sent(self, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """Send; where nobody listens, as while the proxy starts anew, try again."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        async with contextlib.AsyncExitStack() as stack:
            while True:
                try:
                    response = await stack.enter_async_context(self._client.stream("POST", path, **content))
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(CONNECT_RETRY_S)
            yield response

    async def burst(self, count: int) -> None:
        """Many requests at once, so that what breaks next meets them in every state."""
        self._in_flight += count
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self._one(self._rng.choice(self._shapes), streamed=self._rng.random() < 0.6))

    async def disconnect_some(self) -> None:
        """Clients that leave: before the first byte, and after some chunks."""
        for _ in range(12):
            shape, leave_after = self._rng.choice(self._shapes), self._rng.choice((0, 0, 1, 2, 5))
            with contextlib.suppress(TimeoutError, httpx.TransportError):
                async with asyncio.timeout(self._rng.uniform(0.002, 0.2) if leave_after == 0 else HANG_S):
                    async with self._sent(shape.path, shape.body | {"stream": True}) as response:
                        lines = 0
                        async for line in response.aiter_lines():
                            lines += bool(line)
                            if lines >= leave_after > 0:
                                break
            self.num_disconnects += 1

    async def read_slowly(self) -> None:
        """Clients that read a chunk now and then; their answers count like all others."""
        longest = sorted(self._shapes, key=lambda shape: -shape.num_completion_tokens)[:20]
        self._in_flight += 6
        async with asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(self._one(self._rng.choice(longest), streamed=True, pause_s=SLOW_S))

    async def ask_badly(self) -> None:
        """Requests that must be refused, each with its status."""
        for path, body, status in BAD_BODIES:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(HANG_S), self._sent(path, body) as response:
                    text = (await response.aread()).decode(errors="replace")
                    refused = response.status_code == status
                    self.bad_requests[
                        "refused" if refused else f"{path} {status}: {response.status_code} {text[:200]}"
                    ] += 1
            except TimeoutError:
                self.bad_requests[f"{path} {status}: hung"] += 1
            except httpx.TransportError as exc:
                lost = self._proxy_killed_since(began_s)
                self.bad_requests["lost with the proxy" if lost else f"{path} {status}: {type(exc).__name__}"] += 1


async def _slowly(lines: AsyncIterator[str], pause_s: float) -> AsyncIterator[str]:
    async for line in lines:
        if pause_s and line:
            await asyncio.sleep(pause_s)
        yield line
