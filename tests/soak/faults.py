"""Does to the fleet what the schedule says, and undoes what is to be undone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
import redis

from faults import clocks
from soak.fleet import Fleet, Member
from soak.links import Link
from soak.load import Load
from soak.schedule import Deed, Event, Fault, Part
from support.tiny_models import make_tiny

WAIT_READY_S = 60.0
"""Longest time that a fault waits for its target to be there again."""
FLIPPED_BITS = 200
BURST = 24
BURSTS = {"kill proxy": 8}
"""It is the only one: what it has is lost when it is killed."""
AHEAD = ("unshare", "--time", "--monotonic", str(clocks.SKEW_S), "--boottime", str(clocks.SKEW_S))
"""Executes a service whose clocks are ahead. Its wall clock is true: what skews that makes sleeps fail now and then."""
BURST_LEAD_S = (0.02, 0.4)
"""From the beginning of a burst of requests to the fault that meets it: they take about as long."""


class Faults:
    """Carries out events as they fall due. `tick` it often; one that waits for its target holds up those behind it."""

    def __init__(self, fleet: Fleet, load: Load, events: list[Event], *, seed: int, log: Callable[[str], None]) -> None:
        self.done: Counter[str] = Counter()
        self._fleet, self._load, self._log = fleet, load, log
        self._events = list(events)
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._clients: list[Future[None]] = []
        self._rng = random.Random(seed)
        self._num_strangers = 0

    @property
    def quiet(self) -> bool:
        """Whether nothing is left to be undone."""
        for each in [each for each in self._clients if each.done()]:
            self._clients.remove(each)
            # Raises what failed in it.
            each.result()
        return not self._undo and not self._clients

    def undo_due(self) -> None:
        """Undo what has lasted long enough."""
        now = time.monotonic()
        for due in [due for due in self._undo if due[0] <= now]:
            self._undo.remove(due)
            due[1]()

    def tick(self, at_s: float) -> None:
        """Undo and do what is due `at_s` seconds into the run."""
        self.undo_due()
        while self._events and self._events[0].at_s <= at_s:
            event = self._events[0]
            late = at_s - event.at_s > WAIT_READY_S
            if not late and not self._can(event.fault):
                return
            self._events.pop(0)
            if why := "its target was not there" if late else self._obstacle(event.fault):
                self._log(f"left out, {why}: {event.fault}")
                self.done["left out"] += 1
                continue
            self._log(f"fault: {event.fault}")
            self.done[str(event.fault)] += 1
            if event.fault.target != "clients":
                self._clients.append(self._load.beside(self._load.burst(BURSTS.get(str(event.fault), BURST))))
                time.sleep(self._rng.uniform(*BURST_LEAD_S))
            self._do(event.fault)

    def owes(self, until_s: float) -> bool:
        """Whether something that was due by then, seconds into the run, still waits for its target."""
        return bool(self._events) and self._events[0].at_s <= until_s

    def finish(self) -> None:
        """Undo everything, and wait for clients that misbehave. Raises what failed in them."""
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        for each in self._clients:
            each.result(120)

    def _can(self, fault: Fault) -> bool:
        member = self._fleet.members.get(fault.target)
        return member is None or (member.ready and not member.expected_end and not self._is_frozen(member))

    def _obstacle(self, fault: Fault) -> str:
        """Why a fault cannot be done on this machine; empty when it can."""
        if fault.deed is Deed.SKEW and os.geteuid():
            return "a time namespace cannot be made here (needs root)"
        if fault.target == "disk" and not self._fleet.disk.is_mount():
            return "a disk to be filled cannot be mounted here (needs root)"
        return ""

    def _is_frozen(self, member: Member) -> bool:
        return any(_status(process) == psutil.STATUS_STOPPED for process in self._fleet.parts(member, Part.ALL))

    def _do(self, fault: Fault) -> None:
        match fault.deed:
            case Deed.DISCONNECTS:
                self._clients.append(self._load.beside(self._load.disconnect_some()))
            case Deed.SLOW_CLIENTS:
                self._clients.append(self._load.beside(self._load.read_slowly()))
            case Deed.BAD_REQUESTS:
                self._clients.append(self._load.beside(self._load.ask_badly()))
            case Deed.CUT:
                self._fleet.links.cut(fault.target)
            case Deed.DELAY:
                self._slow_down(self._fleet.links[fault.target], fault.duration_s)
            case Deed.LOSS:
                self._lose(self._fleet.links[fault.target], fault.duration_s)
            case Deed.STRANGER:
                self._join_stranger(fault.duration_s)
            case Deed.FILL if fault.target == "disk":
                self._fleet.fill_disk()
                self._later(fault.duration_s, self._fleet.empty_disk)
            case _ if fault.target == "valkey":
                self._do_to_valkey(fault)
            case _:
                self._do_to_member(fault, self._fleet.members[fault.target])

    def _do_to_member(self, fault: Fault, member: Member) -> None:
        if fault.deed is Deed.CORRUPT:
            self._corrupt_arena(member)
        elif fault.deed is Deed.SKEW:
            member.prefix = AHEAD
            self._fleet.end(member, signal.SIGTERM)
        elif fault.deed is Deed.RESTART:
            self._fleet.end(member, signal.SIGTERM)
        elif fault.deed is Deed.KILL and fault.part in (Part.ALL, Part.SERVER):
            self._fleet.end(member, signal.SIGKILL)
        elif fault.deed is Deed.KILL:
            if fault.part is Part.CORE:
                # The server ends with its core.
                member.expected_end = True
                self._fleet.watch_death(member)
            self._signal(self._fleet.parts(member, fault.part), signal.SIGKILL)
        else:
            self._freeze(self._fleet.parts(member, fault.part), fault.duration_s)

    def _do_to_valkey(self, fault: Fault) -> None:
        valkey = self._fleet.valkey
        match fault.deed:
            case Deed.KILL:
                valkey.process.kill()
            case Deed.RESTART:
                valkey.process.terminate()
            case Deed.FREEZE:
                self._freeze([psutil.Process(valkey.process.pid)], fault.duration_s)
            case Deed.FILL:
                self._set_memory("1", "noeviction")
                self._later(fault.duration_s, lambda: self._set_memory(str(8 << 20), "allkeys-lru"))
            case Deed.CORRUPT:
                self._corrupt_values()

    def _slow_down(self, link: Link, duration_s: float) -> None:
        def undo() -> None:
            link.slow = False

        link.slow = True
        self._later(duration_s, undo)

    def _lose(self, link: Link, duration_s: float) -> None:
        def undo() -> None:
            link.lossy = False

        link.lossy = True
        self._later(duration_s, undo)

    def _freeze(self, processes: list[psutil.Process], duration_s: float) -> None:
        self._signal(processes, signal.SIGSTOP)
        self._later(duration_s, lambda: self._signal(processes, signal.SIGCONT))

    def _signal(self, processes: list[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _later(self, after_s: float, undo: Callable[[], None]) -> None:
        self._undo.append((time.monotonic() + after_s, undo))

    def _set_memory(self, num_bytes: str, policy: str) -> None:
        # It may be gone by now; one that starts anew has its own settings.
        with contextlib.suppress(redis.RedisError), self._valkey() as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", num_bytes)

    def _corrupt_values(self) -> None:
        """Flip one bit in each of some values."""
        with contextlib.suppress(redis.RedisError), self._valkey() as client:
            keys = [client.randomkey() for _ in range(50)]
            for key in {key for key in keys if key is not None and client.type(key) == b"string"}:
                value = bytearray(client.get(key) or b"")
                if value:
                    value[self._rng.randrange(len(value))] ^= 1 << self._rng.randrange(8)
                    client.set(key, bytes(value), keepttl=True)

    def _corrupt_arena(self, member: Member) -> None:
        """Flip a bit in some of the memory that the tier keeps blocks in, behind its back."""
        (process,) = self._fleet.parts(member, Part.SERVER)
        arenas = []
        with os.scandir(f"/proc/{process.pid}/fd") as links:
            for link in links:
                # It may be closed by now.
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(link.path).startswith("/memfd:pdmesh-kvcache"):
                        arenas.append(link.path)
        for path in arenas[:1]:
            with open(path, "r+b", buffering=0) as memory:
                size = memory.seek(0, os.SEEK_END)
                for _ in range(FLIPPED_BITS):
                    # The generation words are at its beginning.
                    at = self._rng.randrange(min(1 << 16, size // 2), size)
                    memory.seek(at)
                    (byte,) = memory.read(1)
                    memory.seek(at)
                    memory.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    @contextlib.contextmanager
    def _valkey(self):  # type: ignore[no-untyped-def]
        client = redis.Redis.from_url(self._fleet.valkey.url, socket_timeout=5)
        try:
            yield client
        finally:
            client.close()

    def _join_stranger(self, duration_s: float) -> None:
        """Announce a decode engine that has another model, until it has been seen for a while."""
        self._num_strangers += 1
        model = make_tiny("llama", self._fleet.folder / "stranger", seed=9)
        folder: Path = self._fleet.folder / f"stranger-{self._num_strangers}"
        folder.mkdir()
        flags = ("--cpu-threads", "1", "--dtype", "float32", "--kv-cache-memory-bytes", str(4 << 20))
        ports = ("--port", "0", "--grpc-port", "0")
        name = f"stranger-{self._num_strangers}"
        member = Member(name=name, kind="decode", flags=("--model", str(model), *ports, *flags))
        self._fleet.members[name] = member
        self._fleet.launch(member)
        self._later(duration_s + 15.0, lambda: self._fleet.dismiss(member))


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
