"""What lies in /dev/shm that tests of other processes, which run at the same time, do not answer for."""

import contextlib
import os
import re
from pathlib import Path

import psutil

FOLDER = "/dev/shm"
_MAPPED = re.compile(rf"{FOLDER}/(\S+)")


def files_of_nobody_else() -> frozenset[str]:
    """Return the names that no living process maps, but for this one and its children: theirs, and what the dead left."""
    names = set(os.listdir(FOLDER))
    me = psutil.Process()
    family = {me.pid, *(child.pid for child in me.children(recursive=True))}
    for process in psutil.pids():
        if process not in family:
            # It may have ended by now.
            with contextlib.suppress(OSError):
                names -= set(_MAPPED.findall(Path(f"/proc/{process}/maps").read_text()))
    return frozenset(names)
