"""A decoder's weights in memory: laid out by the configuration, filled by name, several projections fused into one.

The legend is that of `decoder`.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from pdmesh.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block; what a family does not have is None."""

    attention_norm_E: torch.Tensor
    qkv: Linear
    """E -> (H + 2 J) D: queries, keys, values."""
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output: Linear
    attention_post_norm_E: torch.Tensor | None
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    """E -> 2 I: gate, up."""
    down: Linear
    mlp_post_norm_E: torch.Tensor | None


class DecoderWeights:
    """Owns the tensors, uninitialised until every one of `targets` is filled and `finish` was called."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.targets: dict[str, torch.Tensor] = {}
        """Checkpoint name -> the memory that its tensor belongs into, often part of a fused one."""
        self._config = config
        self._norms: list[torch.Tensor] = []
        self.embedding_VE = self._weight("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.final_norm_E = self._norm("model.norm", config.hidden_size)
        self.head_VE = self.embedding_VE
        if not config.tied_embeddings:
            self.head_VE = self._weight("lm_head.weight", config.vocab_size, config.hidden_size)

    def finish(self) -> None:
        """Turn what was read into what is used; once, after filling."""
        if self._config.unit_offset_norms:
            for norm in self._norms:
                norm += 1

    def with_layers(self, layers: list[int]) -> "DecoderWeights":
        """Return the same weights with these layers only; shares the memory."""
        part = copy.copy(self)
        part.layers = [self.layers[index] for index in layers]
        return part

    def _layer(self, index: int) -> LayerWeights:
        config, at = self._config, f"model.layers.{index}"
        hidden_size, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        heads = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        halves = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        # Where there are post-norms, the one behind attention has the name that otherwise means the one before the MLP.
        has_post = config.post_norms
        before_mlp = "pre_feedforward_layernorm" if has_post else "post_attention_layernorm"
        return LayerWeights(
            attention_norm_E=self._norm(f"{at}.input_layernorm", hidden_size),
            qkv=self._linear(f"{at}.self_attn", heads, hidden_size, config.qkv_bias),
            q_norm_D=self._norm(f"{at}.self_attn.q_norm", head_dim) if config.qk_norm else None,
            k_norm_D=self._norm(f"{at}.self_attn.k_norm", head_dim) if config.qk_norm else None,
            output=self._linear(f"{at}.self_attn", {"o_proj": hidden_size}, q_size, config.output_bias),
            attention_post_norm_E=self._norm(f"{at}.post_attention_layernorm", hidden_size) if has_post else None,
            mlp_norm_E=self._norm(f"{at}.{before_mlp}", hidden_size),
            gate_up=self._linear(f"{at}.mlp", halves, hidden_size, config.mlp_bias),
            down=self._linear(f"{at}.mlp", {"down_proj": hidden_size}, config.intermediate_size, config.mlp_bias),
            mlp_post_norm_E=self._norm(f"{at}.post_feedforward_layernorm", hidden_size) if has_post else None,
        )

    def _norm(self, name: str, size: int) -> torch.Tensor:
        # One plus a small gain would lose that gain below float32.
        dtype = torch.float32 if self._config.unit_offset_norms else self.dtype
        gain = self._weight(f"{name}.weight", size, dtype=dtype)
        self._norms.append(gain)
        return gain

    def _weight(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.targets[name] = torch.empty(shape, dtype=dtype or self.dtype)
        return self.targets[name]

    def _linear(self, prefix: str, parts: dict[str, int], num_in: int, has_bias: bool) -> Linear:
        """Make one projection of several checkpoint ones, `parts` name -> rows."""
        sizes = list(parts.values())
        weight = torch.empty(sum(sizes), num_in, dtype=self.dtype)
        bias = torch.empty(sum(sizes), dtype=self.dtype) if has_bias else None
        for name, rows in zip(parts, torch.split(weight, sizes), strict=True):
            self.targets[f"{prefix}.{name}.weight"] = rows
        if bias is not None:
            for name, rows in zip(parts, torch.split(bias, sizes), strict=True):
                self.targets[f"{prefix}.{name}.bias"] = rows
        return Linear(weight, bias)
