"""Time to name the blocks of a long prompt, by algorithm and block size; `python benchmarks/hashing.py`."""

import argparse
import time

import numpy as np

from pdmesh.engine.block_hash import BlockHasher, HashAlgorithm
from pdmesh.engine.block_key import block_keys

ALGORITHMS: tuple[HashAlgorithm, ...] = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def main() -> None:
    """Print the best and the median of several runs, and what one more block costs in decode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, options.vocabulary, options.tokens)
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, best/median of {options.runs} runs, ms")
    for block_size in (16, 32):
        for algorithm in ALGORITHMS:
            hasher = BlockHasher(algorithm, "benchmark", block_size)
            times = sorted(seconds(hasher, ids) for _ in range(options.runs))
            chain = [hasher.none_hash]
            start = time.perf_counter()
            for _ in range(1000):
                hasher.extend(chain, ids[:block_size])
            single_us = (time.perf_counter() - start) * 1e3
            print(
                f"block size {block_size:3}  {algorithm:12}  {times[0] * 1e3:6.1f} / {times[len(times) // 2] * 1e3:6.1f}"
                f"   one block {single_us:5.1f} us"
            )
        times = sorted(key_seconds(ids, block_size) for _ in range(options.runs))
        print(f"block size {block_size:3}  block_key     {times[0] * 1e3:6.1f} / {times[len(times) // 2] * 1e3:6.1f}")


def seconds(hasher: BlockHasher, ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> float:
    """Time one whole prompt."""
    start = time.perf_counter()
    hasher.extend([], ids)
    return time.perf_counter() - start


def key_seconds(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", block_size: int) -> float:
    """Time the keys that leave the engine, for comparison."""
    start = time.perf_counter()
    block_keys(ids, block_size, root=bytes(32))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
