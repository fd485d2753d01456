"""What a native transport must do for a helper process: the seam behind which NIXL and its like are.

A transport whose library can crash, hang or write late runs in a process of its own (`native_process.py`). That process, the
orders it takes and the fences around it are the same for every transport; only this is not.
"""

import importlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Ranges = NDArray[np.uint64]
"""Pieces of memory as [n, 3] of (address, bytes, device); device is 0, the host, everywhere."""


Arrived = Callable[[int, int], None]
"""Told of ranges that are there, by the places of the first and of the one behind the last in their list."""


Piece = tuple[int, int, int]
"""Local address, remote address, bytes."""


class CopyState(Enum):
    """How a copy is doing. DONE and FAILED both mean that nothing is written on its behalf any more, by whatever part of it."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    UNSETTLED = "unsettled"
    """It failed, and nobody can say whether a part of it goes on."""


class NothingPosted(Exception):
    """A copy could not be begun, and no part of it runs."""


class NativeAgent(ABC):
    """One end of a transport over this host's memory. Called from one thread; no call but `register` may block for long.

    Any call may raise whatever the library raises; the helper process then gives the peer concerned up. An agent serves
    other agents' reads by itself, with threads that sleep while there are none.
    """

    @abstractmethod
    def register(self, address: int, num_bytes: int) -> None:
        """Make host memory a target of reads, and readable by agents that have this one's metadata."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What another agent needs to read from this one; taken once, after the last `register`."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> str:
        """Take another agent's metadata; returns the name by which the calls below know it. It may be connected later, by the
        first read."""

    @abstractmethod
    def remove_peer(self, name: str) -> None:
        """Close the connection to an agent and forget it; none of its copies runs."""

    @abstractmethod
    def read(self, local: Ranges, remote: Ranges, peer: str) -> int:
        """Begin to copy remote ranges into local ones, in pairs of one length; returns a handle. Raises NothingPosted; after
        anything else that it raises a part may run."""

    @abstractmethod
    def state(self, handle: int) -> CopyState:
        """Ask how a copy is doing; never raises."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Free a handle. Raises while the copy runs, whatever the library would do then: what it calls a cancellation rarely
        says that nothing is written any more."""


class WritingAgent(NativeAgent):
    """An agent that can also write into the registered memory of others."""

    @abstractmethod
    def write(self, local: Ranges, remote: Ranges, peer: str) -> int:
        """Begin to copy local ranges into remote ones, as `read` does the other way. DONE means that all bytes are in
        the peer's memory, FAILED only that this side reads no more of them: some may be on their way."""


class SteppingAgent(WritingAgent):
    """An agent that copies in the calls themselves, where it can, and has several threads for that."""

    @abstractmethod
    def takes_steps(self, peer: str) -> bool:
        """Whether reads of a peer are expected to be done so."""

    @abstractmethod
    def read_in_steps(self, local: Ranges, remote: Ranges, peer: str, arrived: Arrived) -> int:
        """As `read`; before it returns `arrived` may be called, in several threads at once, with ranges that are there. Not with
        all of them: what it is not told of is there when the read is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """What an engine must know of a native transport without importing its library."""

    name: str
    """Of its connector."""
    title: str
    """Of its library, for people."""
    packages: tuple[str, ...]
    """Import names under which the library is published; one is enough."""
    remedy: str
    """What to do where there is none."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of the helper process, where the operator has set nothing; the engine's own stays as it is."""
    loopback_environment: dict[str, str] = field(default_factory=dict)
    """More of it, for a service that only this host may reach. What a transport carries is not authenticated by it, so it must
    not listen on other networks then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What a helper process makes its agent from."""

    name: str
    """Unique among all lives of all agents."""
    on_loopback: bool
    """Only this host may reach it."""
    num_threads: int = 0
    """0: the library's default."""
    host: str = ""
    """Address under which other agents reach it; empty: it finds out, or does not need one."""


AGENTS = {
    "nixl": "pdmesh.connector.nixl_agent:nixl_agents",
    "mooncake": "pdmesh.connector.mooncake_agent:MooncakeAgent",
    "ucxx": "pdmesh.connector.ucxx_agent:UcxxAgent",
}
"""Transport -> where its agent is; imported in the helper process alone."""


def make_agent(transport: str, settings: AgentSettings) -> NativeAgent:
    """Make the agent of a transport; imports its library."""
    module, _, name = AGENTS[transport].partition(":")
    maker: Callable[[AgentSettings], NativeAgent] = getattr(importlib.import_module(module), name)
    return maker(settings)


def merged(local: Ranges, remote: Ranges, most_bytes: int) -> "deque[Piece]":
    """Join ranges that are neighbours on both sides, to pieces of at most `most_bytes`; longer ranges stay as they are."""
    pieces: deque[Piece] = deque()
    for (begin, num_bytes, _), (source, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
        if pieces:
            before, source_before, num_before = pieces[-1]
            is_next = before + num_before == begin and source_before + num_before == source
            if is_next and num_before + num_bytes <= most_bytes:
                pieces[-1] = (before, source_before, num_before + num_bytes)
                continue
        pieces.append((begin, source, num_bytes))
    return pieces
