"""What a checkpoint's tensors contain, as one digest: all of it is read once, and not again while the files stay as they were.

Samples do not do. A checkpoint that was damaged on its way, or edited by a few rows, would have the name of the good one, and
engines would take each other's KV and find it in the tier.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdmesh.errors import ConfigError
from pdmesh.models.weights import TensorRegion
from pdmesh_kernels.cpu.library import cache_folder, is_ours

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
MAX_THREADS = 8
"""SHA-256 does 1 to 2 GB/s on a core with its instructions: beyond that the disk is slower."""
SETTLED_S = 2.0
"""A file changed so lately may be changed again within one tick of its clock, and would look the same."""
MAX_REMEMBERED = 256
"""Digests in the cache; those that were asked for longest ago go."""
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4 << 10


class FileStates:
    """What a checkpoint's files were before they were read: what is made of them has to be of those that were digested."""

    def __init__(self, regions: Iterable[TensorRegion]) -> None:
        self._regions = list(regions)
        self._told = _told(_states(self._regions))

    def check(self) -> None:
        """Raise ConfigError when a file is another since."""
        try:
            now = _told(_states(self._regions))
        except OSError as exc:
            raise ConfigError(f"{exc.filename}: has gone while it was read") from exc
        for before, after in zip(self._told, now, strict=True):
            if before != after:
                raise ConfigError(f"{before[0]}: has changed while it was read; start again when it is whole")


def content_digest(regions: Sequence[TensorRegion]) -> str:
    """Digest (SHA-256, hex) of names, encodings, shapes and bytes, in the order given; in which files they lie does not count.

    Reads everything unless the cache folder has it for files of the same place, size and times of change.
    """
    before = _states(regions)
    note = _note(regions, before)
    if note is not None and (known := _read(note)):
        return known
    started_s = time.monotonic()
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="digest") as threads:
        contents = list(threads.map(_digest, regions))
    rows = [
        [region.name, region.encoding, region.shape, region.num_bytes, content]
        for region, content in zip(regions, contents, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    num_bytes = sum(region.num_bytes for region in regions)
    log.info("read %.2f GB of weights for their fingerprint in %.1f s", num_bytes / 1e9, time.monotonic() - started_s)
    newest_s = max((max(state.st_mtime, state.st_ctime) for state in before.values()), default=0.0)
    if note is not None and _told(before) == _told(_states(regions)) and newest_s < time.time() - SETTLED_S:
        _write(note, digest)
    return digest


def _digest(region: TensorRegion) -> str:
    digest = hashlib.sha256()
    with region.path.open("rb", buffering=0) as file:
        file.seek(region.offset)
        left = region.num_bytes
        while left:
            piece = file.read(min(left, CHUNK_BYTES))
            if not piece:
                break
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _states(regions: Sequence[TensorRegion]) -> dict[Path, os.stat_result]:
    return {path: path.stat() for path in sorted({region.path for region in regions})}


def _told(states: dict[Path, os.stat_result]) -> list[list[str | int]]:
    """What changes when a file does: its time of change cannot be set back."""
    return [
        [str(path.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        for path, state in states.items()
    ]


def _note(regions: Sequence[TensorRegion], states: dict[Path, os.stat_result]) -> Path | None:
    """Where the digest is remembered; None where nothing can be."""
    rows = [
        [each.name, each.encoding, each.shape, str(each.path.resolve()), each.offset, each.num_bytes]
        for each in regions
    ]
    key = hashlib.sha256(json.dumps([_told(states), rows, [_sample(path) for path in states]]).encode()).hexdigest()
    try:
        return cache_folder() / "digests" / key[:32]
    except OSError:
        return None


def _sample(path: Path) -> str:
    """Look into a file: some images of file systems have one time for all files, and one number for the same place."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb", buffering=0) as file:
        for at in range(SAMPLES_PER_FILE):
            file.seek(max(0, size - SAMPLE_BYTES) * at // (SAMPLES_PER_FILE - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read(note: Path) -> str:
    """The remembered digest; empty when there is none, or others may have written it."""
    try:
        if not (is_ours(note.parent.stat()) and is_ours(note.stat())):
            return ""
        digest = note.read_text(encoding="ascii")
        bytes.fromhex(digest)
        os.utime(note)
    except (OSError, ValueError):
        return ""
    return digest if len(digest) == 2 * hashlib.sha256().digest_size else ""


def _write(note: Path, digest: str) -> None:
    temporary = note.with_suffix(f".{os.getpid()}.tmp")
    try:
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(digest, encoding="ascii")
        temporary.replace(note)
        remembered = sorted(note.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in remembered[MAX_REMEMBERED:]:
            old.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("the weights' digest cannot be kept, so the next start reads them whole again: %s", exc)
