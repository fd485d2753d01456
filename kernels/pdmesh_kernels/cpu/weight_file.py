"""Packed weights as one file that all services of a host map: packed once, then opened in milliseconds and shared in memory.

A file is a header, a JSON index and, from a page's start on, the weights' panels. It appears under its name only when whole.
Until it is known to be on disk, it counts for the boot that wrote it alone: a crash of the machine may lose pages of it. What
is opened is summed, and compared: disks and whoever writes into the file change weights silently, and tokens with them.
Where a cache folder cannot be used, the same interface holds private memory.
"""

import contextlib
import hashlib
import logging
import mmap
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdmesh_kernels.block_sum import sum_blocks
from pdmesh_kernels.cpu.library import is_ours
from pdmesh_kernels.cpu.mappings import name_mapping
from pdmesh_kernels.cpu.weight_folder import creating, hold, is_unchanged, make_room, remove_if_unchanged
from pdmesh_kernels.cpu.weight_index import (
    IS_SYNCED_OFFSET,
    Entry,
    EntryMeta,
    layout,
    read_head,
    round_up,
)

MAX_SUMMING_THREADS = 8
"""One sums as fast as it reads memory: beyond that there is no more of it to be had."""

logger = logging.getLogger(__name__)

_SUMMED_BYTES = 4 << 20


class WeightsChangedError(Exception):
    """Somebody has written into a weights file that is in use: what was computed with it may be wrong."""


