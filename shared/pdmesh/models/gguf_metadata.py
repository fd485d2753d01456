"""The head of a GGUF file: key-values and tensor directory, without torch and without the tensors' data.

The tokenizer (proxy) and the weight loader (core) both start here. Own reader, because `gguf.GGUFReader` builds numpy
views per array element: 2.7 s for SmolLM2's vocabulary where this takes 0.06 s. Format: ggml's docs/gguf.md, versions 2, 3.
"""

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pdmesh.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Far above any real file; keeps a corrupt count from being taken at its word.
MAX_DIMENSIONS = 4

GGUFScalar = int | float | bool | str
GGUFValue = GGUFScalar | list[GGUFScalar]


class ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where one tensor lies. `shape` is row-major, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    """A `GGMLType`, or none that we know."""
    offset: int
    """From the start of the file, bytes."""


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """All of a GGUF file but its tensors' data."""

    path: Path
    values: dict[str, GGUFValue]
    tensors: dict[str, GGUFTensorInfo]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def get(self, key: str) -> GGUFValue | None:
        return self.values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string value; raises ConfigError when absent without a default, or no string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, "a string", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(key, "a number", value)
        return float(value)

    def strings(self, key: str) -> list[str]:
        """Return an array of strings; raises ConfigError when absent or of another type."""
        value = self.values.get(key)
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self._bad(key, "an array of strings", value)
        return value  # type: ignore[return-value]

    def integers(self, key: str) -> list[int]:
        value = self.values.get(key)
        if not isinstance(value, list) or (value and not isinstance(value[0], int)):
            raise self._bad(key, "an array of integers", value)
        return value  # type: ignore[return-value]

    def _bad(self, key: str, wanted: str, value: GGUFValue | None) -> ConfigError:
        found = "is missing" if value is None else f"is {type(value).__name__}"
        return ConfigError(f"{self.path}: GGUF key {key} must be {wanted} but {found}; use another file")


def read_gguf_metadata(path: Path) -> GGUFMetadata:
    """Parse the head of `path`. Raises ConfigError, one line, for anything that is not a whole GGUF head."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (struct.error, ValueError, OverflowError) as exc:
        raise ConfigError(f"{path}: broken or truncated GGUF file ({exc}); download it again") from exc


def _parse(path: Path, data: mmap.mmap) -> GGUFMetadata:
    reader = _Reader(data)
    if reader.take(4) != MAGIC:
        raise ConfigError(f"{path}: not a GGUF file (wrong magic); expected .gguf from llama.cpp's converter")
    version = reader.scalar("I")
    if version not in VERSIONS:
        raise ConfigError(f"{path}: GGUF version {version} is not supported; convert it to version 3")
    num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
    values: dict[str, GGUFValue] = {}
    for _ in range(num_values):
        key = reader.text()
        values[key] = reader.value(ValueType(reader.scalar("I")))
    heads = [reader.tensor() for _ in range(num_tensors)]
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"alignment {alignment}")
    start = -(-reader.position // alignment) * alignment
    tensors = {head.name: GGUFTensorInfo(head.name, head.shape, head.type_id, start + head.offset) for head in heads}
    return GGUFMetadata(path, values, tensors)


class _Reader:
    """A cursor over the file; running past its end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise ValueError(f"ends at byte {len(self.data)}, {end} expected")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value) if code not in "fd?" else value

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: ValueType) -> GGUFValue:
        if kind is ValueType.STRING:
            return self.text()
        if kind is not ValueType.ARRAY:
            return self.scalar(SCALAR_CODES[kind])
        item = ValueType(self.scalar("I"))
        count = self.scalar("Q")
        if item is ValueType.STRING:
            return self._strings(count)
        if item is ValueType.ARRAY:
            raise ValueError("nested array")
        code = SCALAR_CODES[item]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def _strings(self, count: int) -> list[GGUFScalar]:
        data, position, unpack = self.data, self.position, struct.Struct("<Q").unpack_from
        if count * 8 > len(data) - position:
            raise ValueError(f"array of {count} strings at byte {position}")
        found: list[GGUFScalar] = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > len(data):
                raise ValueError(f"ends at byte {len(data)}, {position} expected")
            found.append(data[start:position].decode("utf-8"))
        self.position = position
        return found

    def tensor(self) -> GGUFTensorInfo:
        name = self.text()
        num_dimensions = self.scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = struct.unpack(f"<{num_dimensions}Q", self.take(8 * num_dimensions))
        return GGUFTensorInfo(name, tuple(reversed(shape)), self.scalar("I"), self.scalar("Q"))
