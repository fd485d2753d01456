"""A disk that takes nothing more: engines are announced late and logs are lost, but nothing ends that should run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdmesh.config import load_config
from pdmesh.supervisor import keeper as keeper_module
from pdmesh.supervisor import mesh as mesh_module
from pdmesh.supervisor.child import NOT_STARTED_CODE, Child
from pdmesh.supervisor.config import UpConfig
from pdmesh.supervisor.keeper import Keeper, KeeperState
from pdmesh.supervisor.mesh import Mesh
from pdmesh.supervisor.plan import ChildSpec, Plan
from pdmesh.supervisor.ports import Ports
from pdmesh.supervisor.roles import Role
from pdmesh.supervisor.runtime import RuntimeFolder
from support.awaiting import until

READY = "import os, sys, json, time; os.write(int(sys.argv[-1]), json.dumps({'ready': True, 'grpc_port': 7}).encode() + b'\\n')\n"
RUN = READY + "time.sleep(600)\n"
CRASH_ONCE = "p = pathlib.Path({flag!r}); first = not p.exists(); p.touch()\nif first: os._exit(7)\n"


def spec(code: str, name: str = "decode-1") -> ChildSpec:
    return ChildSpec(name=name, role=Role.DECODE, argv=(sys.executable, "-c", code), env=dict(os.environ))


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeFolder:
    return RuntimeFolder.open(str(tmp_path), 8000, "")


@pytest.fixture
def news() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.05)
    monkeypatch.setattr(keeper_module, "MAX_BACKOFF_S", 0.1)
    monkeypatch.setattr(mesh_module, "ANNOUNCE_RETRY_S", 0.05)


def make_mesh(runtime: RuntimeFolder, news: list[str]) -> Mesh:
    config = load_config(UpConfig, ["--aggregated", "--no-kvcache", "--port", str(free_port())], prog="t", environ={})
    with contextlib.closing(Ports()) as ports:
        plan = Plan(config, runtime, os.environ, ports, context=8192)
    mesh = Mesh(config, plan, runtime, changed=lambda: None, report=news.append)
    mesh._started = True
    return mesh


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_engine_is_announced_as_soon_as_there_is_room(
    runtime: RuntimeFolder, news: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the engine's keeper: it was never announced, and a later drain stopped midway."""

    async def go() -> None:
        mesh = make_mesh(runtime, news)
        with monkeypatch.context() as full:
            full.setattr(os, "replace", no_space)
            keeper = mesh._add(spec(RUN))
            await until(lambda: keeper.state is KeeperState.READY, timeout_s=20)
            await asyncio.sleep(0.3)
        await until(lambda: runtime.endpoints(Role.DECODE).exists(), timeout_s=20)
        await until(lambda: runtime.endpoints(Role.DECODE).read_text() == "127.0.0.1:7\n", timeout_s=20)
        assert not list(runtime.path.glob("*.new"))
        await mesh.drain()
        assert keeper.state is KeeperState.STOPPED

    asyncio.run(go())
    assert len(news) == 2, news
    assert "trying again" in news[0]
    assert "No space left" in news[0]


