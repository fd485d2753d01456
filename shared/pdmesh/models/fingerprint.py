"""The name of what a model computes: engines with equal ones compute the same keys and values from the same tokens."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from pdmesh.models.kv_cache_dtype import KVCacheDtype
from pdmesh.models.model_config import ModelConfig
from pdmesh.models.weights import TensorRegion

# Tensors up to this size are hashed whole, larger ones by evenly spaced samples, first and last bytes included.
WHOLE_BYTES = 64 << 10
NUM_SAMPLES = 16
SAMPLE_BYTES = 4 << 10
# How far one may compute, not what.
IRRELEVANT_FIELDS = {"max_positions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Two names of a loaded model, each 32 hex characters of SHA-256; the files' names do not count."""

    model: str
    """Configuration, dtype, quantisation and weights: equal ones compute the same numbers."""
    weights: str
    """The same without the dtype: equal ones compute the same numbers but for rounding."""


def fingerprints(
    config: ModelConfig, regions: Iterable[TensorRegion], dtype: str, quantization: str = ""
) -> Fingerprints:
    """Name what is computed in `dtype`; `quantization` is what the engine does to the checkpoint's weights."""
    fields = {key: value for key, value in asdict(config).items() if key not in IRRELEVANT_FIELDS}
    digests = [
        hashlib.sha256(json.dumps([fields, numbers], sort_keys=True, default=_plain).encode())
        for numbers in (f"{dtype} {quantization}".rstrip(), f"any {quantization}".rstrip())
    ]
    files: dict[Path, BinaryIO] = {}
    try:
        for region in sorted(regions, key=lambda region: region.name):
            parts = [json.dumps([region.name, region.encoding, region.shape, region.num_bytes]).encode()]
            if region.path not in files:
                files[region.path] = region.path.open("rb")
            for offset, num_bytes in _samples(region.num_bytes):
                files[region.path].seek(region.offset + offset)
                parts.append(files[region.path].read(num_bytes))
            for digest in digests:
                for part in parts:
                    digest.update(part)
    finally:
        for file in files.values():
            file.close()
    model, weights = (digest.hexdigest()[:32] for digest in digests)
    return Fingerprints(model=model, weights=weights)


def with_kv_cache(fingerprint: str, kv_cache_dtype: KVCacheDtype) -> str:
    """Return the name of the same model with keys and values kept that way: `fingerprint` itself where they are its own."""
    if kv_cache_dtype is KVCacheDtype.AUTO:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} kv {kv_cache_dtype.value}".encode()).hexdigest()[:32]


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    if num_bytes <= WHOLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - SAMPLE_BYTES
    return [(last * index // (NUM_SAMPLES - 1), SAMPLE_BYTES) for index in range(NUM_SAMPLES)]


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{value!r} has no place in a fingerprint")
