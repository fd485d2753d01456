"""Measures how near the CPU library's linear layers come to what this machine can do, and to PyTorch's in the same run.

    python benchmarks/roofline.py --threads 1 2

The layers are those of SmolLM2-135M in bf16. Few rows (decode) read each weight once from memory: bytes of weights per second,
beside plain reads of the same size. Many rows (prefill) are bound by the matrix units: FLOP/s, beside the better of PyTorch's
F.linear and its prepacked oneDNN linear; theirs stop at the product, ours go on to the gate, the sum or the store. `--model`, a
directory with that model in bf16, adds whole steps: one stream's decode, and a prefill. `--isa` chooses a slower instruction
set. Medians of `--runs`, ours and theirs in turn.
"""

import argparse
import contextlib
import ctypes
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

from pdmesh_kernels.cpu.abi import Batch, DType, EmbedArgs, Epilogue, Format, Isa, LinearArgs, NormArgs, Weight
from pdmesh_kernels.cpu.build import compiler
from pdmesh_kernels.cpu.library import Library, Pool, choose_isa, load
from pdmesh_kernels.cpu.packing import PackedWeight, pack_values, packed_bytes
from roofline_step import decode_row, prefill_row

# More than the caches of a core; in turn, all of them are cold.
COLD_BYTES = 160 << 20
TIME_LINEAR = 2
NUM_TIMES = 6
TORCH_WEIGHTS = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    name: str
    num_outputs: int
    num_inputs: int
    epilogue: Epilogue

    @property
    def width(self) -> int:
        return self.num_outputs // 2 if self.epilogue is Epilogue.SILU_MUL else self.num_outputs


LAYERS = (
    Layer(name="qkv", num_outputs=960, num_inputs=576, epilogue=Epilogue.STORE),
    Layer(name="output", num_outputs=576, num_inputs=576, epilogue=Epilogue.ADD),
    Layer(name="gate_up", num_outputs=3072, num_inputs=576, epilogue=Epilogue.SILU_MUL),
    Layer(name="down", num_outputs=576, num_inputs=1536, epilogue=Epilogue.ADD),
)


class Program:
    """Linear layers one after the other, each with weights of its own, as a model has them."""

    def __init__(self, library: Library, isa: Isa, weights: list[tuple[Layer, PackedWeight]]) -> None:
        self._library = library
        self._handle = library.functions.pdm_program_create(isa)
        self._keep: list[object] = []
        self.num_bytes = sum(weight.panels.nbytes for _, weight in weights)
        self._buffers: dict[tuple[DType, int], int] = {}
        for width in {layer.num_inputs for layer, _ in weights}:
            self._fill(library, width)
        for layer, weight in weights:
            dtype = DType.F32 if layer.epilogue is Epilogue.ADD else DType.BF16
            linear = LinearArgs(weight=self._borrow(weight), epilogue=layer.epilogue, output_dtype=dtype)
            source = self._buffer(DType.BF16, layer.num_inputs)
            self._call("pdm_program_linear", linear, source, self._buffer(dtype, layer.width, is_output=True))

    def close(self) -> None:
        self._library.functions.pdm_program_destroy(self._handle)

    def seconds(self, pool: Pool, num_rows: int) -> float:
        """Run once; returns the time in linear layers."""
        ids, index = np.zeros(num_rows, np.int64), np.arange(num_rows, dtype=np.int64)
        start, zeros, table = np.array([0, num_rows], np.int64), np.zeros(1, np.int64), np.full((1, 1), -1, np.int32)
        tables = (ctypes.c_void_p * 1)(table.ctypes.data)
        batch = Batch(
            num_tokens=num_rows, num_sequences=1, table_width=1, num_groups=1, token_ids=ids.ctypes.data,
            positions=index.ctypes.data, query_start=start.ctypes.data, context_len=zeros.ctypes.data, block_tables=tables,
        )  # fmt: skip
        times = (ctypes.c_int64 * NUM_TIMES)()
        self._library.functions.pdm_program_times(self._handle, times)
        self._library.call("pdm_program_run", self._handle, pool.handle, ctypes.byref(batch), None, None)
        self._library.functions.pdm_program_times(self._handle, times)
        return times[TIME_LINEAR] * 1e-9

    def _fill(self, library: Library, width: int) -> None:
        """Make an input of that width: a row of a table, normed, the same in all rows."""
        table = pack_values(library, Format.BF16, torch.randn(1, width))
        self._call("pdm_program_embed", EmbedArgs(table=self._borrow(table), scale=1.0), self._buffer(DType.F32, width))
        gain = np.ones(width, np.float32)
        self._keep.append(gain)
        norm = NormArgs(
            width=width, gain=gain.ctypes.data, epsilon=1e-5, input_dtype=DType.F32, output_dtype=DType.BF16
        )
        self._call("pdm_program_norm", norm, self._buffer(DType.F32, width), self._buffer(DType.BF16, width))

    def _borrow(self, weight: PackedWeight) -> "ctypes._Pointer[Weight]":
        structure = weight.structure()
        self._keep += [weight, structure]
        return ctypes.pointer(structure)

    def _buffer(self, dtype: DType, width: int, *, is_output: bool = False) -> int:
        # What layers write is not what they read: sums over layers would grow out of all bounds.
        key = (dtype, -width if is_output else width)
        if key not in self._buffers:
            self._buffers[key] = self._library.call("pdm_program_buffer", self._handle, dtype, width)
        return self._buffers[key]

    def _call(self, name: str, args: ctypes.Structure, *buffers: int) -> None:
        self._keep.append(args)
        self._library.call(name, self._handle, ctypes.byref(args), *buffers)


