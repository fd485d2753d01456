"""Measures what everything around the model adds to a decode step: scheduler, input, sampling, IPC, gRPC, HTTP.

    python benchmarks/loop.py --path serve --kind burn --batch 1 8 32

The model is a stand-in that takes a fixed time (`loop_core.py`), the service is real, and streaming clients that hardly use
the CPU read it over HTTP. `--path serve` is one engine behind its own port, `--path mesh` has a proxy and gRPC between. With
`--kind sleep` the model leaves the cores to the others; with `--kind burn` it takes them all, as a real one does, and what
the others use delays it. A step's period less the model's time at rest is what is added:

    added      client's step period - model at rest = gap + stretch
    gap        end of one forward to the start of the next, on the worker's thread
    stretch    forward beside everything else - forward at rest

The CPU times are per step: of the core's two threads (without the model), of the server, of the proxy, of these clients.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
PROMPT_TOKENS = 32
START_TIMEOUT_S = 60.0
# Tokens of each stream that are not counted: until all have begun.
NUM_WARM = 20


@dataclass(frozen=True, kw_only=True)
class Served:
    """Processes of one service under test."""

    url: str
    pids: dict[str, int]
    record: Path
    """What the core writes when it ends."""


@dataclass(kw_only=True)
class Window:
    """What was measured while one batch streamed."""

    batch: int
    num_steps: int
    began_ns: int
    ended_ns: int
    period_s: float
    """Between two tokens of a stream, median."""
    p99_s: float
    client_cpu_s: float
    cpu_s: dict[str, float] = field(default_factory=dict)


class Stream(asyncio.Protocol):
    """One streaming request; notes when tokens arrive and looks at nothing else."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self.arrivals: list[float] = []
        self._tail = b""
        self.status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.status = self.status or data[:12]
        self.arrivals.extend([now] * data.count(b"data: {"))
        self._tail = self._tail[-16:] + data[-16:]
        if b"[DONE]" in data or b"0\r\n\r\n" in self._tail:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def request_bytes(port: int, number: int, num_tokens: int, sampling: dict[str, Any]) -> bytes:
    """A completion whose prompt no other stream has."""
    prompt = [1000 + (37 * number + index * 7) % 40000 for index in range(PROMPT_TOKENS)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **sampling}
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + raw


