"""The name of what a model computes: engines with equal ones compute the same keys and values from the same tokens."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum

from pdmesh.models.content_digest import content_digest
from pdmesh.models.kv_cache_dtype import KVCacheDtype
from pdmesh.models.model_config import ModelConfig
from pdmesh.models.weights import TensorRegion

# How far one may compute, not what.
IRRELEVANT_FIELDS = {"max_positions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """Two names of a loaded model, each 32 hex characters of SHA-256 over all of it; the files' names do not count."""

    model: str
    """Configuration, dtype, quantisation and weights: equal ones compute the same numbers."""
    weights: str
    """The same without the dtype: equal ones compute the same numbers but for rounding."""


def fingerprints(
    config: ModelConfig, regions: Iterable[TensorRegion], dtype: str, quantization: str = ""
) -> Fingerprints:
    """Name what is computed in `dtype`; `quantization` is what the engine does to the checkpoint's weights."""
    fields = {key: value for key, value in asdict(config).items() if key not in IRRELEVANT_FIELDS}
    content = content_digest(sorted(regions, key=lambda region: region.name))
    model, weights = (
        hashlib.sha256(json.dumps([fields, numbers, content], sort_keys=True, default=_plain).encode()).hexdigest()[:32]
        for numbers in (f"{dtype} {quantization}".rstrip(), f"any {quantization}".rstrip())
    )
    return Fingerprints(model=model, weights=weights)


def with_kv_cache(fingerprint: str, kv_cache_dtype: KVCacheDtype) -> str:
    """Return the name of the same model with keys and values kept that way: `fingerprint` itself where they are its own."""
    if kv_cache_dtype is KVCacheDtype.AUTO:
        return fingerprint
    return hashlib.sha256(f"{fingerprint} kv {kv_cache_dtype.value}".encode()).hexdigest()[:32]


def with_int8_activations(fingerprint: str) -> str:
    """Return the name of the same weights multiplied with activations in 8 bits."""
    return hashlib.sha256(f"{fingerprint} int8 activations".encode()).hexdigest()[:32]


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{value!r} has no place in a fingerprint")
