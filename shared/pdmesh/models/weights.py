"""Reads a checkpoint's tensors, by their Hugging Face names, into memory that the model has laid out.

Torch is imported where a tensor is read: an engine whose weights are packed already starts without it, unless they are AWQ's
or GPTQ's, whose scales are read at each start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdmesh.errors import ConfigError
from pdmesh.models.quantised_tensor import QuantisedKind, QuantisedTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """Where one tensor's bytes lie, for the fingerprint."""

    name: str
    encoding: str
    """Number type or quantisation."""
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


class WeightReader(ABC):
    """An open checkpoint."""

    regions: dict[str, TensorRegion]
    """By Hugging Face name."""

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is stored as codes, of whatever kind, that we keep as they are or do not."""
        return False

    @abstractmethod
    def read(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (same shape, any float dtype) with the tensor; called by several threads at once.

        Raises ConfigError when its data is unusable."""

    def why_expanded(self, name: str) -> str:
        """Say in a few words why a tensor that is stored as codes has no kind; empty where it has one, or is plain numbers."""
        return ""

    def quantised_kind(self, name: str) -> QuantisedKind | None:
        """Say how the tensor can be had by `read_quantised`; None where it is made of plain numbers or of others that we
        do not keep."""
        return None

    def read_quantised(self, name: str) -> QuantisedTensor:
        """Return a tensor that has a kind, in codes; called by several threads at once."""
        raise NotImplementedError

    def stored_regions(self) -> Iterable[TensorRegion]:
        """Return what lies in the files, all of it, for the fingerprint."""
        return self.regions.values()

    def is_ignorable(self, name: str) -> bool:
        """Tell whether a model that does not ask for this tensor can be right."""
        # Old checkpoints carry the rotary table; tied ones sometimes the output layer again.
        return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"

    @abstractmethod
    def close(self) -> None: ...


def fill(targets: dict[str, torch.Tensor], reader: WeightReader, model: str, report: Callable[[float], None]) -> None:
    """Read every target's tensor; `report` gets the fraction done.

    Raises ConfigError for a tensor that is missing, left over or of the wrong shape.
    """
    check_shapes({name: tuple(target.shape) for name, target in targets.items()}, reader, model)
    total = sum(reader.regions[name].num_bytes for name in targets)
    done = 0
    for name in _read_all(targets, reader):
        done += reader.regions[name].num_bytes
        report(done / total)


def check_shapes(shapes: dict[str, tuple[int, ...]], reader: WeightReader, model: str) -> None:
    """Raise ConfigError unless the checkpoint has just these tensors, in these shapes."""
    missing = sorted(shapes.keys() - reader.regions.keys())
    if missing:
        raise ConfigError(f"{model}: {_names(missing)} missing from the checkpoint; is it whole?")
    unexpected = sorted(name for name in reader.regions.keys() - shapes.keys() if not reader.is_ignorable(name))
    if unexpected:
        raise ConfigError(f"{model}: {_names(unexpected)} not expected by its architecture; is config.json its own?")
    for name, shape in shapes.items():
        if reader.regions[name].shape != shape:
            found, wanted = list(reader.regions[name].shape), list(shape)
            raise ConfigError(f"{model}: tensor {name} is {found}, but its configuration asks for {wanted}")


def _read_all(targets: dict[str, torch.Tensor], reader: WeightReader) -> Iterator[str]:
    """Read in as many threads as torch may use, and yield the names as they are done."""
    import torch

    # One thread per tensor: torch's own teams wait for each other after every small operation, which takes a hundred
    # times as long when several engines load on the same cores.
    num_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        running = {pool.submit(reader.read, name, target): name for name, target in targets.items()}
        for future in as_completed(running):
            future.result()
            yield running[future]
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)


def _names(names: list[str]) -> str:
    others = f" and {len(names) - 1} others are" if len(names) > 1 else " is"
    return f"tensor {names[0]}{others}"
