"""Backends by name. Each is imported only when it is asked for."""

from pdmesh.engine.backend import Backend
from pdmesh.errors import ConfigError

NAMES = ("auto", "cpu", "torch")


def make_backend(name: str, cpu_threads: int) -> Backend:
    """Make the backend that `--backend` names; `auto` is the best one that this machine has.

    `cpu_threads` 0 takes every core the process may use. Raises ConfigError for an unknown name.
    """
    if name == "cpu":
        from pdmesh.engine.cpu_backend import CpuBackend

        return CpuBackend(cpu_threads)
    if name in ("auto", "torch"):
        from pdmesh.engine.torch_backend import TorchBackend

        return TorchBackend(cpu_threads)
    raise ConfigError(f"backend: {name!r} is unknown; use one of {', '.join(NAMES)}")
