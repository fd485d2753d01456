"""Memory and cores as containers grant them, from copies of the kernel's files."""

import os
from pathlib import Path

import pytest

from pdmesh.engine.host_memory import NO_LIMIT_BYTES, available_bytes, total_bytes, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HOST = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n", "proc/self/cgroup": "0::/pod/engine\n"}


def test_without_limits_it_is_what_the_host_has(tmp_path: Path) -> None:
    root = write(tmp_path, HOST | {"sys/fs/cgroup/pod/memory.max": "max\n", "sys/fs/cgroup/pod/memory.current": "5\n"})
    assert available_bytes(root) == 1000 * 1024


def test_the_tightest_group_above_counts_and_page_cache_gives_way(tmp_path: Path) -> None:
    limits = {
        "sys/fs/cgroup/pod/memory.max": "500000\n",
        "sys/fs/cgroup/pod/memory.current": "200000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 50000\n",
        "sys/fs/cgroup/pod/engine/memory.max": "400000\n",
        "sys/fs/cgroup/pod/engine/memory.current": "10000\n",
    }
    assert available_bytes(write(tmp_path, HOST | limits)) == 350000


def test_all_there_is_is_the_tightest_limit(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/pod/memory.max": "5000\n", "sys/fs/cgroup/pod/memory.current": "4000\n"}
    assert total_bytes(write(tmp_path / "group", HOST | limits)) == 5000
    assert total_bytes(write(tmp_path / "host", HOST)) == 9 * 1024
    assert total_bytes(tmp_path) == NO_LIMIT_BYTES


def test_a_fraction_is_of_all_memory_and_counts_what_is_in_use(tmp_path: Path) -> None:
    root = write(
        tmp_path, {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 1000 kB\n", "proc/self/cgroup": "0::/pod\n"}
    )
    assert available_bytes(root, fraction=0.9) == 600 * 1024
    assert available_bytes(root, fraction=0.5) == 0
    write(root, {"sys/fs/cgroup/pod/memory.max": "1000000", "sys/fs/cgroup/pod/memory.current": "600000"})
    assert available_bytes(root, fraction=0.9) == 300000


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/memory.max": "300000", "sys/fs/cgroup/memory.current": "100000"}
    assert available_bytes(write(tmp_path, HOST | limits)) == 200000


def test_cgroup_v1(tmp_path: Path) -> None:
    files = HOST | {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "70000",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "60000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert available_bytes(write(tmp_path, files)) == 10000


def test_here_it_is_less_than_all_memory() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_bytes() < total


def test_a_quota_of_time_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    root = write(tmp_path, HOST | {"sys/fs/cgroup/pod/engine/cpu.max": "150000 100000\n"})
    assert usable_cores(root) == 2
    (root / "sys/fs/cgroup/pod/engine/cpu.max").write_text("max 100000\n")
    assert usable_cores(root) == 8
    # What the pod has, its containers share.
    (root / "sys/fs/cgroup/pod/cpu.max").write_text("300000 100000\n")
    assert usable_cores(root) == 3
    (root / "sys/fs/cgroup/pod/engine/cpu.max").write_text("5000 100000\n")
    assert usable_cores(root) == 1


def test_a_quota_of_time_in_cgroup_v1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    group = "sys/fs/cgroup/cpu/x"
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/box\n", f"{group}/cpu.cfs_period_us": "50000\n"}
    root = write(tmp_path, HOST | files | {f"{group}/cpu.cfs_quota_us": "200000\n"})
    assert usable_cores(root) == 4
    (root / group / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(root) == 8