class WeightFile:
    """Named pieces of memory. Its file stays in the cache while this or one of its arrays lives; `close` lets it go."""

    def __init__(self, memory: mmap.mmap, places: dict[str, tuple[Entry, int]], path: Path | None, lock: int) -> None:
        self.path = path
        """None: private memory."""
        self._memory: mmap.mmap | None = memory
        self._places = places
        self._lock = lock
        self._is_writable = True
        self._contents: _Contents | None = None

    @property
    def entries(self) -> list[Entry]:
        return [entry for entry, _ in self._places.values()]

    def meta(self, name: str) -> EntryMeta:
        return self._place(name)[0].meta

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of an entry, 64-byte aligned; writable only while the file is being filled."""
        entry, offset = self._place(name)
        if self._memory is None:
            raise ValueError(f"weight {name}: the file is closed")
        array = np.frombuffer(self._memory, np.uint8, entry.num_bytes, offset)
        if not self._is_writable:
            array.flags.writeable = False
        return array

    def check(self) -> None:
        """Raise WeightsChangedError if the file's bytes are others than when it was opened. One call to the system, unless the
        file's time of change is another: then all of it is read."""
        contents = self._contents
        if contents is None or self._lock < 0 or self._memory is None:
            return
        status = os.fstat(self._lock)
        if (status.st_size, status.st_mtime_ns) == (len(self._memory), contents.mtime_ns):
            return
        if status.st_size != len(self._memory):
            raise WeightsChangedError(
                f"weights cache: {self.path} has {status.st_size} bytes, not {len(self._memory)}: it was changed while in use"
            )
        if _data_digest(self._memory, contents.data_offset, status.st_size) != contents.digest:
            raise WeightsChangedError(f"weights cache: the weights in {self.path} were changed while in use")
        self._contents = _Contents(contents.data_offset, contents.digest, status.st_mtime_ns)

    def close(self) -> None:
        """Arrays that were handed out stay valid."""
        self._memory = None
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def freeze(self, memory: mmap.mmap | None = None, contents: "_Contents | None" = None) -> None:
        """Make it read-only, from now on by way of `memory` where that is given; `contents` is what `check` shall find."""
        self._memory = memory or self._memory
        self._contents = contents
        self._is_writable = False

    def _place(self, name: str) -> tuple[Entry, int]:
        try:
            return self._places[name]
        except KeyError:
            raise KeyError(f"no weight {name} in {self.path or 'memory'}") from None

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a file was known to hold, and when it had last been written to then."""

    data_offset: int
    digest: bytes
    mtime_ns: int


def open_weight_file(path: Path | None, key: str) -> WeightFile | None:
    """Map the file at `path`, read-only. None when there is none for `key`; one that is wrong in any way is removed."""
    if path is None:
        return None
    try:
        # A pipe of that name would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as exc:
        logger.warning("weights cache: %s cannot be read: %s", path, exc)
        return None
    try:
        return _open(path, key, descriptor)
    except (ValueError, TypeError, KeyError, OSError) as exc:
        logger.warning("weights cache: %s is stale and packed anew: %s", path, exc)
        remove_if_unchanged(path, descriptor)
        os.close(descriptor)
        return None


def create_weight_file(
    path: Path | None,
    key: str,
    entries: Sequence[Entry],
    fill: Callable[[WeightFile], None],
    on_wait: Callable[[], None] = lambda: None,
) -> WeightFile:
    """Return the file at `path`, made by `fill` unless another process is making it: then that one is waited for, and
    `on_wait` called from time to time.

    `fill` writes every entry's array; what it raises is raised, and nothing is left behind. Where the folder cannot be used, or
    the disk has no room, it fills private memory. Raises ValueError for entries that are no set of named, non-empty pieces.
    """
    places, data_offset, header, index = layout(key, entries)
    num_bytes = max((offset + entry.num_bytes for entry, offset in places.values()), default=data_offset)
    num_bytes = round_up(num_bytes, mmap.PAGESIZE)
    if path is not None:
        with creating(path, on_wait) as (temporary, failure):
            if failure is None:
                if found := open_weight_file(path, key):
                    return found
                try:
                    descriptor, memory = _reserve(path, temporary, num_bytes)
                except OSError as exc:
                    failure = exc
                else:

                    def fill_all(file: WeightFile) -> _Contents:
                        fill(file)
                        digest = _data_digest(memory, data_offset, num_bytes)
                        head = header(num_bytes, digest) + index
                        memory[: len(head)] = head
                        return _Contents(data_offset, digest, os.fstat(descriptor).st_mtime_ns)

                    return _fill(WeightFile(memory, places, path, descriptor), fill_all, temporary, num_bytes)
        logger.warning("weights cache: %s cannot be kept, so the weights are packed at each start: %s", path, failure)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    file = WeightFile(_in_huge_pages(memory), places, None, -1)
    fill(file)
    file.freeze()
    return file


def _reserve(path: Path, temporary: Path, num_bytes: int) -> tuple[int, mmap.mmap]:
    make_room(path, num_bytes)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        hold(descriptor)
        # With its blocks reserved, writing to the mapping can't meet a full disk: that would be a SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return descriptor, _in_huge_pages(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED))
    except OSError:
        os.unlink(temporary)
        os.close(descriptor)
        raise


def _in_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """Ask for them: decoding reads all of it, one row's at 31 GB/s in huge ones and at 23 in pages of 4 KiB (a Zen 4 core).

    A file has them where its filesystem keeps large pieces in memory (ext4 since Linux 6.16, XFS), and then all who map it do.
    """
    # Refused by a kernel without huge pages.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _fill(file: WeightFile, fill: Callable[[WeightFile], _Contents], temporary: Path, num_bytes: int) -> WeightFile:
    assert file.path is not None
    descriptor = file._lock
    try:
        contents = fill(file)
        file.freeze(_mapped(file.path, descriptor, num_bytes), contents)
    except BaseException:
        temporary.unlink(missing_ok=True)
        file.close()
        raise
    try:
        os.rename(temporary, file.path)
    except OSError as exc:
        # The mapping serves as well without a name.
        logger.warning("weights cache: %s cannot be kept, so the weights are packed at each start: %s", file.path, exc)
        return file
    logger.info("weights cache: packed %.0f MB into %s", num_bytes / 1e6, file.path)
    _sync_later(os.dup(descriptor))
    return file


def _open(path: Path, key: str, descriptor: int) -> WeightFile:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    if not is_ours(status):
        raise ValueError("it belongs to another user")
    if not hold(descriptor) or not is_unchanged(path, descriptor):
        raise ValueError("it is being removed")
    head = read_head(descriptor, status.st_size, key)
    memory = _mapped(path, descriptor, status.st_size)
    # After the other advice, so that what is fetched now lies in huge pages too.
    memory.madvise(mmap.MADV_WILLNEED)
    if _data_digest(memory, head.data_offset, status.st_size) != head.data_digest:
        raise ValueError("its weights are damaged")
    file = WeightFile(memory, head.places, path, descriptor)
    file.freeze(contents=_Contents(head.data_offset, head.data_digest, status.st_mtime_ns))
    _note_use(path, descriptor, is_synced=head.is_synced)
    return file


def _mapped(path: Path, descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map it to be read, so that reading what is not there any more ends with a word."""
    memory = _in_huge_pages(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    name_mapping(
        memory,
        f"weights cache: {path} cannot be read any more (it was cut short while in use, or its disk fails): this process ends "
        "(SIGBUS), and the weights are packed anew at the next start",
    )
    return memory


def _data_digest(memory: mmap.mmap, begin: int, end: int) -> bytes:
    """Digest the sums of its pieces, by several threads: at the speed of memory, which a step would read anyway."""
    data = np.frombuffer(memory, np.uint8, end - begin, begin)
    starts = range(0, len(data), _SUMMED_BYTES)

    def summed(start: int) -> bytes:
        return sum_blocks(data[start : start + _SUMMED_BYTES].reshape(1, -1), [0]).tobytes()

    with ThreadPoolExecutor(min(MAX_SUMMING_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return hashlib.sha256(b"".join(threads.map(summed, starts))).digest()


def _note_use(path: Path, descriptor: int, is_synced: bool) -> None:
    """Record for `make_room` that it was used; try again to get it to disk where the process that wrote it did not."""
    try:
        _touch(descriptor)
        if not is_synced:
            writable = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            if is_unchanged(path, descriptor):
                _sync_later(writable)
            else:
                os.close(writable)
    except OSError as exc:
        logger.debug("weights cache: %s is read-only: %s", path, exc)


def _sync_later(descriptor: int) -> None:
    def sync() -> None:
        try:
            os.fsync(descriptor)
            status = os.fstat(descriptor)
            os.pwrite(descriptor, struct.pack("<I", 1), IS_SYNCED_OFFSET)
            _touch(descriptor, status.st_mtime_ns)
            os.fsync(descriptor)
        except OSError as exc:
            logger.warning("weights cache: not on disk, packed anew after the machine's next start: %s", exc)
        finally:
            os.close(descriptor)

    threading.Thread(target=sync, name="pdmesh-weights-sync", daemon=True).start()


def _touch(descriptor: int, mtime_ns: int | None = None) -> None:
    """Note a use in the time of access: that of change says whether the weights are still those that were summed."""
    kept_ns = os.fstat(descriptor).st_mtime_ns if mtime_ns is None else mtime_ns
    os.utime(descriptor, ns=(time.time_ns(), kept_ns))
