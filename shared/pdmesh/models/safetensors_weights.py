"""A safetensors directory, one file or sharded, as a WeightReader."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from pdmesh.errors import ConfigError
from pdmesh.models.weights import TensorRegion, WeightReader

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
FLOAT_ENCODINGS = ("F32", "F16", "BF16", "F64")


class SafetensorsWeights(WeightReader):
    """Files that were read from stay mapped until `close`; tensors are copied out one by one."""

    def __init__(self, folder: Path) -> None:
        self._open_files = ExitStack()
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()
        self.regions: dict[str, TensorRegion] = {}
        try:
            for path in _files(folder):
                self.regions |= {region.name: region for region in _regions(path)}
        except ConfigError:
            self.close()
            raise

    def read(self, name: str, target: torch.Tensor) -> None:
        region = self.regions[name]
        if region.encoding not in FLOAT_ENCODINGS:
            raise ConfigError(
                f"{region.path}: tensor {name} is {region.encoding}; supported: {', '.join(FLOAT_ENCODINGS)}"
            )
        target.copy_(self.tensor(name))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a copy, of whatever type it is stored in."""
        path = self.regions[name].path
        with self._lock:
            if path not in self._files:
                # Here and not before: this imports torch.
                self._files[path] = self._open_files.enter_context(safe_open(path, framework="pt"))
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor

    def close(self) -> None:
        self._files.clear()
        self._open_files.close()


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{index}: is no safetensors index ({exc!r}); download it again") from exc
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ConfigError(f"{folder}: {absent[0]} is missing, though {INDEX} names it; download it again")
    if not paths:
        raise ConfigError(f"{folder}: holds no .safetensors file; other weight formats are not read")
    return paths


def _regions(path: Path) -> list[TensorRegion]:
    try:
        # Validates the header: 8 bytes of length, then JSON.
        with safe_open(path, framework="np"), path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError) as exc:
        raise ConfigError(f"{path}: broken or truncated safetensors file ({exc}); download it again") from exc
    return [
        TensorRegion(
            name=name,
            encoding=entry["dtype"],
            shape=tuple(entry["shape"]),
            path=path,
            offset=8 + header_bytes + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]
