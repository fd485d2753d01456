"""Clocks that are wrong for one service and right for all others.

The monotonic one and that since boot by a time namespace, the wall clock by libfaketime.
"""

from __future__ import annotations

import os
from pathlib import Path

SKEW_S = 60
LIBRARY = "faketime/libfaketimeMT.so.1"
FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
"""Where distributions have it, or below in a folder named after the architecture."""


def library() -> Path | None:
    """The library that shifts the wall clock of a process; None where it is not installed."""
    found = (path for folder in FOLDERS for pattern in (LIBRARY, f"*/{LIBRARY}") for path in Path(folder).glob(pattern))
    return next(found, None)


def obstacle() -> str:
    """Why no clock can be skewed here; empty when it can."""
    if os.geteuid() != 0:
        return "a time namespace cannot be made here (needs root)"
    return "" if library() else "the wall clock cannot be skewed here (needs libfaketime; Debian: faketime)"


def skewed(wall_s: int) -> tuple[str, ...]:
    """A command that executes another: the monotonic clock and that since boot are SKEW_S ahead, the wall clock `wall_s`."""
    preloaded = ":".join(filter(None, (str(library()), os.environ.get("LD_PRELOAD", ""))))
    # What a file system says of its files is true all the same.
    wall = (f"LD_PRELOAD={preloaded}", f"FAKETIME={wall_s:+d}", "DONT_FAKE_MONOTONIC=1", "NO_FAKE_STAT=1")
    return ("unshare", "--time", "--monotonic", str(SKEW_S), "--boottime", str(SKEW_S), "env", *wall)
