"""Measures what a step costs before and after the model: `schedule()` and the update with its result, in steady decode.

    python benchmarks/scheduler.py --vllm-python ~/vllm/bin/python

Without a model: results are made up, one token for each row. With `--vllm-python`, the interpreter of a vLLM installation, its
scheduler does the same steps on the same requests in the same sitting: both sides are processes on the same core that take
turns, round after round, and the table has the medians over rounds of each round's median. It is the thread's CPU time, so that
what else the machine does counts less. Prefix caching is on in both.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

BLOCK_SIZE = 16
NUM_BLOCKS = 40_000
MAX_MODEL_LEN = 8192
BUDGET_TOKENS = 8192
TOKEN = 7
WARM_UP_STEPS = 100
MAX_STEPS = 3000
NUM_RUNNING = (16, 256)
# What issue and design promise for `schedule()`, by running requests.
MOST_US = {16: 40.0, 256: 200.0}


class Side(Protocol):
    """A scheduler under test."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None: ...
    def schedule(self) -> Any: ...
    def result_of(self, schedule: Any) -> Any: ...
    def update(self, schedule: Any, result: Any) -> Any: ...
    def num_rows(self, schedule: Any) -> int: ...


class OurSide:
    """pdmesh's scheduler with its KV manager."""

    def __init__(self, num_running: int, *, is_async: bool) -> None:
        from pdmesh.engine.block_hash import BlockHasher
        from pdmesh.engine.block_pool import BlockPool
        from pdmesh.engine.kv_groups import KVGroup
        from pdmesh.engine.kv_manager import KVManager
        from pdmesh.engine.limits import Limits
        from pdmesh.engine.scheduler import Scheduler

        limits = Limits(
            max_num_batched_tokens=BUDGET_TOKENS,
            max_num_seqs=num_running,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=32_000,
            eos_token_ids=frozenset({1}),
        )
        pool, hasher = BlockPool(NUM_BLOCKS, 1), BlockHasher("sha256", "", BLOCK_SIZE)
        self._scheduler = Scheduler(
            KVManager([KVGroup(BLOCK_SIZE)], pool, hasher, max_chunk_tokens=BUDGET_TOKENS), limits
        )

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        from pdmesh.engine.messages import AddRequest
        from pdmesh.protocol.messages import GenerateRequest, SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self._scheduler.add(
            AddRequest(request=GenerateRequest(request_id=request_id, token_ids=prompt, sampling=sampling))
        )

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def result_of(self, schedule: Any) -> Any:
        from pdmesh.engine.plan import NO_TOKEN, StepResult

        return StepResult(token_ids=[TOKEN if is_sampled else NO_TOKEN for is_sampled in schedule.plan.samples])

    def update(self, schedule: Any, result: Any) -> Any:
        self._scheduler.update(schedule, result)
        return self._scheduler.state.take_outbox()

    def num_rows(self, schedule: Any) -> int:
        return len(schedule.plan.rows)