def test_mesh_drains_while_the_disk_is_full(
    runtime: RuntimeFolder, news: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        mesh = make_mesh(runtime, news)
        keepers = [mesh._add(spec(RUN, f"decode-{number}")) for number in (1, 2)]
        await until(lambda: all(keeper.state is KeeperState.READY for keeper in keepers), timeout_s=20)
        monkeypatch.setattr(os, "replace", no_space)
        pids = [keeper.child.pid for keeper in keepers if keeper.child is not None]
        await mesh.drain()
        assert [keeper.state for keeper in keepers] == [KeeperState.STOPPED] * 2
        assert not any(psutil.pid_exists(pid) for pid in pids)

    asyncio.run(go())


def test_drain_stops_the_others_when_a_keeper_is_dead(runtime: RuntimeFolder, news: list[str]) -> None:
    async def go() -> None:
        mesh = make_mesh(runtime, news)
        broken, other = (mesh._add(spec(RUN, f"decode-{number}")) for number in (1, 2))
        await until(lambda: broken.state is other.state is KeeperState.READY, timeout_s=20)
        assert broken._task is not None
        broken._task.cancel()
        await until(lambda: broken.gone, timeout_s=20)
        await mesh.drain()
        assert other.state is KeeperState.STOPPED

    asyncio.run(go())


def test_keeper_outlives_an_error_of_its_own(runtime: RuntimeFolder, news: list[str]) -> None:
    async def go() -> None:
        failures = iter([True])

        def changed() -> None:
            if keeper.child is not None and next(failures, False):
                raise RuntimeError("a fault of ours")

        keeper = Keeper(spec(RUN), runtime, changed=changed, report=news.append)
        keeper.start()
        await asyncio.wait_for(keeper.until_ready(), 20)
        await keeper.stop(5)

    asyncio.run(go())
    assert len(news) == 1
    assert "RuntimeError: a fault of ours" in news[0]


def test_child_whose_log_cannot_be_opened_runs_without(tmp_path: Path, news: list[str]) -> None:
    async def go() -> None:
        # Nobody, not even root, can open a file in a folder that is not there.
        runtime = RuntimeFolder(tmp_path, tmp_path / "gone")
        code = READY + "import pathlib\n" + CRASH_ONCE.format(flag=str(tmp_path / "flag")) + "time.sleep(600)\n"
        keeper = Keeper(spec(code), runtime, changed=lambda: None, report=news.append)
        keeper.start()
        await until(lambda: keeper.restarts == 1 and keeper.state is KeeperState.READY, timeout_s=20)
        await keeper.stop(5)

    asyncio.run(go())
    assert [line for line in news if "runs without its log" in line] == news[:1]


def test_process_that_cannot_be_started_is_told_as_such(tmp_path: Path) -> None:
    async def go() -> None:
        lost = ChildSpec(name="decode-1", role=Role.DECODE, argv=(str(tmp_path / "no-such-program"),), env={})
        child = Child(lost, tmp_path / "log", lambda: None)
        assert await child.live() == NOT_STARTED_CODE
        assert "no-such-program" in child.last_lines(1)[0]

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(go())
    assert len(os.listdir("/proc/self/fd")) == before


def test_log_is_emptied_even_if_it_cannot_be_kept(runtime: RuntimeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error reached the supervisor's main and ended the whole mesh."""
    monkeypatch.setattr("pdmesh.supervisor.runtime.MAX_LOG_BYTES", 10)
    for name in ("proxy", "decode-1"):
        runtime.log_path(name).write_text("a line that is too long")
    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", no_space)
        problems = runtime.rotate_logs(["proxy", "decode-1"])
    assert len(problems) == 2
    assert "No space left" in problems[0]
    assert all(runtime.log_path(name).stat().st_size == 0 for name in ("proxy", "decode-1"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.mesh
def test_full_tmpfs_delays_the_announcement_only(
    small_disk: Path, news: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.supervisor.runtime.MAX_LOG_BYTES", 1 << 10)

    async def go() -> None:
        runtime = RuntimeFolder.open(str(small_disk), 8000, "")
        mesh = make_mesh(runtime, news)
        mesh._announce()
        filler = small_disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(b"x" * (1 << 20))
        keeper = mesh._add(spec(RUN))
        await until(lambda: keeper.state is KeeperState.READY, timeout_s=20)
        await until(lambda: bool(news), timeout_s=20)
        assert runtime.endpoints(Role.DECODE).read_text() == ""
        long = runtime.log_path("proxy")
        filler.rename(long)
        assert len(runtime.rotate_logs(["proxy"])) == 1
        assert long.stat().st_size == 0
        await until(lambda: runtime.endpoints(Role.DECODE).read_text() == "127.0.0.1:7\n", timeout_s=20)
        await mesh.drain()
        assert keeper.state is KeeperState.STOPPED

    asyncio.run(go())
