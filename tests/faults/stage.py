"""A whole mesh of tiny engines that stands while one fault after another is tried on it, and is mended in between."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from faults.client import wait_until
from faults.matrix import Connector, Policy
from faults.node import Node, environment
from faults.wires import Wires
from pdmesh import embedded_valkey
from pdmesh.protocol.offers import OFFER_LEASE_S
from support import mesh

DEADLINE_S = 40.0
"""`request_timeout_s` of every mesh here."""
CHUNK_TOKENS = 64
PREFILL_ROWS = 2
POOL_BYTES = 4 << 20
# Two seconds for a prompt of the tests' length.
SLOW_BYTES_S = 300_000
VALKEY_BYTES = 64 << 20
# The lease, the beat of whoever renews it, and a busy machine.
LEASE_MARGIN_S = 4.0
MENDED_WITHIN_S = 60.0
# Below what the kernel gives to connections, so that a service finds its port free when it comes back.
FIRST_PORT, LAST_PORT = 20000, 32000
NUM_RANGES = 8
"""Of test processes beside each other."""
_given: deque[int] = deque(maxlen=200)
HELD = (
    "pdmesh_kv_blocks_used",
    "pdmesh_kv_blocks_quarantined",
    "pdmesh_offers_open",
    "pdmesh_offers_held",
    "pdmesh_transfers_reading",
    "pdmesh_kvcache_open_lookups",
    "pdmesh_kvcache_slots_pinned",
)
DEFECTS = (
    "pdmesh_unexpected_errors_total",
    "pdmesh_illegal_state_events_total",
    "pdmesh_core_undecodable_messages_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    policy: Policy
    connector: Connector
    model: Path
    wrong_model: Path
    """The same shapes, other weights."""
    folder: Path
    valkey_folder: Path
    """On a disk that can be filled, where there is one."""
    wires: Wires | None = None
    """Each engine at a station of its own, where there are some; proxies and tier at station 0."""


@dataclass(slots=True)
class Stage:
    """Made by `standing`."""

    settings: StageSettings
    proxies: list[Node] = field(default_factory=list)
    prefills: list[Node] = field(default_factory=list)
    decodes: list[Node] = field(default_factory=list)
    kvcache: Node = field(init=False)
    valkey: Node = field(init=False)
    stranger: Node = field(init=False)
    """A decode with other weights; started and listed only by the row that is about it."""
    _addresses: dict[str, str] = field(default_factory=dict)
    """gRPC addresses of the engines, by name."""
    valkey_url: str = ""
    _valkey_address: tuple[str, int] = ("", 0)

    @property
    def nodes(self) -> list[Node]:
        return [*self.proxies, *self.engines, self.kvcache, self.valkey]

    @property
    def engines(self) -> list[Node]:
        return [*self.prefills, *self.decodes]

    def build(self) -> None:
        """Choose every address, and start all."""
        count = 2 if self.settings.policy is Policy.ALTERNATIVE else 1
        self.valkey, self.valkey_url = self._valkey()
        kvcache_grpc = free_port()
        flags = ("--grpc-port", str(kvcache_grpc), "--valkey", self.valkey_url, "--arena-bytes", str(VALKEY_BYTES))
        self.kvcache = self._node("kvcache", "kvcache", *flags)
        tier = ("--kvcache", f"{self.kvcache.host}:{kvcache_grpc}")
        self.prefills = [self._engine("prefill", number, self.settings.model, *tier) for number in range(count)]
        self.decodes = [self._engine("decode", number, self.settings.model, *tier) for number in range(count)]
        self.stranger = self._engine("decode", count, self.settings.wrong_model, *tier, name="wrong-decode")
        self.announce()
        self.proxies = [self._proxy(number) for number in range(count)]
        # One after the other where one needs the other; the engines together.
        self.valkey.start()
        wait_until(lambda: _listens(self._valkey_address), MENDED_WITHIN_S, "Valkey")
        for node in (self.kvcache, *self.engines, *self.proxies):
            node.start()
        self.mend()

    def announce(self, *extra: Node) -> None:
        """List the engines, and `extra` decodes, for the proxies."""
        listed = {"prefill": self.prefills, "decode": [*self.decodes, *extra]}
        for role, nodes in listed.items():
            draft = self.settings.folder / f"{role}.new"
            draft.write_text("".join(f"{self._addresses[node.name]}\n" for node in nodes))
            draft.replace(self.settings.folder / role)

    def mend(self) -> None:
        """Start what has died, thaw what is frozen, and return when all of it serves."""
        if self.settings.wires is not None:
            self.settings.wires.clear()
        for node in self.nodes:
            node.thaw()
            if not node.is_alive:
                node.start()
        wait_until(lambda: _listens(self._valkey_address), MENDED_WITHIN_S, "Valkey")
        for node in self.nodes:
            node.wait_ready()
        self.announce()
        for proxy in self.proxies:
            wait_until(partial(self._is_whole, proxy), MENDED_WITHIN_S, f"{proxy.name} sees all engines")

    def held(self, nodes: list[Node]) -> dict[str, float]:
        """What is not zero of what must be zero at rest; a node that does not answer may hold anything."""
        held: dict[str, float] = {}
        for node in filter(serves_http, nodes):
            metrics = node.metrics()
            if not metrics:
                held[f"{node.name} does not answer"] = 1
            held |= {f"{node.name} {name}": metrics[name] for name in HELD if metrics.get(name)}
        return held

    def defects(self) -> str:
        """What broke by itself: counters of our own faults, over all nodes that answer, and nodes that nobody ended. Empty:
        nothing.
        """
        if dead := [node.name for node in self.nodes if node.has_died]:
            return f"nobody ended {', '.join(dead)}"
        counted = {
            f"{node.name} {name}": value
            for node in self.nodes
            if serves_http(node)
            for name, value in node.metrics().items()
            if name in DEFECTS and value
        }
        return f"defects were counted: {counted}" if counted else ""

    def wait_nothing_held(self, nodes: list[Node]) -> float:
        """Seconds until the nodes held nothing. Raises AssertionError, naming what is left, after one lease."""
        began_s = time.monotonic()
        deadline_s = began_s + OFFER_LEASE_S + LEASE_MARGIN_S
        while left := self.held(nodes):
            assert time.monotonic() < deadline_s, f"still held after a lease: {left}"
            time.sleep(0.2)
        return time.monotonic() - began_s

    def close(self) -> None:
        failures = []
        for node in [*self.nodes, self.stranger]:
            try:
                node.close()
            except AssertionError as exc:
                failures.append(str(exc))
        assert not failures, "\n".join(failures)

    # ---- how each service is started -------------------------------------------------------------

    def _engine(self, role: str, number: int, model: Path, *flags: str, name: str = "") -> Node:
        settings, grpc_port = self.settings, free_port()
        name = name or f"{role}-{number}"
        station = len(self._addresses) + 1
        host = self._host(station)
        self._addresses[name] = f"{host}:{grpc_port}"
        policy = "recompute" if settings.policy is Policy.ALTERNATIVE else "fail"
        # What a full disk does not take goes another way.
        connectors = {
            Connector.FILE: f"{Connector.FILE},{Connector.GRPC}",
            Connector.PUSH: Connector.NIXL,
        }.get(settings.connector, settings.connector)
        mode = ("--kv-transfer-mode", "push") if settings.connector is Connector.PUSH else ()
        own = ("--max-num-seqs", str(PREFILL_ROWS)) if role == "prefill" else ("--max-num-seqs", "8")
        return self._node(
            role, name, "--model", str(model), "--dtype", "float32", "--grpc-port", str(grpc_port), "--engine-id", name,
            "--connector", connectors, "--kv-load-failure-policy", policy, "--cpu-threads", "1",
            "--kv-cache-memory-bytes", str(POOL_BYTES), "--max-num-batched-tokens", str(CHUNK_TOKENS),
            "--kvcache-lookup-timeout-s", "2", "--logits-processors", "faults.pacer:Pacer", "--block-size", "32",
            *self._options(), *mode, *own, *flags, station=station,
        )  # fmt: skip

    def _options(self) -> tuple[str, ...]:
        """What makes a pull over gRPC long enough to be met in its midst, and offers files on the disk that may be full."""
        options: dict[str, dict[str, object]] = {}
        if self.settings.connector is Connector.GRPC and self.settings.wires is None:
            options[Connector.GRPC] = {"throttle_bytes_s": SLOW_BYTES_S}
        if self.settings.connector is Connector.FILE:
            offers = self.settings.valkey_folder / "offers"
            offers.mkdir(mode=0o700, exist_ok=True)
            options[Connector.FILE] = {"path": str(offers)}
        return ("--connector-options", json.dumps(options)) if options else ()

    def _proxy(self, number: int) -> Node:
        settings = self.settings
        retries = () if settings.policy is Policy.ALTERNATIVE else ("--max-retries", "0")
        return self._node(
            "proxy", f"proxy-{number}", "--model", str(settings.model), "--pd-min-prompt-tokens", "0",
            "--prefill", f"file:{settings.folder / 'prefill'}", "--decode", f"file:{settings.folder / 'decode'}",
            "--resolve-interval-s", "0.2", "--resolve-rest-interval-s", "0.5", "--request-timeout-s", str(DEADLINE_S),
            *retries,
        )  # fmt: skip

    def _node(self, kind: str, name: str, *flags: str, station: int = 0) -> Node:
        port, host, wires = free_port(), self._host(station), self.settings.wires
        flags = ("--host", host, "--port", str(port), "--drain-timeout-s", "20", *flags)
        inside = wires.command(station) if wires else ()
        # Else UCX would find that both ends are on one machine, and go around the wires.
        env = environment() | ({"UCX_TLS": "tcp", "UCX_NET_DEVICES": wires.device(station)} if wires else {})

        def spawn(prefix: tuple[str, ...]) -> mesh.Service:
            return mesh.start(kind, *flags, folder=self.settings.folder, env=env, prefix=(*inside, *prefix))

        return Node(name, spawn, host=host, port=port, station=station)

    def _host(self, station: int) -> str:
        return self.settings.wires.address(station) if self.settings.wires else "127.0.0.1"

    def _valkey(self) -> tuple[Node, str]:
        port = free_port()
        folder = self.settings.valkey_folder / "valkey"
        # What the meshes before it had written would fill a small disk.
        shutil.rmtree(folder, ignore_errors=True)
        command = embedded_valkey.prepare(folder, maxmemory_bytes=VALKEY_BYTES, port=port, persist=True)
        self._valkey_address = ("127.0.0.1", port)

        def spawn(prefix: tuple[str, ...]) -> subprocess.Popen[bytes]:
            with (self.settings.folder / "valkey.log").open("ab") as log:
                return subprocess.Popen([*prefix, *command.argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        return Node("valkey", spawn), command.url

    def _is_whole(self, proxy: Node) -> bool:
        metrics = proxy.metrics()
        return metrics.get("pdmesh_proxy_engines") == len(self.engines)


def serves_http(node: Node) -> bool:
    """Whether it is one of ours, and alive."""
    return bool(node.port) and node.is_alive


@contextmanager
def standing(settings: StageSettings) -> Iterator[Stage]:
    """A mesh whose services all serve."""
    stage = Stage(settings)
    try:
        stage.build()
        yield stage
    finally:
        stage.close()


def free_port() -> int:
    """A port nobody listens on now or was given here, outside of what the kernel and other test processes hand out."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % NUM_RANGES * (LAST_PORT - FIRST_PORT) // NUM_RANGES
    while True:
        # Not the module's own generator, which hypothesis sets back.
        port = first + random.SystemRandom().randrange((LAST_PORT - FIRST_PORT) // NUM_RANGES)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.append(port)
        return port


def _listens(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(address) == 0
