"""Start real pdmesh services as separate processes on free loopback ports, and take them down without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 90.0


@dataclass
class Service:
    """One running service process."""

    kind: str
    process: subprocess.Popen[bytes]
    log_path: Path
    api_key: str = ""
    host: str = "127.0.0.1"
    facts: dict[str, Any] = field(default_factory=dict)
    _notify: int = -1
    _pending: bytes = b""

    @property
    def http(self) -> str:
        return f"http://{self.host}:{self.facts['http_port']}"

    @property
    def grpc(self) -> str:
        return f"{self.host}:{self.facts['grpc_port']}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> Service:
        """Read the notify pipe until the service says it is ready; fail with its log when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.facts:
            readable, _, _ = select.select([self._notify], [], [], 0.2)
            data = os.read(self._notify, 65536) if readable else b""
            if (readable and not data) or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"{self.kind} did not start (exit {self.process.wait()}):\n{self.log[-4000:]}")
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message.get("ready"):
                    self.facts = message
        return self

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, wait, and SIGKILL when it overstays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.reap(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.reap(10)

    def reap(self, timeout_s: float = 10.0) -> int:
        """Wait for the process, whoever ended it, and let go of what it was watched by."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.kind} did not end in {timeout_s} s:\n{self.log[-3000:]}") from None
        if self._notify >= 0:
            os.close(self._notify)
            self._notify = -1
        return code

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, keyed by `name{label="value",…}`."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        answer = httpx.get(f"{self.http}/metrics", headers=headers, timeout=10)
        assert answer.status_code == 200, answer.text
        text = answer.text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def metric(self, name: str) -> float:
        """The sum over all label sets of one sample name."""
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == name)


def start(
    kind: str, *flags: str, folder: Path, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
) -> Service:
    """Start `python -m pdmesh_<kind>`; returns at once, `wait_ready` waits. `prefix`: a command that executes it."""
    read_end, write_end = os.pipe()
    number = sum(1 for _ in folder.glob(f"{kind}-*.log"))
    log_path = folder / f"{kind}-{number}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", f"pdmesh_{kind}", "--notify-fd", str(write_end), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
            env=os.environ | {"PDMESH_SECRET": "a-secret-for-the-tests"} | (env or {}),
        )
    os.close(write_end)
    api_key = flags[flags.index("--api-key") + 1] if "--api-key" in flags else ""
    host = flags[flags.index("--host") + 1] if "--host" in flags else "127.0.0.1"
    return Service(kind=kind, process=process, log_path=log_path, api_key=api_key, host=host, _notify=read_end)


class Mesh:
    """kvcache (optional), prefill and decode engines, and a proxy that finds them through endpoint files."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.model = model
        self.prefill: list[Service] = []
        self.decode: list[Service] = []
        self.kvcache: Service | None = None
        self.proxy: Service | None = None
        for role in ("prefill", "decode"):
            (folder / role).write_text("")

    @property
    def url(self) -> str:
        assert self.proxy is not None
        return self.proxy.http

    @property
    def services(self) -> list[Service]:
        single = [service for service in (self.proxy, self.kvcache) if service is not None]
        return [*single, *self.prefill, *self.decode]

    def start_kvcache(self, *flags: str) -> Service:
        self.kvcache = start("kvcache", "--port", "0", "--grpc-port", "0", *flags, folder=self.folder).wait_ready()
        return self.kvcache

    def start_engine(self, role: str, *flags: str, wait: bool = True) -> Service:
        """Add an engine; it is announced to the proxy by `announce`."""
        common = [
            "--model",
            self.model,
            "--port",
            "0",
            "--grpc-port",
            "0",
            "--cpu-threads",
            "1",
            "--drain-timeout-s",
            "10",
        ]
        if self.kvcache is not None:
            common += ["--kvcache", self.kvcache.grpc]
        if "--kv-cache-memory-bytes" not in flags:
            common += ["--kv-cache-memory-bytes", str(512 << 20)]
        service = start(role, *common, *flags, folder=self.folder)
        getattr(self, role).append(service)
        return service.wait_ready() if wait else service

    def announce(self) -> None:
        """Write the endpoint files from the engines that run now."""
        for role in ("prefill", "decode"):
            lines = "".join(f"{engine.grpc}\n" for engine in getattr(self, role) if engine.facts)
            draft = self.folder / f"{role}.new"
            draft.write_text(lines)
            draft.replace(self.folder / role)

    def start_proxy(self, *flags: str) -> Service:
        targets = ["--prefill", f"file:{self.folder / 'prefill'}", "--decode", f"file:{self.folder / 'decode'}"]
        self.proxy = start(
            "proxy", "--model", self.model, "--port", "0",
            "--resolve-interval-s", "0.2", "--resolve-rest-interval-s", "0.2", *targets, *flags, folder=self.folder,
        ).wait_ready()  # fmt: skip
        self.wait_healthy()
        return self.proxy

    def wait_healthy(self, timeout_s: float = 20.0) -> None:
        """Wait until the proxy sees every announced engine."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200 and self.engines_seen() >= len(
                    self.prefill
                ) + len(self.decode):
                    return
            time.sleep(0.1)
        raise AssertionError(f"the proxy is not healthy:\n{self.proxy.log[-3000:] if self.proxy else ''}")

    def engines_seen(self) -> int:
        assert self.proxy is not None
        return int(self.proxy.metric("pdmesh_proxy_engines"))

    def blocks_used(self) -> int:
        """Referenced KV blocks over all engines."""
        return int(sum(e.metric("pdmesh_kv_blocks_used") for e in [*self.prefill, *self.decode]))

    def offers_open(self) -> int:
        return int(sum(e.metric("pdmesh_offers_open") for e in [*self.prefill, *self.decode]))

    def wait_nothing_held(self, timeout_s: float = 12.0) -> None:
        """Fail unless blocks and offers go to zero within one lease."""
        deadline = time.monotonic() + timeout_s
        while (held := (self.blocks_used(), self.offers_open())) != (0, 0):
            assert time.monotonic() < deadline, f"blocks used, offers open: {held}"
            time.sleep(0.2)

    def complete(self, prompt: str | list[int], url: str | None = None, **body: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy unless said otherwise, with token ids in the answer."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True} | body
        answer = httpx.post(f"{url or self.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return {"headers": dict(answer.headers)} | answer.json()

    def close(self) -> None:
        failures = []
        for service in self.services:
            try:
                service.stop()
            except AssertionError as exc:
                failures.append(str(exc))
        assert not failures, "\n".join(failures)


@contextlib.contextmanager
def mesh(
    model: str,
    *,
    prefill: int = 1,
    decode: int = 1,
    connector: str = "shm",
    engine_flags: tuple[str, ...] = (),
    prefill_flags: tuple[str, ...] = (),
    decode_flags: tuple[str, ...] = (),
    proxy_flags: tuple[str, ...] = ("--pd-min-prompt-tokens", "0"),
    kvcache_flags: tuple[str, ...] | None = None,
) -> Iterator[Mesh]:
    """A running mesh; engines start at the same time. `prefill=0` is the aggregated one."""
    with tempfile.TemporaryDirectory(prefix="pdmesh-test-") as name:
        running = Mesh(Path(name), model)
        try:
            if kvcache_flags is not None:
                running.start_kvcache(*kvcache_flags)
            flags = ("--connector", connector, "--kv-load-failure-policy", "recompute", *engine_flags)
            for role, count, own in (("prefill", prefill, prefill_flags), ("decode", decode, decode_flags)):
                for _ in range(count):
                    running.start_engine(role, *flags, *own, wait=False)
            for engine in [*running.prefill, *running.decode]:
                engine.wait_ready()
            running.announce()
            running.start_proxy(*proxy_flags)
            yield running
        finally:
            running.close()
