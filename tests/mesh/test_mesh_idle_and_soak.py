"""Idle is free and nothing leaks (promises 3 and 8)."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(400)]


def family(running: Mesh) -> list[psutil.Process]:
    """All processes of the mesh: services, their cores, and their transports."""
    roots = [psutil.Process(service.process.pid) for service in running.services]
    return roots + [child for root in roots for child in root.children(recursive=True)]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Run time of all threads as the scheduler counts it; `cpu_times` ticks are too coarse for so little."""
    stats = [stat for process in processes for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


def share_of_a_core(processes: list[psutil.Process], window_s: float) -> float:
    before, start = cpu_seconds(processes), time.monotonic()
    time.sleep(window_s)
    return (cpu_seconds(processes) - before) / (time.monotonic() - start)


def private_bytes(processes: list[psutil.Process]) -> int:
    """Memory that is not the shared pools: those fill with cached blocks by design."""
    return sum(process.memory_info().rss - process.memory_info().shared for process in processes)


@pytest.mark.parametrize("connector", ["shm", "nixl"])
def test_an_idle_mesh_uses_under_one_percent_of_a_core(connector: str) -> None:
    # The proxy's own interval: `Mesh` makes it look for engines ten times as often.
    as_shipped = ("--pd-min-prompt-tokens", "0", "--resolve-interval-s", "2")
    with mesh(
        DEMO_MODEL, connector=connector, kvcache_flags=("--connector", connector), proxy_flags=as_shipped
    ) as running:
        running.complete("Warm up the path once before the rest.", max_tokens=4)
        running.wait_nothing_held()
        processes = family(running)
        # What else runs on the machine can only add to a window, so the least of three is the mesh's own.
        used = min(share_of_a_core(processes, window_s=10) for _ in range(3))
        assert used < 0.01, f"{used:.2%} of one core"


@pytest.mark.full
def test_sixteen_streams_for_two_minutes_leave_nothing_behind() -> None:
    with mesh(DEMO_MODEL, kvcache_flags=()) as running:
        rng = random.Random(0)

        def ask(number: int) -> None:
            prompt = [rng.randrange(1000, 40000) for _ in range(rng.choice((5, 40, 150)))]
            running.complete(prompt, max_tokens=16, ignore_eos=True)

        def run_for(seconds: float) -> int:
            end, count = time.monotonic() + seconds, 0
            with ThreadPoolExecutor(16) as pool:
                while time.monotonic() < end:
                    list(pool.map(ask, range(32)))
                    count += 32
            return count

        run_for(30)
        processes = family(running)
        num_done, held_bytes = 0, []
        for _ in range(4):
            num_done += run_for(30)
            running.wait_nothing_held()
            held_bytes.append(private_bytes(processes))
        assert num_done > 100
        # The allocator takes and returns tens of MiB of scratch between windows; a leak shows in the least of them too.
        grown = min(held_bytes[2:]) - min(held_bytes[:2])
        assert grown < 16 << 20, f"MiB held after each window: {[size >> 20 for size in held_bytes]}"