class TorchLayers:
    """The same products by PyTorch, the same way: several weights in turn."""

    def __init__(self, layer: Layer, values: torch.Tensor, num_rows: int, *, is_prepacked: bool) -> None:
        self._inputs = torch.randn(num_rows, layer.num_inputs).bfloat16()
        self._weights = [values.bfloat16() for _ in range(TORCH_WEIGHTS)]
        self._is_prepacked = is_prepacked
        if is_prepacked:
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._weights = [reorder(weight, num_rows) for weight in self._weights]

    def seconds(self) -> float:
        """Return the mean of the weights."""
        begun = time.perf_counter()
        for weight in self._weights:
            if self._is_prepacked:
                torch.ops.mkldnn._linear_pointwise(self._inputs, weight, None, "none", [], "")
            else:
                functional.linear(self._inputs, weight)
        return (time.perf_counter() - begun) / len(self._weights)


def main() -> None:
    """Print both tables for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--few", type=int, nargs="*", default=[1, 8, 32], help="rows that are bound by memory")
    parser.add_argument("--many", type=int, nargs="*", default=[2048], help="rows that are bound by the matrix units")
    parser.add_argument("--model", help="SmolLM2-135M in bf16: measures whole steps too")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--isa", default="auto")
    options = parser.parse_args()
    library = load()
    isa = choose_isa(library, options.isa)
    everywhere = os.sched_getaffinity(0)
    if max(options.threads) > len(everywhere):
        raise SystemExit(f"--threads {max(options.threads)}: this process may use {len(everywhere)} cores")
    print(f"SmolLM2-135M's linear layers in bf16 on {isa.name}, medians of {options.runs} runs")
    for num_threads in options.threads:
        # PyTorch's threads begin before the main one is pinned, or they would all have its core.
        torch.set_num_threads(num_threads)
        functional.linear(torch.randn(512, 512), torch.randn(512, 512))
        cpus = sorted(os.sched_getaffinity(0))[:num_threads]
        pool = Pool(library, num_threads, cpus)
        os.sched_setaffinity(0, cpus[:1])
        few_rows(library, isa, pool, cpus, options.few, options.runs)
        best = [many_rows(library, isa, pool, num_rows, options.runs) for num_rows in options.many]
        pool.close()
        if options.model:
            # Its neighbours on the machine may have changed since the table above.
            read = read_bandwidth(cpus, options.runs)
            print(decode_row(options.model, options.isa, cpus, options.runs, read))
            for num_rows, seconds in zip(options.many, best, strict=True):
                print(prefill_row(options.model, options.isa, cpus, num_rows, options.runs, seconds))
        os.sched_setaffinity(0, everywhere)


def few_rows(library: Library, isa: Isa, pool: Pool, cpus: list[int], rows: list[int], runs: int) -> None:
    read = read_bandwidth(cpus, runs)
    print(f"{pool.num_threads} threads: plain reads {read / 1e9:.1f} GB/s; weights, GB/s (share of that)")
    for name, layers in [*((layer.name, [layer]) for layer in LAYERS), ("model", list(LAYERS))]:
        cycle_bytes = sum(layer.num_outputs * layer.num_inputs * 2 for layer in layers)
        program = Program(library, isa, make_weights(library, layers, -(-COLD_BYTES // cycle_bytes)))
        line = f"  {name:8}"
        for num_rows in rows:
            speed = program.num_bytes / median(lambda: program.seconds(pool, num_rows), runs)  # noqa: B023
            line += f"   M={num_rows}: {speed / 1e9:5.1f} ({speed / read:.2f})"
        print(line)
        program.close()


def many_rows(library: Library, isa: Isa, pool: Pool, num_rows: int, runs: int) -> dict[tuple[int, int], float]:
    """Return the seconds of the best, ours or theirs, by (outputs, inputs)."""
    print(
        f"{pool.num_threads} threads, {num_rows} rows: TFLOP/s of ours; F.linear; prepacked oneDNN; ours to the better"
    )
    totals, best = [0.0] * 3, {}
    for layer in LAYERS:
        program = Program(library, isa, make_weights(library, [layer], TORCH_WEIGHTS))
        values = torch.randn(layer.num_outputs, layer.num_inputs)
        peers = [TorchLayers(layer, values, num_rows, is_prepacked=is_prepacked) for is_prepacked in (False, True)]
        measures = [lambda: program.seconds(pool, num_rows) / TORCH_WEIGHTS, *(peer.seconds for peer in peers)]  # noqa: B023
        times: list[list[float]] = [[], [], []]
        for run in range(runs + 1):
            for kept, measure in zip(times, measures, strict=True):
                # OpenMP's threads spin for a while after their work.
                time.sleep(0.02)
                seconds = measure()
                kept += [seconds] if run else []
        medians = [statistics.median(kept) for kept in times]
        totals = [total + seconds for total, seconds in zip(totals, medians, strict=True)]
        best[layer.num_outputs, layer.num_inputs] = min(medians)
        print_speeds(layer.name, 2 * num_rows * layer.num_outputs * layer.num_inputs, medians)
        program.close()
    print_speeds("model", sum(2 * num_rows * layer.num_outputs * layer.num_inputs for layer in LAYERS), totals)
    return best


def print_speeds(name: str, flops: int, seconds: list[float]) -> None:
    ours, *theirs = (flops / each / 1e12 for each in seconds)
    print(f"  {name:8}   {ours:5.2f}   {theirs[0]:5.2f}   {theirs[1]:5.2f}   {ours / max(theirs):5.2f}")


def make_weights(library: Library, layers: list[Layer], num_copies: int) -> list[tuple[Layer, PackedWeight]]:
    made = []
    for _ in range(num_copies):
        for layer in layers:
            values, is_gated = (
                torch.randn(layer.num_outputs, layer.num_inputs) * 0.02,
                layer.epilogue is Epilogue.SILU_MUL,
            )
            size = packed_bytes(library, Format.BF16, layer.num_outputs, layer.num_inputs, 0, is_gated)
            packed = pack_values(library, Format.BF16, values, is_gated=is_gated, target=mapped(size))
            made.append((layer, packed))
    return made


def mapped(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory in huge pages where the system has them, as packed weights lie."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def median(measure: Callable[[], float], runs: int) -> float:
    """Once for nothing, then the median."""
    measure()
    return statistics.median(measure() for _ in range(runs))


def read_bandwidth(cpus: list[int], runs: int) -> float:
    """Return bytes per second of plain reads from memory by a thread on each of these cores, the first one this thread's."""
    cc = compiler()
    if cc is None:
        raise SystemExit("no C compiler to measure reads with (set CXX, or install g++ or clang++)")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "read.so"
        source = Path(__file__).with_name("roofline_read.c")
        command = [cc, "-x", "c", "-O2", "-mavx2", "-shared", "-fPIC", "-pthread", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=60)
        function = ctypes.CDLL(str(target)).read_seconds
    function.restype, function.argtypes = (
        ctypes.c_double,
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_int)],
    )
    memory = mapped(COLD_BYTES)
    memory[:] = 1
    places = (ctypes.c_int * len(cpus))(*cpus)
    return COLD_BYTES / median(lambda: function(memory.ctypes.data, COLD_BYTES, len(cpus), places), runs)


if __name__ == "__main__":
    main()
