"""An engine core whose model does nothing but take its time, for `loop.py`: all that is left of a step is the loop around it.

    python loop_core.py PARENT_PID OPTIONS_JSON    (a Launch on standard input, as any core)

The stand-in returns logits over SmolLM2's vocabulary and notes when it ran; both are written to a file at the end, with
what the stages of the loop took when asked for. The product has no door for it: this file puts it in place of a backend.
"""

import atexit
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdmesh.connector.pool import KVPool
from pdmesh.engine import batch as batch_module
from pdmesh.engine import core as core_module
from pdmesh.engine import core_process, executor, mailbox, runner, sampler, scheduler
from pdmesh.engine.backend import Backend, KVGroupSpec, ModelInfo, ProgressCallback, StepBatch
from pdmesh.engine.backends import ChosenBackend
from pdmesh.engine.step_logits import StepLogits
from pdmesh.parent import die_with_parent

VOCAB_SIZE = 49152
BLOCK_SIZE = 32
# Barriers and tiles as a small model's step has them.
NUM_LAYERS = 30
NUM_TILES = 16
NUM_CALIBRATIONS = 60


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """What `loop.py` asks of its core."""

    kind: str
    """sleep: the step leaves the cores to others; burn: it takes them all, so that whatever else runs delays it."""
    step_s: float
    threads: int
    stages: bool
    """Time the stages too, which itself takes some microseconds a step."""
    record: str
    """File to write at the end."""


class NullBackend(Backend):
    """Takes its time and returns noise."""

    name = "null"
    row_invariant = True
    default_block_size = BLOCK_SIZE

    def __init__(self, options: CoreOptions) -> None:
        self._options = options
        self._rounds = 0
        self.steps: list[tuple[int, int, int, int]] = []
        """Start and end in ns, rows, CPU time of the worker's thread in ns."""
        self.rest_s: list[float] = []
        """Steps as long as nothing else runs."""
        self._logits = np.random.default_rng(0).standard_normal((256, VOCAB_SIZE), dtype=np.float32) * np.float32(2)
        self._best_ids = self._logits.argmax(axis=-1)

    def load(self, model: str, dtype: str, block_size: int | None, progress: ProgressCallback) -> ModelInfo:
        if self._options.kind == "burn":
            self._burner = _compiled_burner()
            self._rounds = self._calibrated()
        self._note_rest()
        group = KVGroupSpec(
            kind="full", layers=(0,), block_size=BLOCK_SIZE, block_bytes=BLOCK_SIZE * 64, fingerprint="null"
        )
        return ModelInfo(
            fingerprint="null",
            groups=(group,),
            max_model_len=8192,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(2,),
            dtype="bfloat16",
        )

    def available_kv_bytes(self, fraction: float) -> int:
        return 1 << 26

    def profile(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return 1 << 20

    def bind(self, pool: KVPool) -> None:
        pass

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        pass

    # As the CPU library's backend: logits on the host, and the largest of each found on the way.
    def forward(self, batch: StepBatch) -> StepLogits:
        began, cpu = time.perf_counter_ns(), time.thread_time_ns()
        self._take_time()
        num_rows = len(batch.logits_index)
        logits = StepLogits(self._logits[:num_rows], self._best_ids[:num_rows].copy())
        cpu = time.thread_time_ns() - cpu
        self.steps.append((began, time.perf_counter_ns(), num_rows, cpu))
        return logits

    def close(self) -> None:
        # The machine may have changed its pace meanwhile.
        self._note_rest()

    def _note_rest(self) -> None:
        for _ in range(NUM_CALIBRATIONS):
            began = time.perf_counter()
            self._take_time()
            self.rest_s.append(time.perf_counter() - began)

    def _take_time(self) -> None:
        if self._options.kind == "sleep":
            time.sleep(self._options.step_s)
        else:
            self._burner(self._options.threads, NUM_LAYERS, NUM_TILES, self._rounds)

    def _calibrated(self) -> int:
        """Rounds of a tile that make a step as long as it shall be, on cores at rest."""
        rounds, took = 3_000, []
        for _ in range(NUM_CALIBRATIONS):
            began = time.perf_counter()
            self._burner(self._options.threads, NUM_LAYERS, NUM_TILES, rounds)
            took.append(time.perf_counter() - began)
        return int(rounds * self._options.step_s / sorted(took)[len(took) // 4])


class Stages:
    """CPU time of functions of the loop, in the thread that calls them."""

    def __init__(self) -> None:
        self.cpu_ns: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function or method by one that is timed."""
        plain: Callable[..., Any] = getattr(owner, attribute)
        self.cpu_ns[name] = self.calls[name] = 0

        @functools.wraps(plain)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return plain(*args, **options)
            finally:
                self.cpu_ns[name] += time.thread_time_ns() - began
                self.calls[name] += 1

        setattr(owner, attribute, timed)


def _compiled_burner() -> Callable[[int, int, int, int], int]:
    folder = tempfile.mkdtemp(prefix="loop-")
    library = Path(folder, "burn.so")
    source = Path(__file__).with_name("burn.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)], check=True)
    function = ctypes.CDLL(str(library)).burn
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.unlink()
    os.rmdir(folder)
    called: Callable[[int, int, int, int], int] = function
    return called


def main() -> int:
    """Live as a core."""
    parent_pid, options = int(sys.argv[1]), CoreOptions(**json.loads(sys.argv[2]))
    die_with_parent(parent_pid)
    backend, stages = NullBackend(options), Stages()
    vars(core_process)["make_backend"] = lambda _: ChosenBackend(backend)
    if options.stages:
        stages.wrap(scheduler.Scheduler, "schedule", "schedule")
        stages.wrap(scheduler.Scheduler, "update", "update")
        stages.wrap(core_module.Core, "_take_in", "take in")
        stages.wrap(mailbox.Mailbox, "send", "send")
        stages.wrap(mailbox.Mailbox, "wait", "wait")
        stages.wrap(batch_module.Gatherer, "gather", "gather")
        stages.wrap(sampler.Sampler, "sample", "sample")
        stages.wrap(runner.Runner, "run", "worker's run")
        stages.wrap(executor.Executor, "take_results", "take results")

    def write() -> None:
        record = {
            "options": asdict(options),
            "rest_s": backend.rest_s,
            "steps": backend.steps,
            "stages": {name: (stages.cpu_ns[name], stages.calls[name]) for name in stages.cpu_ns},
        }
        Path(options.record).write_text(json.dumps(record))

    atexit.register(write)
    return core_process.main()


if __name__ == "__main__":
    sys.exit(main())
