"""The directory of one owner's files: it says who the owner is and, by a lock, that it lives; one that is removed is made anew.

What an owner that was killed left is swept when the same engine starts again.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
from pathlib import Path

from pdmesh.connector.file_format import OWNER_FILE

log = logging.getLogger(__name__)

PROOF_BYTES = 32


class OwnerDirectory:
    """A directory of this process's own, from `__init__` to `remove`. Its methods wait for the file system."""

    def __init__(self, path: Path) -> None:
        """Make it. Raises OSError when that cannot be."""
        self.path = path
        self.proof = secrets.token_bytes(PROOF_BYTES)
        """What the owner's file holds."""
        path.mkdir(mode=0o700)
        try:
            self._lock_fd = self._claim()
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def restore(self) -> bool:
        """Make it anew when somebody has removed it; whether that was so. Its files are lost then. Raises OSError."""
        if self._is_there():
            return False
        self.path.mkdir(mode=0o700, exist_ok=True)
        former, self._lock_fd = self._lock_fd, self._claim()
        os.close(former)
        return True

    def remove(self) -> None:
        """Take it away with all that is in it."""
        # Locked until it is gone: to others it is in use.
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)

    def _claim(self) -> int:
        """Write and lock the owner's file; returns what holds the lock."""
        fd = os.open(self.path / OWNER_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd)
            os.pwrite(fd, self.proof, 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _is_there(self) -> bool:
        try:
            found, own = os.stat(self.path / OWNER_FILE), os.fstat(self._lock_fd)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ESTALE):
                return False
            raise
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def sweep(own: Path) -> None:
    """Remove what earlier starts of the same engine left beside its directory, unless one of them still runs."""
    engine_id = own.name.rpartition("@")[0]
    for entry in own.parent.iterdir():
        if entry != own and entry.name.rpartition("@")[0] == engine_id and _is_left(entry):
            log.info("removing %s, which an earlier start of this engine left", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _is_left(directory: Path) -> bool:
    """Whether nobody holds the lock of an owner's directory."""
    try:
        fd = os.open(directory / OWNER_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: an engine id is one engine's, so it is an earlier start's.
        return True
    finally:
        os.close(fd)
    return True


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        log.info("the directory of connector file has no locks (%s)", exc.strerror)
