"""Looks at what the fleet holds while nothing runs: blocks, offers, memory, descriptors, memfds; and tells what does not go."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from soak.fleet import Fleet, Member
from soak.schedule import Part

ROOT = Path(__file__).parents[2]
LEASE_S = 10.0
MARGIN_S = 4.0
"""The beat of whoever renews a lease, and a busy machine; the fault matrix's too."""
OWN = ("/memfd:pdmesh-kv-staging", "/memfd:pdmesh-grave")
"""What a core lends to nobody."""
HELD_BY_ENGINE = (
    *("pdmesh_kv_blocks_used", "pdmesh_kv_blocks_quarantined"),
    *("pdmesh_offers_open", "pdmesh_offers_held", "pdmesh_transfers_reading"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason"),
)
HELD = {
    "prefill": HELD_BY_ENGINE,
    "decode": HELD_BY_ENGINE,
    "kvcache": ("pdmesh_kvcache_open_lookups", "pdmesh_kvcache_slots_pinned", "pdmesh_kvcache_queued_stores"),
    "proxy": ("pdmesh_proxy_requests_in_flight",),
}
NEVER = (
    "pdmesh_unexpected_errors_total",
    "pdmesh_illegal_state_events_total",
    "pdmesh_core_undecodable_messages_total",
    "vllm:corrupted_requests_total",
)
"""Counters that tell of defects of our own."""
MAX_GROWN_BYTES = 24 << 20
"""An allocator's scratch comes and goes by less; the first window of a start is not counted."""
MAX_GROWN_FDS = 8
WINDOWS_TO_JUDGE = 3


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One start of one service in a quiet window."""

    member: str
    start: int
    at_s: float
    private_bytes: int
    num_fds: int


class Watch:
    """Everything that was found wrong gathers in `problems`."""

    def __init__(self, fleet: Fleet) -> None:
        self.problems: list[str] = []
        self.readings: list[Reading] = []
        self.slowest_s = 0.0
        """Longest time until nothing was held."""
        self._fleet = fleet

    def nothing_held(self) -> None:
        """Wait, a lease long, until no service holds anything for a request."""
        began_s = looked_s = time.monotonic()
        while held := self._held():
            # Of a look that took long, all that counts is when it began.
            if looked_s > began_s + LEASE_S + MARGIN_S:
                self.problems.append(f"still held after a lease: {held}")
                return
            time.sleep(0.1)
            looked_s = time.monotonic()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    def read(self, at_s: float) -> None:
        """Note memory and descriptors of all services."""
        for member in self._fleet.members.values():
            if not member.ready:
                continue
            family = self._fleet.parts(member, Part.ALL)
            infos = [process.memory_info() for process in family]
            reading = Reading(
                member=member.name,
                start=member.num_starts,
                at_s=at_s,
                private_bytes=sum(info.rss - info.shared for info in infos),
                num_fds=sum(process.num_fds() for process in family),
            )
            self.readings.append(reading)
            self._check_counters(member)

    def judge(self) -> None:
        """Find starts whose memory or descriptors grow, and memfds without an owner."""
        starts: dict[tuple[str, int], list[Reading]] = defaultdict(list)
        for reading in self.readings:
            starts[reading.member, reading.start].append(reading)
        for (name, number), readings in starts.items():
            settled = readings[1:]
            if len(settled) < WINDOWS_TO_JUDGE:
                continue
            grown = settled[-1].private_bytes - settled[0].private_bytes
            if grown > MAX_GROWN_BYTES:
                sizes = [reading.private_bytes >> 20 for reading in readings]
                self.problems.append(f"{name} (start {number}) grows: {sizes} MiB")
            # They come with the peers that are met, and then no more.
            if settled[-1].num_fds - settled[len(settled) // 2].num_fds > MAX_GROWN_FDS:
                counts = [reading.num_fds for reading in readings]
                self.problems.append(f"{name} (start {number}) keeps descriptors: {counts}")
        self._await_no_dead_pools()

    def judge_ends(self) -> None:
        """When all services are down: how each start ended, what it left running, and what it logged as its own failure."""
        self.problems += [f"left running: {line}" for line in self._fleet.leaked]
        self.problems += [f"{m.name}: {line}" for m in self._fleet.members.values() for line in m.strange_ends]
        for path in sorted(self._fleet.folder.glob("*/*.log")):
            text = path.read_text(errors="replace").replace(f"{ROOT}/", "")
            if (at := text.find("Traceback (most recent call last)")) >= 0:
                self.problems.append(f"{path.parent.name}/{path.name}: {text[max(0, at - 300) : at + 1500]}")

    def _held(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for member in self._fleet.members.values():
            if member.ready and member.service is not None:
                samples = member.service.metrics()
                for name in HELD[member.kind]:
                    value = sum(value for key, value in samples.items() if key.split("{")[0] == name)
                    if value:
                        found[f"{member.name} {name}"] = value
        return found

    def _check_counters(self, member: Member) -> None:
        assert member.service is not None
        samples = member.service.metrics()
        for key, value in samples.items():
            if key.split("{")[0] in NEVER and value:
                problem = f"{member.name} (start {member.num_starts}): {key} is {value:g}"
                if problem not in self.problems:
                    self.problems.append(problem)

    def _await_no_dead_pools(self) -> None:
        """A pool that no living service owns is a dead one's, and whoever still maps it lets it go within a lease."""
        until = time.monotonic() + LEASE_S + MARGIN_S
        while dead := self._dead_pools():
            if time.monotonic() > until:
                self.problems += dead
                return
            time.sleep(0.2)

    def _dead_pools(self) -> list[str]:
        owned: set[int] = set()
        held: dict[int, tuple[str, set[str]]] = {}
        for member in self._fleet.members.values():
            if not member.ready:
                continue
            for process in self._fleet.parts(member, Part.ALL):
                for inode, name in _memfds(process):
                    if name.startswith(OWN):
                        owned.add(inode)
                    held.setdefault(inode, (name, set()))[1].add(member.name)
            # An engine's server maps no pool but its core's.
            for inode, name in _memfds(self._fleet.parts(member, Part.SERVER)[0]):
                if member.kind != "kvcache" or "kvcache" in name:
                    owned.add(inode)
        return [f"{sorted(by)} still map {name}" for inode, (name, by) in sorted(held.items()) if inode not in owned]


def _memfds(process: psutil.Process) -> list[tuple[int, str]]:
    found = []
    with contextlib.suppress(OSError):
        for link in os.scandir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(link.path)
                if target.startswith("/memfd:pdmesh-"):
                    found.append((os.stat(link.path).st_ino, target))
    return found


def summary(watch: Watch) -> dict[str, Any]:
    """First settled and last private memory of each start that was seen twice, MiB."""
    starts: dict[str, list[int]] = defaultdict(list)
    for reading in watch.readings:
        starts[f"{reading.member}#{reading.start}"].append(round(reading.private_bytes / (1 << 20)))
    return dict(starts)
