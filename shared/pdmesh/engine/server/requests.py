"""The server's table of running requests: who waits for each one's deltas, what it still owes, and when it is overdue.

The core knows a request under an id minted here, so that a retry under the same client-visible id never receives tokens
of the attempt before it. A request leaves the table exactly once: finished, failed, or aborted.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdmesh.engine.messages import NeedsSource, TransferEnded
from pdmesh.engine.push_messages import PUSH_SOURCE
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest
from pdmesh.protocol.ticket import request_digest


class Sink(ABC):
    """Takes the deltas of requests: a proxy's session or a caller in this process."""

    @abstractmethod
    def put(self, delta: ChoiceDelta) -> None:
        """Accept one delta; never blocks, never raises. Deltas of one engine step leave together."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRequest:
    """One accepted request until its last delta."""

    request: GenerateRequest
    core_id: str
    sink: Sink
    open_choices: set[int]
    """Choices that still owe deltas."""
    arrived_s: float
    """Monotonic."""
    offer_id: str = ""
    ticket_offer_id: str = ""
    """The offer that its ticket names."""
    owes_commit: bool = False
    """The proxy holds a ticket's offer until it hears `kv_committed`."""
    is_in_doubt: bool = False
    """Its KV came damaged: what came with that has not been drawn again for every choice."""
    fetch_failure: str = ""
    """Why the intended KV was given up before the core saw the request; shown as `recompute:<reason>`."""
    pulled_s: float | None = None
    """When its KV had arrived; None when none has, or the token after it is out."""
    submission: asyncio.Task[None] | None = None
    """Set until the request is with the core, when that takes calls to other services."""
    in_core: bool = False
    early: list[ChoiceDelta | TransferEnded | NeedsSource] | None = None
    """What the core has said of it while it is only held there; None while it is not."""
    timer: asyncio.TimerHandle | None = None
    first_tokens: dict[int, list[int]] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)
    """Choices of a prefill-only request that their first token did not end."""
    queued_s: float = 0.0
    """Seconds it waited in the core before its first step."""
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)
    has_answered: bool = False
    """Whether its first delta is out."""
    num_generated: int = 0
    num_cached: int = 0
    kv_source: str = ""
    kv_bytes: int = 0
    finish_reason: str = ""
    tokens: NDArray[np.int64] | None = None
    """`request.token_ids` as an array, when somebody has made it one."""
    _digest: bytes = b""

    def go_on(self, first_tokens: list[int]) -> None:
        """What its prompt was awaited for is there: from here on it is a request that came now, with these tokens emitted."""
        now = time.monotonic()
        self.request = msgspec.structs.replace(
            self.request, emitted=[first_tokens], deadline_s=max(0.0, self.request.deadline_s - (now - self.arrived_s))
        )
        self.arrived_s = now

    @property
    def digest(self) -> bytes:
        """`request_digest` of its prompt. Hashing takes time with the prompt's length, so it is done once."""
        if not self._digest:
            tokens = self.request.token_ids if self.tokens is None else self.tokens
            self._digest = request_digest(tokens, cache_salt=self.request.cache_salt)
        return self._digest

    @property
    def remaining_s(self) -> float:
        """Seconds left of its deadline."""
        return max(0.0, self.request.deadline_s - (time.monotonic() - self.arrived_s))

    def note_pushed(self, num_bytes: int) -> None:
        """Some of its KV was pushed here before it came."""
        self.kv_bytes += num_bytes
        self.kv_source = PUSH_SOURCE

    def commit(self) -> None:
        """Tell a proxy once that this engine needs its ticket's offer no longer."""
        if self.owes_commit:
            self.owes_commit = False
            choice = min(self.open_choices, default=0)
            self.sink.put(ChoiceDelta(request_id=self.request.request_id, choice=choice, kv_committed=True))


class RequestTable:
    """Running requests by core id, and by who asked under which id."""

    def __init__(self) -> None:
        self._by_core_id: dict[str, RunningRequest] = {}
        self._by_sink: dict[tuple[Sink, str], RunningRequest] = {}
        self._minted = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_core_id)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(list(self._by_core_id.values()))

    def add(
        self, request: GenerateRequest, sink: Sink, on_deadline: Callable[[RunningRequest], None]
    ) -> RunningRequest:
        """Enter a request whose id is not running for this sink; `on_deadline` is called when its time is up."""
        assert (sink, request.request_id) not in self._by_sink
        running = RunningRequest(
            request=request,
            core_id=self._minted_id(request),
            sink=sink,
            open_choices=set(request.choices),
            arrived_s=time.monotonic(),
        )
        running.timer = asyncio.get_running_loop().call_later(request.deadline_s, on_deadline, running)
        self._by_core_id[running.core_id] = running
        self._by_sink[(sink, request.request_id)] = running
        self._empty.clear()
        self._filled.set()
        return running

    def rename(self, running: RunningRequest) -> None:
        """Give a request another id in the core: what comes under the old one is nobody's."""
        if self._by_core_id.pop(running.core_id, None) is not None:
            running.core_id = self._minted_id(running.request)
            self._by_core_id[running.core_id] = running

    def _minted_id(self, request: GenerateRequest) -> str:
        self._minted += 1
        return f"{request.request_id}#{self._minted}"

    def get(self, core_id: str) -> RunningRequest | None:
        return self._by_core_id.get(core_id)

    def find(self, sink: Sink, request_id: str) -> RunningRequest | None:
        return self._by_sink.get((sink, request_id))

    def of(self, sink: Sink) -> list[RunningRequest]:
        return [running for running in self._by_core_id.values() if running.sink is sink]

    def remove(self, running: RunningRequest) -> bool:
        """Take a request out; False when it had ended already."""
        if self._by_core_id.pop(running.core_id, None) is None:
            return False
        del self._by_sink[(running.sink, running.request.request_id)]
        if running.timer is not None:
            running.timer.cancel()
        if not self._by_core_id:
            self._empty.set()
            self._filled.clear()
        return True

    async def filled(self) -> None:
        """Return when a request runs."""
        await self._filled.wait()

    async def emptied(self) -> None:
        """Return when no request runs."""
        await self._empty.wait()