def thread_times(pid: int) -> dict[str, float]:
    """CPU seconds of a process's threads, by group: its main thread, its Python worker, what burns, the others."""
    times: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                name = (task / "comm").read_text().strip()
                if name == "burn":
                    continue
                group = "main" if task.name == str(pid) else "others"
                times[group] = times.get(group, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


async def run_window(served: Served, batch: int, num_tokens: int, sampling: dict[str, Any]) -> Window:
    """Stream `batch` requests at once and measure between the warm-up and the first end."""
    port = int(served.url.rsplit(":", 1)[1])
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = []
    streams: list[Stream] = []
    for number in range(batch):
        ends.append(loop.create_future())
        request = request_bytes(port, number, num_tokens, sampling)
        end = ends[-1]
        streams.append(Stream(request, end))
        await loop.create_connection(functools.partial(_same, streams[-1]), "127.0.0.1", port)
    while min(len(stream.arrivals) for stream in streams) < NUM_WARM:
        await asyncio.sleep(0.05)
        if any(end.done() for end in ends):
            raise SystemExit(f"a stream ended early: {[stream.status for stream in streams]}")
    before = {name: thread_times(pid) for name, pid in served.pids.items()}
    began_ns, cpu = time.perf_counter_ns(), time.process_time()
    longest = max(streams, key=lambda stream: len(stream.arrivals))
    first = len(longest.arrivals)
    while len(longest.arrivals) < num_tokens - 5:
        # Few looks, so that looking costs nothing: an estimate of the time left.
        rate = max((len(longest.arrivals) - first) / max((time.perf_counter_ns() - began_ns) / 1e9, 1e-9), 20.0)
        await asyncio.sleep(min(0.5, max((num_tokens - 5 - len(longest.arrivals)) / rate / 2, 0.01)))
    after = {name: thread_times(pid) for name, pid in served.pids.items()}
    ended_ns, client_cpu_s = time.perf_counter_ns(), time.process_time() - cpu
    num_steps = len(longest.arrivals) - first
    await asyncio.wait_for(asyncio.gather(*ends), 60)
    for stream in streams:
        if len(stream.arrivals) < num_tokens:
            raise SystemExit(f"{len(stream.arrivals)} of {num_tokens} tokens: {stream.status!r}")
    periods = [
        later - earlier
        for stream in streams
        for earlier, later in zip(stream.arrivals[NUM_WARM:], stream.arrivals[NUM_WARM + 1 :], strict=False)
        if began_ns <= later * 1e9 <= ended_ns
    ]
    window = Window(
        batch=batch,
        num_steps=num_steps,
        began_ns=began_ns,
        ended_ns=ended_ns,
        period_s=statistics.median(periods),
        p99_s=sorted(periods)[int(len(periods) * 0.99)],
        client_cpu_s=client_cpu_s,
    )
    for name in served.pids:
        for group, seconds in after[name].items():
            window.cpu_s[f"{name} {group}"] = seconds - before[name].get(group, 0.0)
    return window


def _same(stream: Stream) -> Stream:
    return stream


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_healthy(url: str, processes: list[subprocess.Popen[bytes]]) -> None:
    """Return when the service answers. Exits when one of the processes has ended."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if any(process.poll() is not None for process in processes):
            raise SystemExit("a service ended; its log is above")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} is not healthy after {START_TIMEOUT_S:g} s")


def child_of(pid: int, text: str) -> int:
    """The child of a process whose command line has `text`."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if text in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise SystemExit(f"process {pid} has no child {text}")


@contextlib.contextmanager
def serving(options: argparse.Namespace, folder: Path) -> Iterator[Served]:
    """Start the services and end them."""
    record = folder / "core.json"
    core = {
        "kind": options.kind,
        "step_s": options.step_ms / 1e3,
        "threads": options.threads,
        "stages": options.stages,
        "record": str(record),
    }
    engine_port, grpc_port, proxy_port = free_port(), free_port(), free_port()
    module = "pdmesh_decode.serve" if options.path == "serve" else "pdmesh_decode.main"
    engine = [sys.executable, str(HERE / "loop_service.py"), module, json.dumps(core), MODEL]
    engine += ["--port", str(engine_port), "--grpc-port", str(grpc_port), "--log-level", "warning"]
    engine += ["--kv-cache-memory-bytes", "32M", "--max-model-len", "1024"]
    if options.path == "mesh":
        engine += ["--role", "both"]
    processes = [subprocess.Popen(engine)]
    url = f"http://127.0.0.1:{engine_port}"
    try:
        wait_healthy(url, processes)
        pids = {"server": processes[0].pid, "core": child_of(processes[0].pid, "loop_core")}
        if options.path == "mesh":
            proxy = [sys.executable, "-m", "pdmesh_proxy", MODEL, "--port", str(proxy_port), "--log-level", "warning"]
            processes.append(subprocess.Popen([*proxy, "--decode", f"127.0.0.1:{grpc_port}"]))
            url = f"http://127.0.0.1:{proxy_port}"
            wait_healthy(url, processes)
            pids["proxy"] = processes[1].pid
        yield Served(url=url, pids=pids, record=record)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


def report(window: Window, record: dict[str, Any]) -> dict[str, float]:
    """One column of the table, ms or µs per step."""
    steps = [step for step in record["steps"] if window.began_ns <= step[0] and step[1] <= window.ended_ns]
    whole = [step for step in steps if step[2] == window.batch]
    gaps = [
        later[0] - earlier[1] for earlier, later in itertools.pairwise(steps) if earlier[2] == later[2] == window.batch
    ]
    rest_s = statistics.median(record["rest_s"])
    forward_ns = [end - begin for begin, end, *_ in whole]
    us = 1e6 / window.num_steps
    column = {
        "steps": float(len(whole)),
        "model at rest, ms": rest_s * 1e3,
        "step period p50, ms": window.period_s * 1e3,
        "step period p99, ms": window.p99_s * 1e3,
        "ADDED, ms": (window.period_s - rest_s) * 1e3,
        "gap p50, µs": statistics.median(gaps) / 1e3,
        "gap mean, µs": statistics.fmean(gaps) / 1e3,
        "stretch p50, µs": (statistics.median(forward_ns) - rest_s * 1e9) / 1e3,
        "stretch mean, µs": (statistics.fmean(forward_ns) - rest_s * 1e9) / 1e3,
    }
    for name, seconds in sorted(window.cpu_s.items()):
        column[f"CPU {name}, µs"] = seconds * us
    # The worker is among the core's other threads, and the model's own time on it is not the loop's.
    column["CPU core others, µs"] -= sum(step[3] for step in steps) / 1e3 / window.num_steps
    column["CPU clients, µs"] = window.client_cpu_s * us
    return column


def print_table(columns: list[tuple[str, dict[str, float]]]) -> None:
    """One line per number."""
    names = list(dict.fromkeys(name for _, column in columns for name in column))
    print(f"{'':<28}" + "".join(f"{heading:>14}" for heading, _ in columns))
    for name in names:
        cells = (f"{column[name]:>14.{3 if name.endswith('ms') else 0}f}" for _, column in columns)
        print(f"{name:<28}" + "".join(cells))


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", choices=["serve", "mesh"], default="serve")
    parser.add_argument("--kind", choices=["sleep", "burn"], default="burn")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="that the model burns")
    parser.add_argument("--steps", type=int, default=300, help="tokens of each stream")
    parser.add_argument(
        "--sampling", type=json.loads, default={"temperature": 0}, help="fields of the request, as JSON"
    )
    parser.add_argument("--stages", action="store_true", help="time the stages of the core's loop, too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        with serving(options, Path(name)) as served:
            windows = [
                asyncio.run(run_window(served, batch, options.steps, options.sampling)) for batch in options.batch
            ]
        record = json.loads(Path(name, "core.json").read_text())
    print(f"{options.path}, {options.kind} {options.step_ms:g} ms, {options.sampling}")
    print_table([(f"batch {window.batch}", report(window, record)) for window in windows])
    if options.stages:
        print("\nstages of the core, µs of CPU per call over the whole run")
        for stage, (cpu_ns, calls) in record["stages"].items():
            print(f"{stage:<28}{cpu_ns / 1e3 / max(calls, 1):>14.1f}{calls:>10d} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
