"""One service of a mesh under test, which can be killed, frozen and started again at the same address."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from faults.client import wait_until
from support import mesh
from support.processes import command_of, runs

ENDS_WITHIN_S = 30.0
METRICS_TIMEOUT_S = 10.0
# A process that is to be stopped must get a CPU first.
STOPPED_WITHIN_S = 10.0
DEAD_WITHIN_S = 10.0
CORE = "pdmesh.engine.core_process"
HELPERS = "pdmesh.connector."
"""In the command of a process in which a native transport runs."""
# A thread that waits for a CPU adds to what is looked at as one that runs does: what is busy is not overlooked on a busy machine.
REST_LOOK_S = 0.2
REST_SHARE = 0.05
POOL_LINK = "/memfd:pdmesh-"
FOLDER_OF_TESTS = Path(__file__).resolve().parents[1]


Spawn = Callable[[tuple[str, ...]], "mesh.Service | subprocess.Popen[bytes]"]
"""Starts a service, executed by a command."""


class Node:
    """A service as a set of processes. `spawn` starts it anew at the address it always has."""

    def __init__(self, name: str, spawn: Spawn, *, host: str = "127.0.0.1", port: int = 0, station: int = 0) -> None:
        self.name = name
        self.host = host
        self.port = port
        """Of HTTP; 0: it speaks none."""
        self.station = station
        """Where it runs, in a mesh with wires."""
        self._spawn = spawn
        self._pool_shape: tuple[int, int] | None = None
        self._frozen: list[psutil.Process] = []
        self._started: mesh.Service | subprocess.Popen[bytes] | None = None
        self._was_ended = False

    def start(self, *prefix: str) -> None:
        """Start it, executed by the command `prefix`; `wait_ready` waits."""
        self._was_ended = False
        self._started = self._spawn(prefix)

    def wait_ready(self) -> None:
        if isinstance(self._started, mesh.Service):
            self._started.wait_ready()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._started is not None
        return self._started.process if isinstance(self._started, mesh.Service) else self._started

    @property
    def service(self) -> mesh.Service:
        assert isinstance(self._started, mesh.Service)
        return self._started

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._started is not None and self.process.poll() is None

    @property
    def has_died(self) -> bool:
        """Whether it is gone and nobody here ended it."""
        return self._started is not None and not self._was_ended and self.process.poll() is not None

    @property
    def log(self) -> str:
        return self._started.log if isinstance(self._started, mesh.Service) else ""

    def metrics(self) -> dict[str, float]:
        """Sums over all label sets, by the name of the sample; empty while it does not answer."""
        sums: dict[str, float] = {}
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(self.host, self.port, timeout=METRICS_TIMEOUT_S)
            with contextlib.closing(connection):
                connection.request("GET", "/metrics")
                lines = connection.getresponse().read().decode().splitlines()
            for sample, value in (line.rsplit(" ", 1) for line in lines if line and line[0] != "#"):
                name = sample.split("{")[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def metric(self, name: str) -> float:
        return self.metrics().get(name, 0.0)

    # ---- what is done to it ----------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL to the service itself; what it has started must die with it."""
        children = self._all()[1:]
        self._was_ended = True
        self.process.kill()
        self.process.wait()
        self._close()
        wait_until(
            lambda: not any(runs(each) for each in children), DEAD_WITHIN_S, f"the children of {self.name} died with it"
        )
        self._frozen = []

    def terminate(self) -> None:
        self._was_ended = True
        self.process.send_signal(signal.SIGTERM)

    def wait_ended(self) -> None:
        """Wait for it to end after `terminate`; one that overstays is killed, and that is a failure."""
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end in {ENDS_WITHIN_S:g} s:\n{self.log[-2000:]}") from None
        self._close()
        self._frozen = []

    def freeze(self) -> None:
        """SIGSTOP to everything it consists of."""
        self._stop(self._all())

    def freeze_server(self) -> None:
        self._stop(self._all()[:1])

    def freeze_core(self) -> None:
        self._stop([each for each in self._all()[1:] if CORE in command_of(each)])

    def freeze_transport(self) -> None:
        """SIGSTOP to the process that pulls: a helper where the connector has one, else the core."""
        children = self._all()[1:]
        helpers = [each for each in children if HELPERS in command_of(each)]
        self._stop(helpers or [each for each in children if CORE in command_of(each)])

    def thaw(self) -> None:
        """SIGCONT to all that was stopped."""
        self._continue(self._frozen)

    def thaw_transport(self) -> None:
        """SIGCONT to all but the server itself."""
        self._continue([each for each in self._frozen if each.pid != self.process.pid])

    def engine_rests(self) -> bool:
        """Whether the core and its helpers have slept through a look at them, but for their pulse."""
        before_s = self._engine_cpu_s()
        time.sleep(REST_LOOK_S)
        return self._engine_cpu_s() - before_s < REST_LOOK_S * REST_SHARE

    def _engine_cpu_s(self) -> float:
        """CPU time of all threads but the server's, and the time that they stood in line for a CPU."""
        stats = [stat for each in self._all()[1:] for stat in Path(f"/proc/{each.pid}/task").glob("*/schedstat")]
        total_ns = 0
        for stat in stats:
            with contextlib.suppress(OSError):
                total_ns += sum(map(int, stat.read_text().split()[:2]))
        return total_ns / 1e9

    def pool_shape(self) -> tuple[int, int]:
        """Blocks of an engine's pool, and the bytes of one; the engine must answer when this is first asked of it."""
        if self._pool_shape is None:
            labels = next(key for key in self.service.metrics() if key.startswith("vllm:cache_config_info"))
            pairs = labels[labels.index("{") + 1 : -1].replace('"', "").split(",")
            values = dict(pair.split("=", 1) for pair in pairs)
            self._pool_shape = int(values["num_gpu_blocks"]), int(values["block_bytes"])
        return self._pool_shape

    def pool_file(self) -> Path:
        """The memory of an engine's KV pool, as the kernel shows it to whoever may look."""
        core = next(each for each in self._all() if CORE in command_of(each))
        return next(
            link
            for link in Path(f"/proc/{core.pid}/fd").iterdir()
            if os.readlink(link).startswith(POOL_LINK) and os.access(link, os.W_OK)
        )

    def close(self) -> None:
        """End it for good, without grace: what is to be seen has been seen."""
        if self.is_alive:
            self.kill()

    def _all(self) -> list[psutil.Process]:
        """The service's own process, then its children."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _stop(self, processes: list[psutil.Process]) -> None:
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
                self._frozen.append(each)
        deadline = time.monotonic() + STOPPED_WITHIN_S
        while any(runs(each) and each.status() != psutil.STATUS_STOPPED for each in processes):
            assert time.monotonic() < deadline, f"{self.name} could not be stopped"
            time.sleep(0.002)

    def _continue(self, processes: list[psutil.Process]) -> None:
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()
        self._frozen = [each for each in self._frozen if each not in processes]

    def _close(self) -> None:
        """Let go of the pipe by which the service told that it was ready."""
        if isinstance(self._started, mesh.Service):
            self._started.reap()


def environment() -> dict[str, str]:
    """What a service needs to find the tests' own logits processor."""
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{FOLDER_OF_TESTS}{os.pathsep}{known}" if known else str(FOLDER_OF_TESTS)}
