"""An AWQ or GPTQ checkpoint as a WeightReader: `qweight`, `qzeros` and `scales` appear as the plain `weight` that they mean."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint_quantization import CheckpointQuantization, PackedFormat
from pdmesh.models.packed_words import unpack_codes, zero_points
from pdmesh.models.quantised_tensor import QuantisedKind, QuantisedTensor
from pdmesh.models.safetensors_weights import SafetensorsWeights
from pdmesh.models.weights import TensorRegion, WeightReader

if TYPE_CHECKING:
    import torch

PARTS = ("qweight", "qzeros", "scales")
INDEX = "g_idx"


class PackedWordWeights(WeightReader):
    """Owns the checkpoint that it reads, and closes it."""

    def __init__(self, stored: SafetensorsWeights, quantization: CheckpointQuantization) -> None:
        self._stored = stored
        self._quantization = quantization
        self._groups: dict[str, _Groups] = {}
        self._lock = threading.Lock()
        self.regions: dict[str, TensorRegion] = {}
        for name, region in stored.regions.items():
            stem, _, part = name.rpartition(".")
            if part == "qweight":
                self.regions[f"{stem}.weight"] = self._weight_region(stem, region)
            elif part not in (*PARTS, INDEX):
                self.regions[name] = region

    @property
    def is_quantised(self) -> bool:
        return any(map(self._is_packed, self.regions))

    def read(self, name: str, target: torch.Tensor) -> None:
        stem = _stem(name)
        if not self._is_packed(name):
            self._stored.read(name, target)
            return
        import torch

        groups, codes = self._groups_of(stem), self._codes(stem)
        # By input: its group need not be that of its neighbours.
        values = codes.astype(np.float32)
        values *= groups.scales[:, groups.index]
        values += groups.offsets[:, groups.index]
        target.copy_(torch.from_numpy(values))

    def quantised_kind(self, name: str) -> QuantisedKind | None:
        stem = _stem(name)
        return self._groups_of(stem).kind if self._is_packed(name) else None

    def why_expanded(self, name: str) -> str:
        return self._groups_of(_stem(name)).obstacle if self._is_packed(name) else ""

    def read_quantised(self, name: str) -> QuantisedTensor:
        stem = _stem(name)
        groups = self._groups_of(stem)
        if groups.kind is None:
            raise ValueError(f"{name} has no kind")
        return QuantisedTensor(groups.kind, self._codes(stem), groups.scales, groups.offsets)

    def stored_regions(self) -> Iterator[TensorRegion]:
        meaning = f"{self._quantization.format.value} {self._quantization.bits}"
        for name, region in self._stored.regions.items():
            yield dataclasses.replace(region, encoding=meaning) if name.endswith(".qweight") else region

    def is_ignorable(self, name: str) -> bool:
        # GPTQ's tools write a bias of zeros where the architecture has none.
        if super().is_ignorable(name):
            return True
        if not name.endswith(".bias") or not self._is_packed(f"{_stem(name)}.weight"):
            return False
        import torch

        bias = torch.empty(self.regions[name].shape)
        self._stored.read(name, bias)
        return not bias.any()

    def close(self) -> None:
        self._stored.close()

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and f"{_stem(name)}.qweight" in self._stored.regions

    def _weight_region(self, stem: str, words: TensorRegion) -> TensorRegion:
        quantization = self._quantization
        for part in PARTS:
            if f"{stem}.{part}" not in self._stored.regions:
                raise ConfigError(f"{words.path}: tensor {stem}.{part} is missing beside {stem}.qweight; is it whole?")
        scales = self._stored.regions[f"{stem}.scales"]
        zeros = self._stored.regions[f"{stem}.qzeros"]
        if len(words.shape) != 2 or len(scales.shape) != 2:
            raise ConfigError(f"{words.path}: tensor {stem}.qweight or scales is no matrix")
        per_word, num_outputs = 32 // quantization.bits, scales.shape[1]
        is_awq = quantization.format is PackedFormat.AWQ
        num_inputs = words.shape[0] if is_awq else words.shape[0] * per_word
        group = quantization.group or num_inputs
        num_groups = -(-num_inputs // group)
        wanted = {
            "qweight": (num_inputs, num_outputs // per_word) if is_awq else (num_inputs // per_word, num_outputs),
            "qzeros": (num_groups, num_outputs // per_word),
            "scales": (num_groups, num_outputs),
        }
        found = {"qweight": words.shape, "qzeros": zeros.shape, "scales": scales.shape}
        for part, shape in wanted.items():
            if found[part] != shape or num_outputs % per_word:
                raise ConfigError(
                    f"{words.path}: tensor {stem}.{part} is {list(found[part])}, but {quantization.bits} bits in groups of "
                    f"{group} ask for {list(shape)}; is quantization_config its own?"
                )
        encoding = f"{quantization.format.value} {quantization.bits} bits"
        return TensorRegion(
            f"{stem}.weight", encoding, (num_outputs, num_inputs), words.path, words.offset, words.num_bytes
        )

    def _words(self, name: str) -> NDArray[np.int32]:
        import torch

        words = self._stored.tensor(name)
        if words.dtype != torch.int32:
            raise ConfigError(f"{self._stored.regions[name].path}: tensor {name} is {words.dtype}, must be int32")
        return words.numpy()

    def _codes(self, stem: str) -> NDArray[np.uint8]:
        return unpack_codes(self._words(f"{stem}.qweight"), self._quantization.format, self._quantization.bits)

    def _groups_of(self, stem: str) -> _Groups:
        with self._lock:
            if stem not in self._groups:
                self._groups[stem] = self._read_groups(stem)
            return self._groups[stem]

    def _read_groups(self, stem: str) -> _Groups:
        import torch

        quantization = self._quantization
        num_inputs = self.regions[f"{stem}.weight"].shape[1]
        region = self._stored.regions[f"{stem}.scales"]
        scales_gn = torch.empty(region.shape)
        self._stored.read(f"{stem}.scales", scales_gn)
        scales = np.ascontiguousarray(scales_gn.numpy().T)
        zeros = zero_points(self._words(f"{stem}.qzeros"), quantization.format, quantization.bits)
        group = quantization.group or num_inputs
        plain = np.arange(num_inputs) // group
        index = plain
        if f"{stem}.{INDEX}" in self._stored.regions:
            index = self._words(f"{stem}.{INDEX}").astype(np.intp)
            if index.shape != (num_inputs,) or index.min() < 0 or index.max() >= scales.shape[1]:
                raise ConfigError(
                    f"{region.path}: tensor {stem}.{INDEX} names groups that there are not; download it again"
                )
        return _Groups(scales, zeros, index, group if np.array_equal(index, plain) else None, quantization.bits)


class _Groups:
    """Scales and offsets of a tensor, f32 [n, G], the group of each input, and the kind; None where it is none that we keep, for
    the reason in `obstacle`."""

    def __init__(
        self,
        scales: NDArray[np.float32],
        zeros: NDArray[np.float32],
        index: NDArray[np.intp],
        group: int | None,
        bits: int,
    ) -> None:
        self.scales, self.index = scales, index
        self.offsets = -zeros * scales
        self.kind: QuantisedKind | None = None
        is_symmetric = bool((zeros == 1 << (bits - 1)).all())
        if group is not None and scales.shape[1] == 1:
            # All inputs are one group, however many there are.
            group = -(-group // 32) * 32
        is_half = _is_half(self.scales) and (bits == 8 or _is_half(self.offsets))
        self.obstacle = ""
        if group is None:
            self.obstacle = "reordered groups"
        elif group % 32:
            self.obstacle = f"groups of {group}, no multiple of 32"
        elif not np.isfinite(scales).all():
            self.obstacle = "a scale that is not finite"
        elif bits == 8 and not is_symmetric:
            self.obstacle = "8 bits with zero points"
        elif bits == 8 and not is_half:
            self.obstacle = "8 bits with scales that float16 cannot hold"
        else:
            self.kind = QuantisedKind(4 if bits == 4 else 8, group, is_half, is_symmetric)


def _is_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16).astype(np.float32) == values).all())


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
