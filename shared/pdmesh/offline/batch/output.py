"""The output of a batch: lines go to FILE.partial as they come, and become FILE, in the input's order, all at once."""

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from pdmesh.errors import ConfigError, InternalError

SUFFIX = ".partial"


class _Seen(msgspec.Struct):
    """What a finished line is known by when a batch goes on."""

    custom_id: str | None
    error: msgspec.Raw


_decode_seen = msgspec.json.Decoder(_Seen).decode


class BatchOutput:
    """A context manager; without `finish` the partial file stays, for the next run to go on from. Raises ConfigError."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path = path
        self._partial_path = path.with_name(path.name + SUFFIX)
        self._resume = resume
        self._file: IO[bytes]
        self._places: dict[int, tuple[int, int]] = {}
        """Number of an input line -> offset and length of its output line."""
        self._answered: dict[str, tuple[int, int]] = {}
        self._end = 0

    def __enter__(self) -> Self:
        try:
            unfinished = self._partial_path.exists() and self._partial_path.stat().st_size > 0
            if unfinished and not self._resume:
                raise ConfigError(
                    f"output-file: {self._partial_path} is from a run that did not finish; go on from it with --resume, or "
                    "remove it to start over"
                )
            self._file = self._partial_path.open("r+b" if unfinished else "w+b")
        except OSError as exc:
            raise ConfigError(f"output-file: {self._partial_path} cannot be written ({exc.strerror})") from exc
        if self._resume:
            self._read_answered()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        # What a full disk keeps from being written is not in an answered line.
        with contextlib.suppress(OSError):
            self._file.close()
        if self._end == 0:
            self._partial_path.unlink(missing_ok=True)

    def state(self) -> str:
        """Say what there is of an unfinished run."""
        if self._end == 0:
            return "nothing was answered"
        return f"what was answered is in {self._partial_path}; go on from it with --resume"

    def has(self, number: int, custom_id: str) -> bool:
        """Tell whether an earlier run answered this line; then it is the answer to line `number`."""
        place = self._answered.pop(custom_id, None)
        if place is not None:
            self._places[number] = place
        return place is not None

    def write(self, number: int, line: bytes) -> None:
        """Add the answer to input line `number`; once this returns a crash of this process does not lose it.

        Raises InternalError when the disk does not take it.
        """
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as exc:
            raise self._unwritable(self._partial_path, exc) from exc
        self._places[number] = (self._end, len(line))
        self._end += len(line)

    def finish(self) -> None:
        """Write FILE, whole or not at all, and remove the partial one. Raises InternalError when the disk does not take it."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with draft.open("wb") as whole:
                for _, (offset, length) in sorted(self._places.items()):
                    self._file.seek(offset)
                    whole.write(self._file.read(length))
                whole.flush()
                os.fsync(whole.fileno())
            draft.replace(self._path)
        except OSError as exc:
            raise self._unwritable(self._path, exc) from exc
        finally:
            draft.unlink(missing_ok=True)
        self._partial_path.unlink()
        self._end = 0

    def _unwritable(self, path: Path, exc: OSError) -> InternalError:
        return InternalError(f"output-file: {path} cannot be written ({exc.strerror})")

    def _read_answered(self) -> None:
        """Note what was answered; a line that was cut off by a crash, and all after it, is written anew."""
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            with contextlib.suppress(msgspec.DecodeError):
                seen = _decode_seen(line)
                if seen.custom_id is not None and bytes(seen.error) == b"null":
                    self._answered[seen.custom_id] = (self._end, len(line))
            self._end += len(line)
        self._file.seek(self._end)
        self._file.truncate()
