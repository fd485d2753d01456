"""Packed weights as one file that all services of a host map: packed once, then opened in milliseconds and shared in memory.

A file is a header, a JSON index and, from a page's start on, the weights' panels. It appears under its name only when whole.
Until it is known to be on disk, it counts for the boot that wrote it alone: a crash of the machine may lose pages of it. What
is opened is summed, and compared: disks and whoever writes into the file change weights silently, and tokens with them.
Where a cache folder cannot be used, the same interface holds private memory.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pdmesh_kernels.block_sum import sum_blocks
from pdmesh_kernels.cpu.library import is_ours
from pdmesh_kernels.cpu.weight_folder import creating, hold, is_unchanged, make_room, remove_if_unchanged

FILE_VERSION = 2
PANEL_ALIGNMENT = 64
MAX_SUMMING_THREADS = 8
"""One sums as fast as it reads memory: beyond that there is no more of it to be had."""

logger = logging.getLogger(__name__)

_MAGIC = b"PDMWGHT\n"
# magic, version, is synced, bytes of the index, where the data begins, bytes of the file, boot id, SHA-256 of the index, and of
# the sums of the data; offsets in the index count from where the data begins
_HEADER = struct.Struct("<8sIIQQQ36s32s32s")
_SUMMED_BYTES = 4 << 20
_IS_SYNCED_OFFSET = 12
_MAX_INDEX_BYTES = 64 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class EntryMeta:
    """What a reader needs to use an entry's bytes."""

    kind: Literal["weight", "vector"]
    """A packed matrix, or f32 numbers (`num_outputs` of them, `num_inputs` 1)."""
    format: int
    """abi.Format"""
    num_outputs: int
    num_inputs: int
    group: int = 0
    is_gated: bool = False


@dataclass(frozen=True)
class Entry:
    name: str
    meta: EntryMeta
    num_bytes: int


class WeightFile:
    """Named pieces of memory. Its file stays in the cache while this or one of its arrays lives; `close` lets it go."""

    def __init__(self, memory: mmap.mmap, places: dict[str, tuple[Entry, int]], path: Path | None, lock: int) -> None:
        self.path = path
        """None: private memory."""
        self._memory: mmap.mmap | None = memory
        self._places = places
        self._lock = lock
        self._is_writable = True

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

    def close(self) -> None:
        """Arrays that were handed out stay valid."""
        self._memory = None
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def freeze(self, memory: mmap.mmap | None = None) -> None:
        """Make it read-only, from now on by way of `memory` where that is given."""
        self._memory = memory or self._memory
        self._is_writable = False

    def _place(self, name: str) -> tuple[Entry, int]:
        try:
            return self._places[name]
        except KeyError:
            raise KeyError(f"no weight {name} in {self.path or 'memory'}") from None

    def __del__(self) -> None:
        self.close()


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
    places, data_offset, header, index = _layout(key, entries)
    num_bytes = max((offset + entry.num_bytes for entry, offset in places.values()), default=data_offset)
    num_bytes = _round_up(num_bytes, mmap.PAGESIZE)
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

                    def fill_all(file: WeightFile) -> None:
                        fill(file)
                        head = header(num_bytes, _data_digest(memory, data_offset, num_bytes)) + index
                        memory[: len(head)] = head

                    return _fill(WeightFile(memory, places, path, descriptor), fill_all, temporary, num_bytes)
        logger.warning("weights cache: %s cannot be kept, so the weights are packed at each start: %s", path, failure)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    file = WeightFile(_in_huge_pages(memory), places, None, -1)
    fill(file)
    file.freeze()
    return file


