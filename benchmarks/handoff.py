"""Measures what handing a prompt over costs: the time from prefill's last step to decode's first, on one host over shm.

    python benchmarks/handoff.py MODEL --json results/today-handoff.json

Starts `pdmesh up` with one prefill and one decode engine and sends prompts one after the other. Prefill tells when a prompt's
last step has ended, and decode when the model begins with the request's first step there, both on the machine's one monotonic
clock (`pdmesh_handoff_clock_seconds`). What lies between is held against the goal, 5 ms; exit code 1 when it is missed.

Beside it, what a client sees: the first token comes from prefill and the second from decode, so the gap between them, less an
ordinary gap between tokens (one decode step and its way to the client), is what the handoff adds once the ticket is at the
proxy; `sealed` of `pdmesh_handoff_seconds` is what came before that. A first step that takes longer than the others counts
here. The engines' own stages are told as well.
"""

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sse_client import EventStream

GOAL_MS = 5.0
START_TIMEOUT_S = 120.0
STAGES = ("sealed", "begin", "pull", "resume")
CLOCK = re.compile(r'^pdmesh_handoff_clock_seconds\{.*event="(\w+)".*\} (\S+)$')
SAMPLE = re.compile(r'^pdmesh_handoff_seconds_(sum|count)\{.*stage="(\w+)".*\} (\S+)$')


