"""Servers that a benchmark starts and stops itself: ours and its peers, each one or several processes behind one URL."""

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HOST = "127.0.0.1"
MODEL_NAME = "model"
POLL_S = 0.02
STOP_S = 30.0
KV_BYTES = 4 << 30


class SideFailed(Exception):
    """A server ended or did not answer in time; its log tells why."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a side."""

    name: str
    command: tuple[str, ...]
    port: int
    """HTTP on loopback, with /health."""
    environment: dict[str, str] = field(default_factory=dict)
    """On top of this process's own."""
    waits: bool = False
    """Started only once those before it are healthy."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One server under test; clients talk to its last process."""

    name: str
    processes: tuple[Process, ...]
    spins_idle: bool = False
    """Burns cores without requests, so it is stopped (SIGSTOP) while others are measured."""

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        return f"http://{HOST}:{self.processes[-1].port}/v1"

    def commands(self) -> list[str]:
        """What is started, without the folders of this machine and secrets of the environment."""
        return [
            shlex.join(
                [
                    *(f"{key}={_base_name(value)}" for key, value in process.environment.items()),
                    *(_base_name(word) for word in process.command),
                ]
            )
            for process in self.processes
        ]


def pdmesh_side(name: str, program: Sequence[str], model: str, arguments: Sequence[str]) -> Side:
    """`pdmesh serve`: one engine that does prefill and decode."""
    port = free_port()
    command = [*program, "serve", model, "--port", str(port), "--grpc-port", "0", "--served-model-name", MODEL_NAME]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES), *arguments]
    return Side(name=name, processes=(Process(name=name, command=tuple(command), port=port),))


def mesh_side(name: str, program: Sequence[str], model: str, arguments: Sequence[str]) -> Side:
    """`pdmesh up`: proxy, one prefill and one decode engine, which share the cores."""
    port = free_port()
    command = [*program, "up", "--model", model, "--port", str(port), "--served-model-name", MODEL_NAME]
    command += ["--no-kvcache", "--kv-cache-memory-bytes", str(KV_BYTES // 2), *arguments]
    return Side(name=name, processes=(Process(name=name, command=tuple(command), port=port),))


def vllm_side(name: str, program: str, model: str, environment: dict[str, str], arguments: Sequence[str]) -> Side:
    """`vllm serve` on all cores."""
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    process = _vllm_process(name, program, model, environment, arguments, cores=cores, kv_bytes=KV_BYTES)
    return Side(name=name, processes=(process,))


def vllm_pd_side(
    name: str, program: str, router: str, model: str, environment: dict[str, str], arguments: Sequence[str]
) -> Side:
    """vLLM's prefill and decode with NixlConnector, half of the cores each, behind vllm-router.

    NIXL's progress thread spins on the cores that the engine is bound to, idle or not.
    """
    num_cores = os.cpu_count() or 1
    halves = [f"0-{max(num_cores // 2 - 1, 0)}", f"{num_cores // 2}-{num_cores - 1}"]
    transfer = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
    engines = [
        _vllm_process(
            f"{name}-{role}",
            program,
            model,
            environment | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            ["--kv-transfer-config", transfer, *arguments],
            cores=cores,
            kv_bytes=KV_BYTES // 2,
        )
        for role, cores in zip(("prefill", "decode"), halves, strict=True)
    ]
    port = free_port()
    prefill, decode = (f"http://{HOST}:{engine.port}" for engine in engines)
    command = [router, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--host", HOST]
    command += ["--port", str(port), "--kv-connector", "nixl", "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(free_port()), "--disable-circuit-breaker"]
    front = Process(name=f"{name}-router", command=tuple(command), port=port, waits=True)
    return Side(name=name, processes=(*engines, front), spins_idle=True)


def llama_side(name: str, program: str, gguf: str, arguments: Sequence[str]) -> Side:
    """llama.cpp's server; one slot, since only its single stream is compared."""
    port = free_port()
    command = [program, "-m", gguf, "-a", MODEL_NAME, "--host", HOST, "--port", str(port), "-t", str(os.cpu_count())]
    command += ["-np", "1", "-c", "8192", "-fa", "on", "-ub", "1024", "--no-webui", *arguments]
    return Side(name=name, processes=(Process(name=name, command=tuple(command), port=port),))


def _vllm_process(
    name: str,
    program: str,
    model: str,
    environment: dict[str, str],
    arguments: Sequence[str],
    *,
    cores: str,
    kv_bytes: int,
) -> Process:
    port = free_port()
    settings = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(kv_bytes >> 30)}
    command = [program, "serve", model, "--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port)]
    command += ["--dtype", "bfloat16", *arguments]
    return Process(name=name, command=tuple(command), port=port, environment=settings | environment)


class Running:
    """A side while it runs."""

    def __init__(self, side: Side, log_folder: Path, timeout_s: float) -> None:
        self.side = side
        self.began_s = time.monotonic()
        self._children: list[tuple[Process, subprocess.Popen[bytes]]] = []
        self._log_folder, self._timeout_s = log_folder, timeout_s

    def start(self) -> None:
        """Start all processes and wait until each is healthy."""
        waiting: list[Process] = []
        for process in self.side.processes:
            if process.waits:
                self._wait(waiting)
                waiting = []
            with (self._log_folder / f"{process.name}.log").open("wb") as log:
                child = subprocess.Popen(
                    process.command,
                    env=os.environ | process.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._children.append((process, child))
            waiting.append(process)
        self._wait(waiting)

    def first_answer_s(self) -> float:
        """Ask for one token and tell how long after the start it came."""
        body = {"model": MODEL_NAME, "prompt": [1000, 2000, 3000], "max_tokens": 1, "temperature": 0}
        connection = http.client.HTTPConnection(HOST, self.side.processes[-1].port, timeout=self._timeout_s)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise SideFailed(f"{self.side.name} answers {answer.status}: {answer.read()[:200]!r}")
            answer.read()
        return time.monotonic() - self.began_s

    def pause(self) -> None:
        """Stop a side that spins; nothing for others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all processes and their descendants; those that do not end in time are killed."""
        self.resume()
        left = self._processes()
        for _, child in reversed(self._children):
            child.terminate()
        for _, child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)
        _, alive = psutil.wait_procs(left, timeout=1)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes() if self.side.spins_idle else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for _, child in self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(child.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def _wait(self, waiting: list[Process]) -> None:
        for process in waiting:
            while not is_healthy(process.port):
                for other, child in self._children:
                    if child.poll() is not None:
                        raise SideFailed(
                            f"{other.name} ended with {child.returncode}: {self._log_folder}/{other.name}.log"
                        )
                if time.monotonic() - self.began_s > self._timeout_s:
                    raise SideFailed(f"{process.name} is not healthy after {self._timeout_s:g} s: {self._log_folder}")
                time.sleep(POLL_S)


@contextlib.contextmanager
def running(side: Side, log_folder: Path, timeout_s: float) -> Iterator[Running]:
    """A side from its start to its end."""
    server = Running(side, log_folder, timeout_s)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def is_healthy(port: int) -> bool:
    """Whether /health is a 200."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _base_name(word: str) -> str:
    return ":".join(part.rsplit("/", 1)[-1] for part in word.split(":")) if word.startswith("/") else word
