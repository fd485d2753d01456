"""The threads that compute steps: how many, on which cores, and how readily they give way to others.

Only these are placed. The core's own loop and the server process have little to do, and at once.
"""

import contextlib
import os
from dataclasses import dataclass

from pdmesh.config import EngineConfig
from pdmesh.config.cores import format_cores, parse_cores
from pdmesh.engine.host_memory import usable_cores
from pdmesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one thread runs."""

    cores: tuple[int, ...] = ()
    """Any of these; empty: wherever its process may."""
    niceness: int = 0
    """Added to the process's."""

    def take(self) -> None:
        """Put the calling thread there; threads that it starts inherit it."""
        # A core that has gone since the start: the thread runs anywhere, as the library's do.
        with contextlib.suppress(OSError):
            if self.cores:
                os.sched_setaffinity(0, self.cores)
        # On Linux that is the thread's alone.
        os.nice(self.niceness)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeThreads:
    count: int
    cores: tuple[int, ...]
    """One for each thread; empty: wherever the kernel puts them."""
    niceness: int


def resolve_threads(config: EngineConfig) -> ComputeThreads:
    """Return the threads that a configuration asks for on this machine. Raises ConfigError for cores that it may not use."""
    cores, usable = parse_cores(config.cpu_cores), os.sched_getaffinity(0)
    if forbidden := set(cores) - usable:
        raise ConfigError(
            f"cpu-cores {config.cpu_cores}: core {min(forbidden)} is not one that this process may use; "
            f"these are {format_cores(usable)}"
        )
    count = config.cpu_threads or len(cores) or usable_cores()
    return ComputeThreads(count=count, cores=cores[:count], niceness=config.cpu_nice)
