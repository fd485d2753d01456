"""Which backend runs the model. Each is imported only when it is the one."""

import logging
from dataclasses import dataclass
from typing import Literal

from pdmesh.config import EngineConfig
from pdmesh.config.contradictions import needs_cpu_library
from pdmesh.engine.backend import Backend
from pdmesh.engine.compute_threads import resolve_threads
from pdmesh.errors import ConfigError
from pdmesh.models.kv_cache_dtype import KVCacheDtype
from pdmesh.models.source import read_config, resolve
from pdmesh_kernels.cpu.library import LibraryError, load
from pdmesh_kernels.cpu.limits import MAX_HEAD_DIM, TOKEN_TILE

log = logging.getLogger(__name__)

FallbackCause = Literal["", "no_library", "dtype", "block_size", "head_dim"]


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    backend: Backend
    fallback: FallbackCause = ""
    """Why PyTorch computes although nobody asked for it; empty: it is what was wanted."""


def make_backend(config: EngineConfig) -> ChosenBackend:
    """Make the backend that `--backend` names; `auto` is the CPU library where it can serve this model, else PyTorch, and a
    log line says why. Raises ConfigError.
    """
    if config.backend == "torch":
        return ChosenBackend(_torch(config))
    if config.backend == "auto":
        obstacle = _obstacle(config)
        if obstacle is not None:
            if needing := needs_cpu_library(config):
                raise ConfigError(f"{needing} needs the CPU library, which cannot serve: {obstacle.text}")
            log.warning(
                "backend auto: PyTorch computes, several times slower, since the CPU library cannot: %s", obstacle.text
            )
            return ChosenBackend(_torch(config), obstacle.cause)
    from pdmesh.engine.cpu_backend import CpuBackend

    threads = resolve_threads(config)
    return ChosenBackend(
        CpuBackend(
            threads.count,
            config.cpu_isa,
            quantization=config.quantization,
            kv_cache_dtype=KVCacheDtype(config.kv_cache_dtype),
            cores=threads.cores,
            niceness=threads.niceness,
        )
    )


@dataclass(frozen=True, slots=True)
class _Obstacle:
    cause: FallbackCause
    text: str


def _obstacle(config: EngineConfig) -> _Obstacle | None:
    """What keeps the CPU library from serving this model as configured. The first call may build the library."""
    if config.dtype == "float16":
        return _Obstacle("dtype", "dtype float16 is neither bfloat16 nor float32")
    if config.block_size % TOKEN_TILE:
        return _Obstacle("block_size", f"block-size {config.block_size} is not a multiple of {TOKEN_TILE}")
    head_dim = read_config(resolve(config.model))["head_dim"]
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return _Obstacle("head_dim", f"the model's head_dim {head_dim} is not an even number up to {MAX_HEAD_DIM}")
    try:
        load()
    except LibraryError as exc:
        return _Obstacle("no_library", str(exc))
    return None


def _torch(config: EngineConfig) -> Backend:
    from pdmesh.engine.torch_backend import TorchBackend

    threads = resolve_threads(config)
    return TorchBackend(threads.count, cores=threads.cores, niceness=threads.niceness)
