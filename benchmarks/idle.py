"""Measures what a mesh at rest costs: the share of one core and the wake-ups per second of each process, from /proc (Linux).

    pdmesh up &
    python benchmarks/idle.py $!

takes the processes that are named and all their descendants. The cost of one wake-up depends on the machine and on what else
runs there, so the least of several windows counts. Exit code 1 when the sum is over the target, 1 % of one core.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TARGET = 0.01


@dataclass(frozen=True, kw_only=True)
class Use:
    """What one process has used so far, or within a window."""

    run_s: float = 0.0
    wake_ups: int = 0


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, parents first."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(each for child in children for each in descendants(child))]


def used_by(pid: int) -> Use:
    """Run time as the scheduler counts it, and how often a thread has gone to sleep; ticks would be too coarse."""
    run_ns = wake_ups = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        run_ns += int((task / "schedstat").read_text().split()[0])
        status = (task / "status").read_text()
        wake_ups += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return Use(run_s=run_ns / 1e9, wake_ups=wake_ups)


def measure(pids: list[int], window_s: float) -> dict[int, Use]:
    """What each process uses within a window."""
    before = {pid: used_by(pid) for pid in pids}
    time.sleep(window_s)
    after = {pid: used_by(pid) for pid in pids}
    return {
        pid: Use(run_s=after[pid].run_s - use.run_s, wake_ups=after[pid].wake_ups - use.wake_ups)
        for pid, use in before.items()
    }


def name_of(pid: int) -> str:
    """The module of ours that a process runs, or its program."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    modules = [word for word in words if word.startswith("pdmesh") and word != "pdmesh.parent"]
    return modules[0] if modules else Path(words[0]).name


def total(uses: dict[int, Use]) -> Use:
    """The sum over all processes."""
    return Use(run_s=sum(use.run_s for use in uses.values()), wake_ups=sum(use.wake_ups for use in uses.values()))


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; exit code 1 when the mesh takes more than the target, 2 when a process is gone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pids", nargs="+", type=int, metavar="PID", help="processes; their descendants count too")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of one window")
    parser.add_argument("--windows", type=int, default=3)
    options = parser.parse_args(argv)
    try:
        pids = list(dict.fromkeys(each for pid in options.pids for each in descendants(pid)))
        windows = [measure(pids, options.window) for _ in range(options.windows)]
        names = {pid: name_of(pid) for pid in pids}
    except OSError as exc:
        parser.error(f"a process cannot be read: {exc}")
    least = min(windows, key=lambda uses: total(uses).run_s)
    rows = [(f"{names[pid]} ({pid})", use) for pid, use in least.items()]
    for name, use in [*rows, ("total", total(least))]:
        share, wake_ups = use.run_s / options.window, use.wake_ups / options.window
        print(f"{name:<44} {share:>8.3%} of a core {wake_ups:>7.1f} wake-ups/s")
    share = total(least).run_s / options.window
    print(f"target: under {TARGET:.0%}, {'met' if share < TARGET else 'missed'}")
    return 0 if share < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
