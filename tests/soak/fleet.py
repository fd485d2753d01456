"""The mesh of the soak: 2 prefill, 2 decode, kvcache with Valkey, a proxy; what ends is started again, as a supervisor would."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from pdmesh import embedded_valkey
from pdmesh.embedded_valkey import EmbeddedValkey
from pdmesh.errors import ConfigError
from soak.links import Links
from soak.load import REQUEST_TIMEOUT_S
from soak.schedule import CONNECTORS, PUSHING, Part
from support.mesh import Service, start
from support.offline import SETTINGS
from support.processes import command_of, runs

KV_BYTES = 4 << 20
"""Some 250 blocks: room for a handful of the longest prompts, so that blocks are given away and preempted all the time."""
DISK_BYTES = 256 << 20
"""Valkey's log of changes is written anew from 64 MiB on."""
FAMILY_GONE_S = 10.0
STOP_S = 25.0
"""Beyond the drain timeout of 10 s."""
PROGRAMS = {Part.CORE: "pdmesh.engine.core_process", Part.HELPER: "pdmesh.connector.nixl_helper"}


@dataclass(slots=True)
class Member:
    """One service, over all its starts."""

    name: str
    kind: str
    flags: tuple[str, ...]
    prefix: tuple[str, ...] = ()
    """A command that executes the next start, and only that."""
    service: Service | None = None
    num_starts: int = 0
    expected_end: bool = False
    """A fault, or this program, ends the present start."""
    told_to_stop: bool = False
    """By SIGTERM, which ends with code 0."""
    passing: bool = False
    """Not part of the mesh: when it ends, it is not started again."""
    starting: Future[Service] | None = None
    strange_ends: list[str] = field(default_factory=list)
    """Ends that nobody caused, and ends with a wrong code."""
    ready_at_s: float = 0.0

    @property
    def ready(self) -> bool:
        return self.service is not None and bool(self.service.facts) and self.service.process.poll() is None


