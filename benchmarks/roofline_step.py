"""Whole steps of a real model, for `roofline.py`: what a step is, beside what its linear layers alone could be.

A decode step reads each weight once, so bytes of weights per second stand beside plain reads. A prefill step's linear layers
stand beside the best GEMM of the same shapes, as if all of the step but attention were theirs.
"""

import ctypes
import statistics
import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.backend import ProgressCallback, StepBatch
from pdmesh.engine.cpu_backend import CpuBackend

BLOCK_TOKENS = 32
DECODE_CONTEXT = 100
TIME_ATTENTION = 4
NUM_TIMES = 6
WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Medians, seconds."""

    whole: float
    attention: float


class Stepper:
    """A backend with one sequence; `close` frees it."""

    def __init__(self, model: str, isa: str, cpus: list[int], max_tokens: int) -> None:
        """`cpus`: one per thread; the first one has to be the calling thread's."""
        self._backend = CpuBackend(len(cpus), isa, cores=tuple(cpus))
        self._info = self._backend.load(model, "bfloat16", BLOCK_TOKENS, ProgressCallback())
        self._width = -(-max_tokens // BLOCK_TOKENS)
        shape = PoolShape(self._width * len(self._info.groups), self._info.groups[0].block_bytes)
        descriptor = create_pool_file("roofline")
        size_pool_file(descriptor, shape)
        self._pool = KVPool(descriptor, shape, writable=True)
        self._pool.blocks[:] = 0
        self._backend.bind(self._pool)

    @property
    def decode_bytes(self) -> int:
        """Return the bytes of weights that a decode step reads: of a table that is no head, only a row."""
        weights = self._backend._weights
        assert weights is not None
        names = {name for name in weights.weights if name != weights.plan.embedding.name}
        return sum(weights.weights[name].panels.nbytes for name in names | {weights.plan.head.name})

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Return outputs and inputs of each linear layer before the head."""
        weights = self._backend._weights
        assert weights is not None
        return [
            (each.num_outputs, each.num_inputs)
            for layer in weights.plan.layers
            for each in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]

    def time(self, num_tokens: int, context: int, runs: int) -> StepTime:
        """Run the same step `runs` times: these tokens behind `context` of them, with the logits of the last one."""
        tables = np.arange(self._width * len(self._info.groups), dtype=np.int32).reshape(-1, 1, self._width)
        batch = StepBatch(
            token_ids=np.arange(num_tokens, dtype=np.int64) * 7919 % self._info.vocab_size,
            positions=np.arange(context, context + num_tokens, dtype=np.int64),
            query_start=np.array([0, num_tokens], dtype=np.int64),
            context_len=np.array([context], dtype=np.int64),
            block_tables=list(tables),
            logits_index=np.array([num_tokens - 1], dtype=np.int64),
        )
        whole, attention = [], []
        for run in range(WARM_STEPS + runs):
            self._take_times()
            begun = time.perf_counter()
            self._backend.forward(batch)
            seconds = time.perf_counter() - begun
            if run >= WARM_STEPS:
                whole.append(seconds)
                attention.append(self._take_times()[TIME_ATTENTION] * 1e-9)
        return StepTime(whole=statistics.median(whole), attention=statistics.median(attention))

    def close(self) -> None:
        self._backend.close()
        self._pool.close()

    def _take_times(self) -> list[int]:
        times = (ctypes.c_int64 * NUM_TIMES)()
        program = self._backend._program
        assert program is not None
        self._backend._library.functions.pdm_program_times(program._handle, times)
        return list(times)


def decode_row(model: str, isa: str, cpus: list[int], runs: int, read: float) -> str:
    """Return the row of one stream's decode; `read`: bytes per second of plain reads by these cores."""
    with closing(Stepper(model, isa, cpus, DECODE_CONTEXT + 1)) as stepper:
        step = stepper.time(1, DECODE_CONTEXT, runs * 10)
        speed = stepper.decode_bytes / step.whole
    return (
        f"{len(cpus)} threads, 1 stream decode, whole step: {step.whole * 1e3:.2f} ms; weights {speed / 1e9:.1f} GB/s, "
        f"{speed / read:.2f} of plain reads (attention {step.attention * 1e3:.2f} ms)"
    )


def prefill_row(
    model: str, isa: str, cpus: list[int], num_tokens: int, runs: int, gemm_s: dict[tuple[int, int], float]
) -> str:
    """Return the row of a prefill; `gemm_s`: seconds of the best GEMM of these tokens by (outputs, inputs)."""
    with closing(Stepper(model, isa, cpus, num_tokens)) as stepper:
        step = stepper.time(num_tokens, 0, runs)
        layers = stepper.layers
    if others := set(layers) - gemm_s.keys():
        raise SystemExit(
            f"--model {model}: its layers {sorted(others)} are not those that the GEMMs were measured with"
        )
    rest = step.whole - step.attention
    flops = sum(2 * num_tokens * outputs * inputs for outputs, inputs in layers)
    best = sum(gemm_s[layer] for layer in layers)
    return (
        f"{len(cpus)} threads, prefill of {num_tokens}, whole step: {step.whole * 1e3:.0f} ms, of which attention "
        f"{step.attention * 1e3:.0f} ms; linear layers over the rest {flops / rest / 1e12:.2f} TFLOP/s, "
        f"{best / rest:.2f} of the best GEMM's {flops / best / 1e12:.2f}"
    )
