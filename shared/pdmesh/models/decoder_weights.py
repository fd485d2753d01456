"""A decoder's weights in memory: laid out by its plan, filled by name, several projections fused into one.

The legend is that of `decoder`.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from pdmesh.models.model_config import ModelConfig
from pdmesh.models.weight_plan import Gain, LayerPlan, Projection, plan_weights


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
        plan = plan_weights(config)
        self.embedding_VE = self._linear(plan.embedding).weight
        self.layers = [self._layer(layer) for layer in plan.layers]
        self.final_norm_E = self._norm(plan.final_norm)
        self.head_VE = self.embedding_VE if plan.head is plan.embedding else self._linear(plan.head).weight

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

    def _layer(self, plan: LayerPlan) -> LayerWeights:
        return LayerWeights(
            attention_norm_E=self._norm(plan.attention_norm),
            qkv=self._linear(plan.qkv),
            q_norm_D=None if plan.q_norm is None else self._norm(plan.q_norm),
            k_norm_D=None if plan.k_norm is None else self._norm(plan.k_norm),
            output=self._linear(plan.output),
            attention_post_norm_E=None if plan.attention_post_norm is None else self._norm(plan.attention_post_norm),
            mlp_norm_E=self._norm(plan.mlp_norm),
            gate_up=self._linear(plan.gate_up),
            down=self._linear(plan.down),
            mlp_post_norm_E=None if plan.mlp_post_norm is None else self._norm(plan.mlp_post_norm),
        )

    def _norm(self, plan: Gain) -> torch.Tensor:
        # One plus a small gain would lose that gain below float32.
        gain = torch.empty(plan.size, dtype=torch.float32 if self._config.unit_offset_norms else self.dtype)
        self.targets[f"{plan.name}.weight"] = gain
        self._norms.append(gain)
        return gain

    def _linear(self, plan: Projection) -> Linear:
        """Make one projection of its checkpoint's."""
        sizes = list(plan.parts.values())
        weight = torch.empty(plan.num_outputs, plan.num_inputs, dtype=self.dtype)
        bias = torch.empty(plan.num_outputs, dtype=self.dtype) if plan.has_bias else None
        for name, rows in zip(plan.parts, torch.split(weight, sizes), strict=True):
            self.targets[f"{name}.weight"] = rows
        if bias is not None:
            for name, rows in zip(plan.parts, torch.split(bias, sizes), strict=True):
                self.targets[f"{name}.bias"] = rows
        return Linear(weight, bias)