def main() -> int:
    """Measure and report; returns the exit code."""
    arguments = _arguments()
    with _mesh(arguments) as ports:
        url = f"http://127.0.0.1:{ports['proxy']}/v1/completions"
        engines = [ports["prefill"], ports["decode"]]
        _send(url, engines, arguments, 3, patience=10)
        before = _stages(engines)
        requests = _send(url, engines, arguments, arguments.requests)
        after = _stages(engines)
    report = _report(requests, before, after, arguments)
    print(_table(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["met"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--model-name", default="benchmark")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("rest", nargs="*", help="more arguments of `pdmesh up`, after --")
    return parser.parse_args()


@contextmanager
def _mesh(arguments: argparse.Namespace) -> Iterator[dict[str, int]]:
    """A running mesh; the HTTP ports of its services."""
    ports = dict(zip(("proxy", "prefill", "decode"), _free_ports(3), strict=True))
    folder = Path(__file__).parent
    common = ["--host", "127.0.0.1", "--model", arguments.model]
    grpc = dict(zip(("prefill", "decode"), _free_ports(2), strict=True))
    children = []
    try:
        for role in ("prefill", "decode"):
            own = ["--port", str(ports[role]), "--grpc-port", str(grpc[role]), "--connector", "shm,grpc"]
            command = [sys.executable, "-m", f"pdmesh_{role}", *common, *own, *arguments.rest]
            children.append(subprocess.Popen(command, cwd=folder))
        command = [sys.executable, "-m", "pdmesh_proxy", *common, "--port", str(ports["proxy"])]
        command += ["--served-model-name", arguments.model_name]
        command += [f"--{role}=127.0.0.1:{grpc[role]}" for role in ("prefill", "decode")]
        children.append(subprocess.Popen(command, cwd=folder))
        _wait(ports["proxy"], children)
        yield ports
    finally:
        for child in reversed(children):
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait(60)


def _free_ports(num: int) -> list[int]:
    import socket

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(port: int, children: "list[subprocess.Popen[bytes]]") -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        if any(child.poll() is not None for child in children):
            sys.exit("a service has ended; its log is above")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit("the mesh does not answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """One request's."""

    gaps_s: list[float]
    """Between its tokens, at the client."""
    strict_s: float
    """From the end of prefill's last step to the start of decode's first."""


def _send(url: str, engines: list[int], arguments: argparse.Namespace, num: int, *, patience: int = 0) -> list[Handoff]:
    """Send prompts that nobody has seen, one after the other, until so many have been handed over.

    `patience`: how many may not be, as before the proxy has met both engines.
    """
    chance = random.Random()
    done: list[Handoff] = []
    while len(done) < num:
        prompt = [chance.randrange(1000, 40_000) for _ in range(arguments.prompt_tokens)]
        sent_s = time.monotonic()
        gaps_s = asyncio.run(_gaps(url, arguments.model_name, prompt))
        clock = {found[1]: float(found[2]) for line in _metrics(engines) if (found := CLOCK.match(line))}
        computed_s, resumed_s = clock.get("computed", 0.0), clock.get("resumed", 0.0)
        if sent_s < computed_s < resumed_s:
            done.append(Handoff(gaps_s=gaps_s, strict_s=resumed_s - computed_s))
            continue
        patience -= 1
        if patience < 0:
            sys.exit("a prompt was not handed over; the log is above")
    return done


async def _gaps(url: str, model: str, prompt: list[int]) -> list[float]:
    """Seconds between the tokens of a request."""
    body = {"model": model, "prompt": prompt, "max_tokens": 17, "temperature": 0, "ignore_eos": True, "stream": True}
    stream = await EventStream.post(url, body, {})
    times = []
    try:
        if stream.status != 200:
            sys.exit(f"{url} answered {stream.status}")
        while events := await stream.events():
            times += [time.perf_counter() for event in events if any(each["text"] for each in event["choices"])]
    finally:
        stream.close()
    return [after - before for before, after in itertools.pairwise(times)]


def _metrics(ports: list[int]) -> Iterator[str]:
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            yield from answer.read().decode().splitlines()


def _stages(ports: list[int]) -> dict[tuple[str, str], float]:
    """Sums and counts of the engines' stages."""
    totals: dict[tuple[str, str], float] = {}
    for line in _metrics(ports):
        if found := SAMPLE.match(line):
            key = (found[2], found[1])
            totals[key] = totals.get(key, 0.0) + float(found[3])
    return totals


def _report(
    requests: list[Handoff],
    before: dict[tuple[str, str], float],
    after: dict[tuple[str, str], float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    def mean_ms(stage: str) -> float | None:
        num = after.get((stage, "count"), 0.0) - before.get((stage, "count"), 0.0)
        total = after.get((stage, "sum"), 0.0) - before.get((stage, "sum"), 0.0)
        return total / num * 1e3 if num else None

    strict = [each.strict_s * 1e3 for each in requests]
    firsts = [each.gaps_s[0] * 1e3 for each in requests]
    steps = [gap * 1e3 for each in requests for gap in each.gaps_s[2:]]
    stages = {stage: taken_ms for stage in STAGES if (taken_ms := mean_ms(stage)) is not None}
    step_ms = statistics.median(steps)
    added = [first - step_ms for first in firsts]
    overhead_ms = statistics.median(strict)
    return {
        "prompt_tokens": arguments.prompt_tokens,
        "requests": len(requests),
        "overhead_ms": overhead_ms,
        "least_overhead_ms": min(strict),
        "client_overhead_ms": statistics.median(added) + stages["sealed"],
        "least_client_overhead_ms": min(added) + stages["sealed"],
        "goal_ms": GOAL_MS,
        "met": overhead_ms <= GOAL_MS,
        "first_gap_ms": statistics.median(firsts),
        "step_gap_ms": step_ms,
        "stages_mean_ms": stages,
        "overheads_ms": [round(each, 3) for each in strict],
        "first_gaps_ms": [round(each, 3) for each in firsts],
    }


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['requests']} prompts of {report['prompt_tokens']} tokens, one after the other",
        "",
        "| what | ms |",
        "|---|---|",
        f"| **end of prefill's last step to start of decode's first, median** | **{report['overhead_ms']:.2f}** |",
        f"| the least of them | {report['least_overhead_ms']:.2f} |",
        f"| at the client: sealed, and first gap less a step's, median | {report['client_overhead_ms']:.2f} |",
        f"| the least of them | {report['least_client_overhead_ms']:.2f} |",
        f"| gap between first and second token, median | {report['first_gap_ms']:.2f} |",
        f"| gap between later tokens, median | {report['step_gap_ms']:.2f} |",
        *(f"| stage {stage}, mean | {taken_ms:.2f} |" for stage, taken_ms in report["stages_mean_ms"].items()),
        "",
        f"goal {report['goal_ms']:.0f} ms: {'met' if report['met'] else 'MISSED'}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
