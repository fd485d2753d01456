"""A GGUF file as a WeightReader: llama.cpp's tensor names and order become Hugging Face's, quantised blocks become floats."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdmesh.errors import ConfigError
from pdmesh.models.ggml_types import PLAIN_TYPES, GGMLType
from pdmesh.models.gguf_codes import KINDS, codes_of
from pdmesh.models.gguf_config import ROPE_FACTORS_TENSOR
from pdmesh.models.gguf_metadata import GGUFMetadata, GGUFTensorInfo
from pdmesh.models.quantised_tensor import QuantisedKind, QuantisedTensor
from pdmesh.models.weights import TensorRegion, WeightReader

if TYPE_CHECKING:
    import torch

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# llama.cpp's converter adds one to the gains of norms of these.
OFFSET_ARCHITECTURES = ("gemma2", "gemma3")
# llama.cpp's converter reorders the rows of these, for rotary over neighbouring pairs, in files of this architecture only.
PERMUTED_ARCHITECTURE = "llama"


class GGUFWeights(WeightReader):
    """The file stays mapped until `close`."""

    def __init__(self, metadata: GGUFMetadata, num_heads: int, num_kv_heads: int) -> None:
        self._path = metadata.path
        self._permuted = {}
        if metadata.architecture == PERMUTED_ARCHITECTURE:
            self._permuted = {"self_attn.q_proj": num_heads, "self_attn.k_proj": num_kv_heads}
        self._has_offset_norms = metadata.architecture in OFFSET_ARCHITECTURES
        self._layer_names = GEMMA_LAYER_NAMES if self._has_offset_norms else LAYER_NAMES
        with self._path.open("rb") as file:
            # Private and copy-on-write, only because torch warns of buffers that it could not write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._types: dict[str, GGMLType] = {}
        self.regions: dict[str, TensorRegion] = {}
        try:
            for info in metadata.tensors.values():
                if info.name != ROPE_FACTORS_TENSOR:
                    self._add(info)
        except ConfigError:
            self.close()
            raise

    @property
    def is_quantised(self) -> bool:
        return not PLAIN_TYPES.issuperset(self._types.values())

    def read(self, name: str, target: torch.Tensor) -> None:
        import torch

        from pdmesh.models.gguf_dequantize import dequantize

        region = self.regions[name]
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=region.num_bytes, offset=region.offset)
        num_heads = self._num_permuted_heads(name)
        try:
            if num_heads is None:
                dequantize(raw, self._types[name], target)
                if self._has_offset_norms and name.endswith("norm.weight"):
                    target -= 1
            else:
                pairs = torch.empty(target.shape, dtype=target.dtype)
                dequantize(raw, self._types[name], pairs)
                target.copy_(pairs[torch.from_numpy(_pair_rows(len(pairs), num_heads))])
        except NotImplementedError as exc:
            raise ConfigError(
                f"{self._path}: tensor {name} is {region.encoding}, which is not supported; use another quantisation"
            ) from exc

    def quantised_kind(self, name: str) -> QuantisedKind | None:
        return KINDS.get(self._types[name]) if len(self.regions[name].shape) == 2 else None

    def why_expanded(self, name: str) -> str:
        kind = self._types[name]
        return "" if kind in PLAIN_TYPES or self.quantised_kind(name) is not None else f"type {kind.name}"

    def read_quantised(self, name: str) -> QuantisedTensor:
        region = self.regions[name]
        raw = np.frombuffer(self._map, dtype=np.uint8, count=region.num_bytes, offset=region.offset)
        num_outputs, num_inputs = region.shape
        tensor = codes_of(raw, self._types[name], num_outputs, num_inputs)
        num_heads = self._num_permuted_heads(name)
        if num_heads is None:
            return tensor
        return tensor.take_rows(_pair_rows(num_outputs, num_heads))

    def close(self) -> None:
        self._map.close()

    def _num_permuted_heads(self, name: str) -> int | None:
        return next((heads for part, heads in self._permuted.items() if part in name), None)

    def _add(self, info: GGUFTensorInfo) -> None:
        try:
            kind = GGMLType(info.type_id)
        except ValueError as exc:
            raise ConfigError(f"{self._path}: tensor {info.name} has the unknown type {info.type_id}") from exc
        num_items = 1
        for size in info.shape:
            num_items *= size
        num_bytes = num_items // kind.block_items * kind.block_bytes
        if info.shape and info.shape[-1] % kind.block_items:
            raise ConfigError(
                f"{self._path}: tensor {info.name} has rows of {info.shape[-1]}, no multiple of {kind.name}'s"
            )
        if info.offset + num_bytes > len(self._map):
            raise ConfigError(
                f"{self._path}: broken or truncated GGUF file (ends at byte {len(self._map)}, tensor {info.name} at "
                f"{info.offset + num_bytes}); download it again"
            )
        name = _hugging_face_name(info.name, self._layer_names)
        self._types[name] = kind
        self.regions[name] = TensorRegion(name, kind.name, info.shape, self._path, info.offset, num_bytes)


def _hugging_face_name(name: str, layer_names: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{suffix}"
    return name


def _pair_rows(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Say where each row of the heads (0, 1, …, D - 1) is in llama.cpp's order, (0, D/2, 1, D/2 + 1, …) in each head."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).transpose(0, 2, 1).reshape(-1)
