"""The folder of packed weights: whose it is, who writes in it, and what leaves it when it grows.

Locks are flocks, which end with their process however it ends: exclusive on `<name>.lock` while a file is written, shared on the
file itself while it is in use.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pdmesh_kernels.cpu.library import cache_folder, is_ours

SUFFIX = ".weights"
MAX_UNUSED_S = 30 * 24 * 3600.0
MAX_FOLDER_BYTES = 128 << 30
"""Past it, what was used longest ago goes."""
PACKING_TIMEOUT_S = 1800.0
"""For another process that packs the same weights."""

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_SIGN_OF_LIFE_S = 10.0
# Between a temporary file's creation and its lock nobody may take it for abandoned.
_TEMPORARY_GRACE_S = 60.0


def weight_path(key: str) -> Path | None:
    """Return where the weights named by `key` (model fingerprint, format, interface version) are kept; None without a home."""
    try:
        folder = cache_folder()
    except OSError as exc:
        logger.warning("weights cache: none: %s", exc)
        return None
    return folder / "weights" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}{SUFFIX}"


@contextlib.contextmanager
def creating(path: Path, on_wait: Callable[[], None]) -> Iterator[tuple[Path, OSError | None]]:
    """Be the only process that writes `path`: yields where to write it first, or why it can't be written. May wait, and
    calls `on_wait` from time to time then."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        descriptor = _lock(path, on_wait)
        # The lock is ours: whoever wrote these is dead.
        for abandoned in path.parent.glob(f"{path.stem}.*.tmp"):
            abandoned.unlink(missing_ok=True)
    except OSError as exc:
        yield temporary, exc
        return
    try:
        yield temporary, None
    finally:
        os.close(descriptor)


def hold(descriptor: int) -> bool:
    """Mark an open file as in use, until the last copy of the descriptor is closed. False when it is being removed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unchanged(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        return False


def remove_if_unchanged(path: Path, descriptor: int) -> None:
    """Unlink `path` unless another process has put a new file there."""
    if is_unchanged(path, descriptor):
        with contextlib.suppress(OSError):
            path.unlink()


def make_room(path: Path, num_bytes: int) -> None:
    """Before `path` is written: remove other weights that nobody has open, the longest unused first, while they are too old or
    together with `num_bytes` more are too many for the folder or its disk.
    """
    weights, now_s = [], time.time()
    for other in path.parent.iterdir():
        with contextlib.suppress(OSError):
            status = other.stat()
            if other.suffix == SUFFIX and other != path:
                # A use is noted in the time of access.
                weights.append((max(status.st_atime, status.st_mtime), status.st_size, other))
            if other.suffix == ".tmp" and now_s - status.st_mtime > _TEMPORARY_GRACE_S:
                _remove_unused(other)
    kept_bytes = sum(size for _, size, _ in weights)
    # Where even an empty folder would not do, the others stay.
    can_fit = num_bytes <= shutil.disk_usage(path.parent).free + kept_bytes
    for used_at, size, other in sorted(weights):
        is_crowded = kept_bytes + num_bytes > MAX_FOLDER_BYTES or shutil.disk_usage(path.parent).free < num_bytes
        if now_s - used_at > MAX_UNUSED_S or (is_crowded and can_fit):
            if not _remove_unused(other):
                continue
            _remove_unused(other.with_suffix(".lock"))
            logger.info("weights cache: removed %s (%.0f MB, unused for %.0f s)", other, size / 1e6, now_s - used_at)
            kept_bytes -= size


def _remove_unused(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _lock(path: Path, on_wait: Callable[[], None]) -> int:
    """Return the descriptor of the writer's lock. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(path.parent.stat()):
        raise PermissionError(f"{path.parent} belongs to, or can be written by, another user")
    deadline_s, lock = time.monotonic() + PACKING_TIMEOUT_S, path.with_suffix(".lock")
    has_waited, sign_at_s = False, 0.0
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # flock knows no timeout, so it is asked again and again.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_unchanged(lock, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                os.close(descriptor)
                raise TimeoutError(f"another process has been packing it for {PACKING_TIMEOUT_S:.0f} s") from None
            if not has_waited:
                logger.info("weights cache: waiting for the process that packs %s", path)
            has_waited = True
            if time.monotonic() >= sign_at_s:
                on_wait()
                sign_at_s = time.monotonic() + _SIGN_OF_LIFE_S
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_POLL_S)