class Fleet:
    """All services. `tick` starts again what has ended and announces engines; call it often, from one thread."""

    def __init__(self, folder: Path, model: str, *, seed: int) -> None:
        self.folder, self.model, self.seed = folder, model, seed
        self.disk = _small_disk(folder / "disk")
        self._filler = self.disk / "filler"
        self.valkey = self._start_valkey()
        self.num_valkey_starts = 1
        self.links = Links(tuple(CONNECTORS))
        self._proxy_gone_s = 0.0
        self.leaked: list[str] = []
        """Processes that outlived the service that started them."""
        self.log: Callable[[str], None] = lambda line: None
        self._pool = ThreadPoolExecutor(8)
        self._stopping = False
        self._dying: list[tuple[float, str, list[psutil.Process]]] = []
        kvcache_port, proxy_port = _free_port(), _free_port()
        common = ("--model", model, "--cpu-threads", "1", "--drain-timeout-s", "10", "--dtype", "float32")
        common += ("--block-size", str(SETTINGS["block_size"]), "--kv-cache-memory-bytes", str(KV_BYTES))
        common += ("--max-num-seqs", "32", "--kvcache", f"127.0.0.1:{kvcache_port}")
        common += ("--kv-load-failure-policy", "recompute", "--kvcache-lookup-timeout-s", "1")
        self.members = {
            "kvcache": self._member("kvcache", "kvcache", kvcache_port, "--arena-bytes", str(4 << 20)),
            **{name: self._engine(name, connector, common) for name, connector in CONNECTORS.items()},
        }
        files = [f"file:{folder / role}" for role in ("prefill", "decode")]
        self.members["proxy"] = Member(
            name="proxy",
            kind="proxy",
            flags=(
                *("--model", model, "--port", str(proxy_port), "--prefill", files[0], "--decode", files[1]),
                *("--resolve-interval-s", "0.2", "--resolve-rest-interval-s", "0.2", "--pd-min-prompt-tokens", "16"),
                *("--request-timeout-s", str(REQUEST_TIMEOUT_S), "--drain-timeout-s", "10"),
            ),
        )
        self.num_members = len(self.members)
        self.url = f"http://127.0.0.1:{proxy_port}"

    @property
    def engines(self) -> list[Member]:
        return [self.members[name] for name in CONNECTORS]

    @property
    def all_ready(self) -> bool:
        return all(member.ready and member.starting is None for member in self.members.values())

    def start(self) -> None:
        """Start all and wait until the proxy sees every engine."""
        self.announce()
        for member in self.members.values():
            self.launch(member)
            if member.kind in ("kvcache", "proxy"):
                assert member.starting is not None
                member.starting.result()
        self.wait_ready()

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until all services run and the proxy sees every engine."""
        until = time.monotonic() + timeout_s
        while not (self.all_ready and self._engines_seen() == len(CONNECTORS)):
            if time.monotonic() > until:
                waiting = [member.name for member in self.members.values() if not member.ready]
                raise AssertionError(
                    f"not ready after {timeout_s:g} s: {waiting or 'the proxy does not see all engines'}"
                )
            self.tick()
            time.sleep(0.1)

    def tick(self) -> None:
        """See who has become ready or has ended, and do what that asks for."""
        for member in list(self.members.values()):
            if member.starting is not None and member.starting.done():
                self._started(member)
            elif member.service is not None and member.starting is None and member.service.process.poll() is not None:
                self._ended(member)
        self._check_dying()
        # It cannot begin on a full disk.
        if self.valkey.process.poll() is not None and not self._stopping and not self._filler.exists():
            self.valkey = self._start_valkey()
            self.num_valkey_starts += 1

    def launch(self, member: Member) -> None:
        """Start a service; `tick` notices when it is ready."""
        member.num_starts += 1
        member.expected_end = member.told_to_stop = False
        folder = self.folder / member.name
        folder.mkdir(exist_ok=True)
        prefix, member.prefix = member.prefix, ()
        member.service = start(member.kind, *member.flags, folder=folder, prefix=prefix)
        member.starting = self._pool.submit(member.service.wait_ready)

    def dismiss(self, member: Member) -> None:
        """Send away one that was only passing."""
        member.passing = True
        if member.service is not None and member.service.process.poll() is None:
            self.end(member, signal.SIGTERM)

    def fill_disk(self) -> None:
        """Leave no byte where Valkey writes, and connector file."""
        for size in (1 << 20, 512):
            with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))

    def empty_disk(self) -> None:
        self._filler.unlink(missing_ok=True)

    def announce(self) -> None:
        """Write the endpoint files from the engines that run now."""
        for role in ("prefill", "decode"):
            ready = [member for member in self.members.values() if member.kind == role and member.ready]
            draft = self.folder / f"{role}.new"
            draft.write_text("".join(f"{self._address(member)}\n" for member in ready))
            draft.replace(self.folder / role)

    def _address(self, member: Member) -> str:
        """Where the proxy reaches an engine: over its link; engines reach each other directly."""
        assert member.service is not None
        if member.name not in CONNECTORS:
            return member.service.grpc
        self.links[member.name].target = member.service.facts["grpc_port"]
        return f"127.0.0.1:{self.links[member.name].port}"

    def parts(self, member: Member, part: Part) -> list[psutil.Process]:
        """The running processes of a service."""
        assert member.service is not None
        family = _family(member.service.process.pid)
        if part is Part.ALL:
            return family
        if part is Part.SERVER:
            return family[:1]
        return [process for process in family if PROGRAMS[part] in command_of(process)]

    def end(self, member: Member, number: signal.Signals) -> None:
        """Send the service's first process a signal that ends it, and watch that nothing of it stays."""
        assert member.service is not None
        member.expected_end = True
        member.told_to_stop = number == signal.SIGTERM
        self.watch_death(member)
        # One that is told to end loses nobody.
        kills_proxy = member.kind == "proxy" and number == signal.SIGKILL
        if kills_proxy:
            # Until it is known to be gone: whoever comes in between is lost with it, too.
            self._proxy_gone_s = math.inf
        member.service.process.send_signal(number)
        if kills_proxy:
            member.service.process.wait(STOP_S)
            self._proxy_gone_s = time.monotonic()

    def proxy_killed_since(self, began_s: float) -> bool:
        """Whether a proxy was killed after `began_s`: nobody was left to tell its clients."""
        return self._proxy_gone_s >= began_s

    def watch_death(self, member: Member) -> None:
        """Note all processes of a service that is about to end: none may be there some seconds after it."""
        assert member.service is not None
        self._dying.append((0.0, member.name, _family(member.service.process.pid)))

    def stop(self) -> None:
        """End all, in the order in which they need each other."""
        self._stopping = True
        for member in reversed(self.members.values()):
            if member.service is not None and member.service.process.poll() is None:
                self.end(member, signal.SIGTERM)
        for member in self.members.values():
            if member.service is not None:
                self._reap(member)
        self.valkey.stop()
        if self.disk.is_mount():
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)
        self.links.close()
        until = time.monotonic() + FAMILY_GONE_S
        while self._dying and time.monotonic() < until + 1:
            self._check_dying()
            time.sleep(0.1)
        self._pool.shutdown()

    # ---- parts ---------------------------------------------------------------------------------

    def _member(self, name: str, kind: str, grpc_port: int, *flags: str) -> Member:
        given = ("--engine-id", name, "--port", "0", "--grpc-port", str(grpc_port))
        if kind == "kvcache":
            given += ("--valkey", self.valkey.url, "--no-valkey-required", "--connector", "shm,grpc")
        return Member(name=name, kind=kind, flags=(*given, *flags))

    def _engine(self, name: str, connector: str, common: tuple[str, ...]) -> Member:
        role = name.partition("-")[0]
        # One of each role comes back under its old name and port, the other as a stranger, as a new pod would. Connector file
        # finds by the name what an earlier start has left.
        is_same = "file" in connector
        port = ("--engine-id", name, "--grpc-port", str(_free_port())) if is_same else ("--grpc-port", "0")
        # What is computed in one step is pulled: where pushes are wanted, steps are small.
        more: tuple[str, ...] = ("--max-num-batched-tokens", "64" if name in PUSHING else "256")
        if is_same:
            offers = self.disk / "offers"
            offers.mkdir(mode=0o700, exist_ok=True)
            more += ("--connector-options", json.dumps({"file": {"path": str(offers)}}))
        if name in PUSHING:
            more += ("--kv-transfer-mode", "push")
        return Member(name=name, kind=role, flags=(*common, "--port", "0", *port, "--connector", connector, *more))

    def _started(self, member: Member) -> None:
        assert member.starting is not None
        starting, member.starting = member.starting, None
        member.ready_at_s = time.monotonic()
        if error := starting.exception():
            if not member.expected_end:
                member.strange_ends.append(f"did not start: {str(error)[-1500:]}")
            self._ended(member)
            return
        self.log(f"{member.name} is ready (start {member.num_starts})")
        self.announce()

    def _ended(self, member: Member) -> None:
        assert member.service is not None
        code = member.service.process.returncode
        if not member.expected_end:
            member.strange_ends.append(f"ended with {code}: {member.service.log[-1500:]}")
        self.log(f"{member.name} ended with {code}")
        self._reap(member)
        if member.passing:
            del self.members[member.name]
        self.announce()
        if not member.passing:
            self.launch(member)

    def _reap(self, member: Member) -> None:
        """Wait for a service that has ended or was told to."""
        assert member.service is not None
        process = member.service.process
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            member.strange_ends.append(f"did not end within {STOP_S:g} s: {member.service.log[-1500:]}")
            process.kill()
            return
        finally:
            # Closes what the start has opened here.
            member.service.kill()
        if code and member.told_to_stop:
            member.strange_ends.append(f"told to stop, it ended with {code}: {member.service.log[-1500:]}")

    def _check_dying(self) -> None:
        """A family's clock runs from its first process's end."""
        left: list[tuple[float, str, list[psutil.Process]]] = []
        for gone_at_s, name, family in self._dying:
            alive = [process for process in family if runs(process)]
            began_s = gone_at_s or (0.0 if family[0] in alive else time.monotonic())
            if not alive:
                continue
            if began_s and time.monotonic() > began_s + FAMILY_GONE_S:
                self.leaked += [f"{name}: {process.pid} {command_of(process)[-200:]}" for process in alive]
                for process in alive:
                    process.kill()
                continue
            left.append((began_s, name, family))
        self._dying = left

    def _start_valkey(self) -> EmbeddedValkey:
        folder = self.disk / "valkey"
        try:
            return embedded_valkey.start(folder, maxmemory_bytes=8 << 20, persist=True)
        except ConfigError:
            # A disk that was full as it wrote may leave a log that it does not read: an operator begins with an empty one.
            shutil.rmtree(folder)
            folder.mkdir()
            return embedded_valkey.start(folder, maxmemory_bytes=8 << 20, persist=True)

    def _engines_seen(self) -> int:
        proxy = self.members["proxy"].service
        with contextlib.suppress(httpx.HTTPError):
            return int(proxy.metric("pdmesh_proxy_engines")) if proxy is not None else 0
        return 0


def _small_disk(folder: Path) -> Path:
    """A folder on a file system of its own that may be filled; an ordinary one where this process may mount none."""
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
        subprocess.run(command, capture_output=True, check=False)
    return folder


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
