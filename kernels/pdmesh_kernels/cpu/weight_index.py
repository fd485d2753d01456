"""What stands at the beginning of a file of packed weights: a header, and a JSON index of what lies where behind it.

It says of which model and boot the file is, and what its data sums to; nothing in it can point outside the file.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

FILE_VERSION = 2
PANEL_ALIGNMENT = 64
IS_SYNCED_OFFSET = 12
"""Of the word that is 1 once the file is known to be on disk."""

_MAGIC = b"PDMWGHT\n"
# magic, version, is synced, bytes of the index, where the data begins, bytes of the file, boot id, SHA-256 of the index, and of
# the sums of the data; offsets in the index count from where the data begins
_HEADER = struct.Struct("<8sIIQQQ36s32s32s")
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


@dataclass(frozen=True, slots=True)
class Head:
    places: dict[str, tuple[Entry, int]]
    """Entries by name, each with where it begins in the file."""
    data_offset: int
    data_digest: bytes
    is_synced: bool


def layout(
    key: str, entries: Sequence[Entry]
) -> tuple[dict[str, tuple[Entry, int]], int, Callable[[int, bytes], bytes], bytes]:
    """Place the entries: returns where each lies and where the data begins, what makes the header of the file's size and its
    data's digest, and the index behind that. Raises ValueError for entries that are no set of named, non-empty pieces."""
    relative, places = 0, {}
    for entry in entries:
        if not entry.name or entry.name in places or entry.num_bytes <= 0:
            raise ValueError(f"weight {entry.name!r} of {entry.num_bytes} bytes: names are unique and bytes positive")
        places[entry.name] = (entry, relative)
        relative = round_up(relative + entry.num_bytes, PANEL_ALIGNMENT)
    records = [{"name": e.name, "num_bytes": e.num_bytes, "offset": o, **asdict(e.meta)} for e, o in places.values()]
    index = json.dumps({"key": key, "entries": records}).encode()
    data_offset = round_up(_HEADER.size + len(index), mmap.PAGESIZE)
    places = {name: (entry, data_offset + offset) for name, (entry, offset) in places.items()}

    def header(num_bytes: int, data_digest: bytes) -> bytes:
        digest = hashlib.sha256(index).digest()
        return _HEADER.pack(
            _MAGIC, FILE_VERSION, 0, len(index), data_offset, num_bytes, _boot_id(), digest, data_digest
        )

    return places, data_offset, header, index


def read_head(descriptor: int, file_bytes: int, key: str) -> Head:
    """Read what a file of that size begins with. Raises ValueError, TypeError or KeyError if it is wrong in any way, or not for
    `key`."""
    head = os.pread(descriptor, _HEADER.size, 0)
    if len(head) < _HEADER.size:
        raise ValueError(f"it has {file_bytes} bytes, fewer than a header")
    magic, version, is_synced, index_bytes, data_offset, num_bytes, boot_id, digest, data_digest = _HEADER.unpack(head)
    if magic != _MAGIC or version != FILE_VERSION:
        raise ValueError(f"it is no weight file of version {FILE_VERSION}")
    if num_bytes != file_bytes or index_bytes > min(num_bytes, _MAX_INDEX_BYTES):
        raise ValueError(f"it has {file_bytes} bytes, not {num_bytes} with an index of {index_bytes}")
    if is_synced != 1 and (is_synced or not boot_id.strip(b"\0") or boot_id != _boot_id()):
        raise ValueError("the machine went down before it was on disk")
    index = os.pread(descriptor, index_bytes, _HEADER.size)
    if hashlib.sha256(index).digest() != digest:
        raise ValueError("its index is damaged")
    if data_offset % PANEL_ALIGNMENT or not _HEADER.size + index_bytes <= data_offset <= num_bytes:
        raise ValueError(f"its data begins at {data_offset}")
    places = _read_index(json.loads(index), key, data_offset, num_bytes)
    return Head(places, data_offset, data_digest, bool(is_synced))


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


def _boot_id() -> bytes:
    """Empty, which equals none, where the system has no such thing."""
    return _BOOT_ID.read_bytes().strip()[:36] if _BOOT_ID.exists() else b""


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