def _layout(
    key: str, entries: Sequence[Entry]
) -> tuple[dict[str, tuple[Entry, int]], int, Callable[[int, bytes], bytes], bytes]:
    relative, places = 0, {}
    for entry in entries:
        if not entry.name or entry.name in places or entry.num_bytes <= 0:
            raise ValueError(f"weight {entry.name!r} of {entry.num_bytes} bytes: names are unique and bytes positive")
        places[entry.name] = (entry, relative)
        relative = _round_up(relative + entry.num_bytes, PANEL_ALIGNMENT)
    records = [{"name": e.name, "num_bytes": e.num_bytes, "offset": o, **asdict(e.meta)} for e, o in places.values()]
    index = json.dumps({"key": key, "entries": records}).encode()
    data_offset = _round_up(_HEADER.size + len(index), mmap.PAGESIZE)
    places = {name: (entry, data_offset + offset) for name, (entry, offset) in places.items()}

    def header(num_bytes: int, data_digest: bytes) -> bytes:
        digest = hashlib.sha256(index).digest()
        return _HEADER.pack(
            _MAGIC, FILE_VERSION, 0, len(index), data_offset, num_bytes, _boot_id(), digest, data_digest
        )

    return places, data_offset, header, index


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


def _fill(file: WeightFile, fill: Callable[[WeightFile], None], temporary: Path, num_bytes: int) -> WeightFile:
    assert file.path is not None
    descriptor = file._lock
    try:
        fill(file)
        file.freeze(_in_huge_pages(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)))
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
    head = os.pread(descriptor, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise ValueError(f"it has {status.st_size} bytes, fewer than a header")
    magic, version, is_synced, index_bytes, data_offset, num_bytes, boot_id, digest, data_digest = _HEADER.unpack(head)
    if magic != _MAGIC or version != FILE_VERSION:
        raise ValueError(f"it is no weight file of version {FILE_VERSION}")
    if num_bytes != status.st_size or index_bytes > min(num_bytes, _MAX_INDEX_BYTES):
        raise ValueError(f"it has {status.st_size} bytes, not {num_bytes} with an index of {index_bytes}")
    if is_synced != 1 and (is_synced or not boot_id.strip(b"\0") or boot_id != _boot_id()):
        raise ValueError("the machine went down before it was on disk")
    index = os.pread(descriptor, index_bytes, _HEADER.size)
    if hashlib.sha256(index).digest() != digest:
        raise ValueError("its index is damaged")
    if data_offset % PANEL_ALIGNMENT or not _HEADER.size + index_bytes <= data_offset <= num_bytes:
        raise ValueError(f"its data begins at {data_offset}")
    places = _read_index(json.loads(index), key, data_offset, num_bytes)
    memory = _in_huge_pages(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    # After the other advice, so that what is fetched now lies in huge pages too.
    memory.madvise(mmap.MADV_WILLNEED)
    if _data_digest(memory, data_offset, num_bytes) != data_digest:
        raise ValueError("its weights are damaged")
    file = WeightFile(memory, places, path, descriptor)
    file.freeze()
    _note_use(path, descriptor, is_synced=bool(is_synced))
    return file


def _read_index(index: dict[str, Any], key: str, begin: int, end: int) -> dict[str, tuple[Entry, int]]:
    if index["key"] != key:
        raise ValueError(f"it holds {index['key']}, not {key}")
    places = {}
    for record in index["entries"]:
        name, num_bytes, offset = record.pop("name"), record.pop("num_bytes"), record.pop("offset")
        places[name] = (Entry(name, EntryMeta(**record), num_bytes), begin + offset)
    spans = sorted((offset, offset + entry.num_bytes) for entry, offset in places.values())
    for low, high in spans:
        if low % PANEL_ALIGNMENT or low < begin or high <= low or high > end:
            raise ValueError(f"an entry lies at {low} ... {high}, outside {begin} ... {end}")
    if any(high > low for (_, high), (low, _) in pairwise(spans)):
        raise ValueError("entries overlap")
    return places


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
        os.utime(path)
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
            os.pwrite(descriptor, struct.pack("<I", 1), _IS_SYNCED_OFFSET)
            os.fsync(descriptor)
        except OSError as exc:
            logger.warning("weights cache: not on disk, packed anew after the machine's next start: %s", exc)
        finally:
            os.close(descriptor)

    threading.Thread(target=sync, name="pdmesh-weights-sync", daemon=True).start()


def _boot_id() -> bytes:
    """Empty, which equals none, where the system has no such thing."""
    return _BOOT_ID.read_bytes().strip()[:36] if _BOOT_ID.exists() else b""


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
