"""How much memory and how many cores this process may use, as kernel and container limits have it."""

import math
import os
from pathlib import Path

UNLIMITED = "max"
# cgroup v1 writes "no limit" as a page-rounded 2^63.
NO_LIMIT_BYTES = 1 << 60


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken before the host swaps or a cgroup kills. `root` is for tests."""
    host = _meminfo(root)
    free = [_limit_bytes(folder) for folder in _cgroups(root, "memory")]
    return max(0, min([host, *(left for left in free if left is not None)]))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores of this process's affinity, less when a cgroup grants less time than that. At least 1."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != UNLIMITED:
            cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(1, cores)


def _meminfo(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return NO_LIMIT_BYTES


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


def _limit_bytes(folder: Path) -> int | None:
    limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    if not limit or not used or limit == UNLIMITED or int(limit) >= NO_LIMIT_BYTES:
        return None
    # Page cache counts as used, but gives way.
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(limit) - int(used) + int(statistics.get("inactive_file", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
