"""A child that is tied to its parent goes with it, also while it still imports."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pdmesh.parent import NOT_STARTED_CODE, tied_program

# Torch takes longer to import; an interpreter's start does not.
GONE_S = 1.0

SPAWNER = """
import subprocess, sys, time
from pdmesh.parent import tied_command
subprocess.Popen(tied_command("slow_import"))
print("spawned", flush=True)
time.sleep(60)
"""

SERVER = """
import asyncio
from pdmesh.config import EngineConfig
from pdmesh.engine.core_client import CoreClient

async def serve():
    config = EngineConfig(model="none-such", cpu_threads=1, connector=["shm"])
    print("spawned", flush=True)
    async with CoreClient(config, engine_id="test", epoch=1, on_progress=lambda stage, fraction: None):
        pass

asyncio.run(serve())
"""


def start(program: str, tmp_path: Path) -> "subprocess.Popen[str]":
    # Longer than the test waits, as a slow disk makes an import.
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(30)\n")
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "spawned\n"
    return process


def child_of(process: "subprocess.Popen[str]") -> psutil.Process:
    return wait_for(lambda: next(iter(psutil.Process(process.pid).children()), None), 20)


def wait_for(look: Callable[[], psutil.Process | None], timeout_s: float) -> psutil.Process:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if (found := look()) is not None:
            return found
        time.sleep(0.002)
    raise AssertionError("nothing was spawned")


@pytest.mark.parametrize("program", [SPAWNER, SERVER], ids=["any", "core"])
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_a_killed_parent_takes_its_importing_child_along(program: str, delay_s: float, tmp_path: Path) -> None:
    """Once, cores asked the kernel only after importing torch, and outlived a killed `pdmesh up` by 3 to 5 s."""
    with start(program, tmp_path) as parent:
        child = child_of(parent)
        time.sleep(delay_s)
        assert child.is_running()
        parent.kill()
    end_s = time.monotonic() + GONE_S
    while not has_ended(child):
        assert time.monotonic() < end_s, f"{child} has outlived its parent"
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    # Who inherits orphans need not hurry to bury them.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_parent_that_is_gone_before_the_kernel_is_asked_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "proof.py").write_text("print('ran')\n")
    command = [sys.executable, "-m", "pdmesh.parent", "1", "proof"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_a_program_is_run_as_it_would_be_without(tmp_path: Path) -> None:
    """In an environment of its own, with its descriptors, its process id and no signal ignored that was not before."""
    read_end, write_end = os.pipe()
    code = (
        "import os, sys; os.write(int(sys.argv[1]), b'told'); "
        "print(os.getpid(), os.environ.get('ONLY'), 'PATH' in os.environ)"
    )
    # Python itself ignores two signals, so a shell, which ignores none of its own, tells.
    shell = ["/bin/sh", "-c", "grep SigIgn /proc/$$/status"]
    told, plain = (
        subprocess.run(command, capture_output=True, text=True, timeout=20, env={}).stdout.split()
        for command in (tied_program(*shell), shell)
    )
    assert told == plain
    assert told[0] == "SigIgn:"
    process = subprocess.Popen(
        tied_program(sys.executable, "-c", code, str(write_end)),
        stdout=subprocess.PIPE, text=True, pass_fds=(write_end,), env={"ONLY": "this"},
    )  # fmt: skip
    with process:
        os.close(write_end)
        out, _ = process.communicate(timeout=20)
        assert os.read(read_end, 10) == b"told"
    os.close(read_end)
    assert out.split()[:3] == [str(process.pid), "this", "False"]


def test_a_program_that_cannot_be_run_says_so(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing-here")
    ended = subprocess.run(tied_program(path), capture_output=True, text=True, timeout=20, env={})
    assert (ended.returncode, ended.stdout) == (NOT_STARTED_CODE, "")
    assert ended.stderr == f"{path} could not be started: No such file or directory\n"


def test_the_module_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "echo_arguments.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    program = (
        "import subprocess; from pdmesh.parent import tied_command; "
        "subprocess.run(tied_command('echo_arguments', 'a', '7'))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert ended.stdout == "__main__ ['a', '7']\n"
