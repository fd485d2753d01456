"""When the soak breaks what: a plan drawn from a seed, an engine's fault at every beat and others in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

CONNECTORS = {
    "prefill-0": "shm,file,grpc",
    "prefill-1": "nixl,grpc",
    "decode-0": "shm,grpc",
    "decode-1": "nixl,file,grpc",
}
"""Of each engine, in order of preference. Each of the four pairs has a way of its own: shm, file, grpc and nixl."""
PUSHING = ("prefill-1", "decode-1")
"""Where both have nixl: the one writes long prompts into the other's memory while it computes them; short ones are pulled."""
WAYS = ("shm", "file", "grpc", "nixl", "push", "tier")
"""By which KV must have come, some time in half an hour."""
ENGINES = tuple(CONNECTORS)
WITH_HELPER = tuple(name for name, connectors in CONNECTORS.items() if "nixl" in connectors)
FREEZE_S = 5.0
LONG_FREEZE_S = 13.0
"""Longer than an offer's lease (10 s), and than the silence for which a proxy waits (6 s)."""


class Part(StrEnum):
    """Processes of one service."""

    ALL = "all"
    SERVER = "server"
    CORE = "core"
    HELPER = "helper"
    """NIXL's process."""


class Deed(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    RESTART = "restart"
    """SIGTERM, drain, and a new start."""
    FILL = "fill"
    """No memory left for what is written."""
    CORRUPT = "corrupt"
    """A flipped bit in what is stored."""
    CUT = "cut"
    """All connections between the proxy and an engine."""
    DELAY = "delay"
    """What they carry, by 500 ms."""
    LOSS = "lose"
    """Packets: what they carry is late now and then by the time after which TCP sends again."""
    SKEW = "skew"
    """SIGTERM, and a new start whose monotonic clock, and that since boot, are a minute ahead until it ends."""
    STRANGER = "stranger"
    """An engine with another model joins for a while."""
    DISCONNECTS = "disconnects"
    SLOW_CLIENTS = "slow_clients"
    BAD_REQUESTS = "bad_requests"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing to break."""

    deed: Deed
    target: str
    """Service: an engine's name, proxy, kvcache, valkey; or clients, mesh, disk: the one that Valkey and connector file have."""
    part: Part = Part.ALL
    duration_s: float = 0.0

    def __str__(self) -> str:
        part = f" {self.part}" if self.part is not Part.ALL else ""
        return f"{self.deed} {self.target}{part}{f' {self.duration_s:g} s' if self.duration_s else ''}"


@dataclass(frozen=True, kw_only=True)
class Event:
    at_s: float
    fault: Fault


ENGINE_FAULTS = (
    *(Fault(deed=Deed.KILL, target=name, part=part) for name in ENGINES for part in (Part.SERVER, Part.CORE)),
    *(Fault(deed=Deed.KILL, target=name, part=Part.HELPER) for name in WITH_HELPER),
    *(Fault(deed=Deed.FREEZE, target=name, part=Part.HELPER, duration_s=FREEZE_S) for name in WITH_HELPER),
    *(
        Fault(deed=Deed.FREEZE, target=name, part=part, duration_s=FREEZE_S)
        for name in ENGINES
        for part in (Part.ALL, Part.SERVER, Part.CORE)
    ),
    *(Fault(deed=Deed.FREEZE, target=name, duration_s=LONG_FREEZE_S) for name in ENGINES),
    *(Fault(deed=Deed.RESTART, target=name) for name in ENGINES),
)
OTHER_FAULTS = (
    *(Fault(deed=deed, target=name) for name in ("proxy", "kvcache", "valkey") for deed in (Deed.KILL, Deed.RESTART)),
    *(Fault(deed=Deed.FREEZE, target=name, duration_s=FREEZE_S) for name in ("proxy", "kvcache", "valkey")),
    Fault(deed=Deed.FILL, target="valkey", duration_s=FREEZE_S),
    Fault(deed=Deed.CORRUPT, target="valkey"),
    Fault(deed=Deed.CORRUPT, target="kvcache"),
    *(Fault(deed=Deed.CUT, target=name) for name in ("prefill-0", "decode-0")),
    *(Fault(deed=Deed.DELAY, target=name, duration_s=FREEZE_S) for name in ("prefill-1", "decode-1")),
    *(Fault(deed=Deed.LOSS, target=name, duration_s=FREEZE_S) for name in ("prefill-0", "decode-1")),
    *(Fault(deed=Deed.SKEW, target=name) for name in ("prefill-1", "decode-0", "proxy")),
    Fault(deed=Deed.FILL, target="disk", duration_s=FREEZE_S),
    Fault(deed=Deed.STRANGER, target="mesh", duration_s=FREEZE_S),
    *(Fault(deed=deed, target="clients") for deed in (Deed.DISCONNECTS, Deed.SLOW_CLIENTS, Deed.BAD_REQUESTS)),
)
OTHERS_PER_BEAT = 2


def plan(seed: int, duration_s: float, every_s: float) -> list[Event]:
    """Return what to break, in order of time: an engine fault per beat, each once before any again, and others between."""
    rng = random.Random(seed)
    engine_faults, other_faults = _deck(rng, ENGINE_FAULTS), _deck(rng, OTHER_FAULTS)
    events: list[Event] = []
    # Nothing breaks in the last beat: what is then left behind must go by itself.
    for beat in range(int(duration_s // every_s)):
        begin_s = beat * every_s
        events.append(Event(at_s=begin_s + rng.uniform(0.1, 0.3) * every_s, fault=next(engine_faults)))
        for part in range(OTHERS_PER_BEAT):
            share = (0.4 + 0.5 * (part + rng.random()) / OTHERS_PER_BEAT) * every_s
            events.append(Event(at_s=begin_s + share, fault=next(other_faults)))
    return sorted(events, key=lambda event: event.at_s)


def _deck(rng: random.Random, faults: tuple[Fault, ...]) -> Iterator[Fault]:
    while True:
        yield from rng.sample(faults, len(faults))
