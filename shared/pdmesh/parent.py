"""Ties a process to the one that started it, so that a SIGKILL higher up leaves no orphan. Imports nothing heavy.

`python -m pdmesh.parent PARENT_PID MODULE ARGUMENT…` runs a module that is tied already while it imports: seconds, for torch.
With `--exec PATH` in the place of the module another program takes the process over, and stays tied; this file is run by its
path then, whatever the program's environment. A `preexec_fn` would leave no gap at all, but is unsafe in a process with
threads, as a Valkey that was started beside gRPC's showed; here the gap is the interpreter's start, after which a parent that
has gone meanwhile is noticed.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
EXEC = "--exec"
NOT_STARTED_CODE = 127
"""Exit code where the program cannot be run, as of a shell."""
# The interpreter ignores these, which a program would inherit.
IGNORED_HERE = (signal.SIGPIPE, signal.SIGXFSZ)

# Loaded at import: between fork and exec a child must not open libraries.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int = 0) -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it dies. Call first in a child.

    With `parent_pid`, end at once if the parent has died before the kernel was asked.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid and os.getppid() != parent_pid:
        os._exit(1)


def tied_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a Python module as a child of this process which dies with it."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def tied_program(path: str, *arguments: str) -> list[str]:
    """Return the command that runs any program as a child of this process which dies with it."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), EXEC, path, *arguments]


def _exec(argv: list[str]) -> None:
    for number in IGNORED_HERE:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(argv[0], argv)
    except OSError as exc:
        sys.stderr.write(f"{argv[0]} could not be started: {exc.strerror}\n")
        sys.exit(NOT_STARTED_CODE)


def _main() -> None:
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2] == EXEC:
        _exec(sys.argv[3:])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
