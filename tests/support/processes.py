"""Looks at processes that may end at any moment."""

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether it still does something; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> str:
    """Its command line; empty when it has gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
