"""How much memory and how many cores this process may use, as kernel and container limits have it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = "max"
# cgroup v1 writes "no limit" as a page-rounded 2^63.
NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class _Budget:
    """What one limit grants."""

    limit_bytes: int
    free_bytes: int


def available_bytes(root: Path = Path("/"), *, fraction: float = 1.0) -> int:
    """Return the bytes that can be taken until `fraction` of memory is in use: the host's and every cgroup's, the least.

    1.0 goes as far as the host does not swap and no cgroup kills. `root` is for tests.
    """
    budgets = [_host(root), *(_cgroup(folder) for folder in _cgroups(root, "memory"))]
    free = [
        each.free_bytes - each.limit_bytes + int(each.limit_bytes * fraction) for each in budgets if each is not None
    ]
    return max(0, min(free, default=NO_LIMIT_BYTES))


def total_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process could ever have: the host's or a cgroup's limit, whichever is less."""
    budgets = [_host(root), *(_cgroup(folder) for folder in _cgroups(root, "memory"))]
    return min((each.limit_bytes for each in budgets if each is not None), default=NO_LIMIT_BYTES)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores of this process's affinity, less when a cgroup grants less time than that. At least 1."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups(root, "cpu"):
        # cgroup v1 writes "no limit" as -1.
        old = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        words = (_read(folder / "cpu.max") or old).split()
        if len(words) == 2 and words[0] != UNLIMITED and int(words[0]) > 0:
            cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(1, cores)


def _host(root: Path) -> _Budget | None:
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
    if "MemTotal:" not in sizes or "MemAvailable:" not in sizes:
        return None
    return _Budget(sizes["MemTotal:"], sizes["MemAvailable:"])


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The process's cgroup and its parents, for v2 and for the v1 controller."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        # A container often sees its own group mounted at the root, under a path of the host.
        parts = Path(path).parts[1:]
        folders += [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _cgroup(folder: Path) -> _Budget | None:
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if not limit or not used or limit == UNLIMITED or int(limit) >= NO_LIMIT_BYTES:
        return None
    # Page cache counts as used, but gives way.
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return _Budget(int(limit), int(limit) - int(used) + int(statistics.get("inactive_file", 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