@dataclass(frozen=True, kw_only=True)
class Case:
    num_running: int
    is_async: bool
    num_steps: int
    with_gc: bool


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians of one round, microseconds."""

    schedule_us: float
    update_us: float


def measure(side: Side, case: Case) -> Timing:
    """Time steps in which all requests decode. A step is planned before the result of the last one when that is async."""
    for index in range(case.num_running):
        # Their blocks end in different steps.
        side.add(
            f"r{index}", [(index * 7 + place) % 1000 for place in range(100 + index % BLOCK_SIZE)], MAX_MODEL_LEN // 2
        )
    under_way: deque[tuple[Any, Any]] = deque()
    schedule_s: list[float] = []
    update_s: list[float] = []
    for number in range(1_000_000):
        if number == WARM_UP_STEPS:
            # As a server does once it has started.
            gc.collect()
            gc.freeze()
            if not case.with_gc:
                gc.disable()
        start = time.thread_time()
        schedule = side.schedule()
        end = time.thread_time()
        under_way.append((schedule, side.result_of(schedule)))
        if len(under_way) > case.is_async:
            oldest, result = under_way.popleft()
            start_update = time.thread_time()
            side.update(oldest, result)
            end_update = time.thread_time()
            if number >= WARM_UP_STEPS:
                assert side.num_rows(schedule) == case.num_running, "not all requests decode"
                schedule_s.append(end - start)
                update_s.append(end_update - start_update)
                if len(schedule_s) == case.num_steps:
                    break
    gc.enable()
    gc.unfreeze()
    return Timing(schedule_us=statistics.median(schedule_s) * 1e6, update_us=statistics.median(update_s) * 1e6)


def serve(name: str, core: int) -> None:
    """Be one side: answer each case on standard input with its timing."""
    os.sched_setaffinity(0, {core})
    for line in sys.stdin:
        case = Case(**json.loads(line))
        timing = measure(_make_side(name, case), case)
        print(json.dumps(asdict(timing)), flush=True)


def _make_side(name: str, case: Case) -> Side:
    if name == "pdmesh":
        return OurSide(case.num_running, is_async=case.is_async)
    # It lies beside this script, and only its interpreter has vLLM.
    side: Side = importlib.import_module("scheduler_vllm").VllmSide(
        case.num_running,
        is_async=case.is_async,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        budget_tokens=BUDGET_TOKENS,
    )
    return side


class SideProcess:
    """A side in a process of its own, asked by lines of JSON."""

    def __init__(self, name: str, python: str, core: int) -> None:
        self.name = name
        command = [python, str(Path(__file__).resolve()), "--serve", name, "--core", str(core)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, case: Case) -> Timing:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}")
        return Timing(**json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def compare(sides: list[SideProcess], cases: list[Case], num_rounds: int) -> dict[Case, dict[str, Timing]]:
    """Let the sides take turns, another one first in each round; return their medians over rounds."""
    timings: dict[tuple[Case, str], list[Timing]] = {}
    for number in range(num_rounds):
        for case in cases:
            turn = number % len(sides)
            for side in (*sides[turn:], *sides[:turn]):
                timings.setdefault((case, side.name), []).append(side.measure(case))
    return {case: {side.name: _median(timings[case, side.name]) for side in sides} for case in cases}


def _median(timings: list[Timing]) -> Timing:
    return Timing(
        schedule_us=statistics.median(each.schedule_us for each in timings),
        update_us=statistics.median(each.update_us for each in timings),
    )


def print_table(measured: dict[Case, dict[str, Timing]]) -> bool:
    """Print what was measured; return whether the promises were kept."""
    is_kept = True
    for case, by_side in measured.items():
        print(f"\n{case.num_running} running, {'async' if case.is_async else 'sync'}")
        ours = by_side["pdmesh"]
        for name, timing in by_side.items():
            ratio = (
                ""
                if name == "pdmesh"
                else (
                    f"   {timing.schedule_us / ours.schedule_us:.1f} and {timing.update_us / ours.update_us:.1f} times ours"
                )
            )
            print(f"  {name:8} schedule {timing.schedule_us:8.1f} µs   update {timing.update_us:8.1f} µs{ratio}")
        most = MOST_US.get(case.num_running)
        if most is not None:
            is_met = ours.schedule_us <= most
            is_kept &= is_met
            print(f"  promised: schedule ≤ {most:.0f} µs: {'kept' if is_met else 'NOT KEPT'}")
    return is_kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="interpreter of a vLLM installation: measure its scheduler too")
    parser.add_argument("--steps", type=int, default=300, help="steps timed in each round, at least 1")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, at least 1")
    parser.add_argument("--running", type=int, nargs="+", default=list(NUM_RUNNING), help="running requests")
    parser.add_argument("--no-gc", action="store_true", help="turn garbage collection off while timing")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="CPU core of both sides")
    parser.add_argument("--serve", choices=["pdmesh", "vllm"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.core)
        return
    if min(options.steps, options.rounds, *options.running) < 1:
        parser.error("--steps, --rounds and --running must be at least 1")
    if options.steps > MAX_STEPS:
        parser.error(f"--steps must be at most {MAX_STEPS}: requests end after that")
    sides = [SideProcess("pdmesh", sys.executable, options.core)]
    if options.vllm_python:
        sides.append(SideProcess("vllm", options.vllm_python, options.core))
    cases = [
        Case(num_running=num_running, is_async=is_async, num_steps=options.steps, with_gc=not options.no_gc)
        for num_running in options.running
        for is_async in (False, True)
    ]
    measured = compare(sides, cases, options.rounds)
    for side in sides:
        side.close()
    print(
        f"medians of {options.rounds} rounds of {options.steps} steps on core {options.core}, block size {BLOCK_SIZE}, "
        f"garbage collection {'off' if options.no_gc else 'on, frozen after warm-up'}"
    )
    if not print_table(measured):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
