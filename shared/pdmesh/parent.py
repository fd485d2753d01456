"""Ties a process to the one that started it, so that a SIGKILL higher up leaves no orphan. Imports nothing heavy."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1

# Loaded at import: between fork and exec a child must not open libraries.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int = 0) -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it dies. Call first in a child.

    With `parent_pid`, end at once if the parent has died before the kernel was asked.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent_pid and os.getppid() != parent_pid:
        os._exit(1)
