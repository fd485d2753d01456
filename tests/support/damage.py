"""Turns bits in the memory of an engine's KV pool, as failing memory would: through the kernel's view of its descriptors."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import numpy as np

from pdmesh.connector.pool import PoolShape
from support.mesh import Service

# The byte with the sign of some float32 numbers.
SIGNS = slice(3, None, 64)


def damage_pool(engine: Service) -> int:
    """Turn the signs of numbers in all blocks that are not empty; returns how many blocks those are."""
    shape = _shape(engine)
    with _pool_file(engine.process.pid).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), shape.total_bytes)
    blocks = np.frombuffer(memory, dtype=np.uint8, offset=shape.header_bytes).reshape(-1, shape.block_bytes)
    used = blocks.any(axis=1)
    blocks[used, SIGNS] ^= 0x80
    return int(used.sum())


def _shape(engine: Service) -> PoolShape:
    facts = next(key for key in engine.metrics() if key.startswith("vllm:cache_config_info"))
    labels = dict(re.findall(r'(\w+)="([^"]*)"', facts))
    return PoolShape(num_blocks=int(labels["num_gpu_blocks"]), block_bytes=int(labels["block_bytes"]))


def _pool_file(pid: int) -> Path:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        try:
            target = os.readlink(path)
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:pdmesh-") and "staging" not in target and "grave" not in target:
            return path
    raise AssertionError(f"process {pid} has no KV pool")
