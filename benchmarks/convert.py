"""What it costs to convert KV from one engine's layout to another's, in memory, on one core: run it with OMP_NUM_THREADS=1."""

import argparse
import time
from dataclasses import replace

import numpy as np

from pdmesh.engine.conversion import PIECE_BYTES
from pdmesh.models.kv_convert import convert, pack
from pdmesh.models.kv_items import convert_items
from pdmesh.protocol.layout import CPU_PACKING, PACKING, Layout
from pdmesh_kernels.cpu.kv_layout import KVItems

SMOLLM2 = Layout(
    layers=tuple(range(30)), window=None, num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32", block_size=32
)
# (packing, dtype, block size) of the source and of the target.
PAIRS = (
    ((PACKING, "float32", 16), (PACKING, "float32", 32)),
    ((PACKING, "float32", 16), (CPU_PACKING, "float32", 32)),
    ((PACKING, "float32", 16), (CPU_PACKING, "bfloat16", 32)),
    ((CPU_PACKING, "bfloat16", 32), (CPU_PACKING, "bfloat16", 64)),
    ((CPU_PACKING, "bfloat16", 32), (CPU_PACKING, "int8", 32)),
    ((CPU_PACKING, "int8", 32), (CPU_PACKING, "bfloat16", 32)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="of which the fastest is shown")
    runs = parser.parse_args().runs
    print("| source | target | MB/s | µs per token | ms per piece |\n|---|---|---|---|---|")
    for source, target in PAIRS:
        one, other = (
            replace(SMOLLM2, packing=packing, dtype=dtype, block_size=size) for packing, dtype, size in (source, target)
        )
        num_blocks = max(1, PIECE_BYTES // one.block_bytes)
        floats = np.random.default_rng(0).standard_normal((num_blocks, *one.block_shape)).astype(np.float32)
        blocks = pack(convert_items(KVItems(items=floats, scales=None), "float32", one.dtype), one)
        seconds = [_timed(blocks, one, other) for _ in range(runs + 1)][1:]
        least_s = min(seconds)
        per_token_us = least_s / (num_blocks * one.block_size) * 1e6
        shown = (" ".join((_short(packing), dtype, str(size))) for packing, dtype, size in (source, target))
        speed = f"{blocks.nbytes / least_s / 1e6:.0f} | {per_token_us:.0f} | {least_s * 1e3:.1f}"
        print(f"| {' | '.join(shown)} | {speed} |")


def _timed(blocks: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", source: Layout, target: Layout) -> float:
    begun_s = time.perf_counter()
    convert(blocks, source, target)
    return time.perf_counter() - begun_s


def _short(packing: str) -> str:
    return "cpu" if packing == CPU_PACKING else "torch"


if __name__ == "__main__":
    main()
