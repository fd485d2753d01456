"""The decoder that all supported models are: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3.

Pre-norm blocks of grouped-query attention and a gated feed-forward; the configuration says what a family adds.

The legend: T tokens of a step, R of them with logits, E hidden, H query heads, J key-value heads, D head_dim, F rotary
frequencies (D/2), I intermediate, V vocabulary; B blocks, L layers of a block, K key and value, S slots of a block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from pdmesh.models.decoder_weights import DecoderWeights, LayerWeights
from pdmesh.models.kv_layout import KVLayout
from pdmesh.models.model_config import Activation, ModelConfig
from pdmesh.models.step import GroupStep, ModelStep
from pdmesh_kernels.gelu_mul import gelu_mul
from pdmesh_kernels.kv_write import kv_write
from pdmesh_kernels.paged_attention import paged_attention
from pdmesh_kernels.rms_norm import rms_norm
from pdmesh_kernels.rotary import rotary
from pdmesh_kernels.rotary_frequencies import RotarySpec, inverse_frequencies
from pdmesh_kernels.silu_mul import silu_mul

GATES = {Activation.SILU: silu_mul, Activation.GELU_TANH: gelu_mul}


@dataclass(frozen=True, slots=True)
class Angles:
    """How far a step's heads are turned."""

    cos_TF: torch.Tensor
    sin_TF: torch.Tensor


class DecoderModel:
    """A model whose weights have been read."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.dtype
        self._gate = GATES[config.activation]
        self._frequencies = {
            spec: torch.from_numpy(inverse_frequencies(spec)) for spec in (config.rotary, config.local_rotary)
        }

    def forward(self, step: ModelStep, layouts: tuple[KVLayout, ...], kv_BLJKSD: torch.Tensor) -> torch.Tensor:
        """Write the step's keys and values into the pool; return logits, float32 [R, V]. `layouts` are the step's groups'."""
        config = self.config
        angles = {spec: self._angles(spec, step.positions_T) for spec in self._frequencies}
        places = {
            layer: (group, kv_BLJKSD[:, place])
            for layout, group in zip(layouts, step.groups, strict=True)
            for place, layer in enumerate(layout.layers)
        }
        x_TE = functional.embedding(step.token_ids_T, self.weights.embedding_VE)
        if config.embedding_scale != 1.0:
            # Rounded to the model's dtype first, as the model was trained.
            x_TE *= torch.tensor(config.embedding_scale, dtype=self.dtype)
        for index, layer in enumerate(self.weights.layers):
            group, kv_BJKSD = places[index]
            spec = config.rotary if config.windows[index] is None else config.local_rotary
            h_TE = self._attention(self._norm(x_TE, layer.attention_norm_E), layer, group, kv_BJKSD, angles[spec])
            x_TE += h_TE if layer.attention_post_norm_E is None else self._norm(h_TE, layer.attention_post_norm_E)
            h_TE = layer.down(self._gate(layer.gate_up(self._norm(x_TE, layer.mlp_norm_E))))
            x_TE += h_TE if layer.mlp_post_norm_E is None else self._norm(h_TE, layer.mlp_post_norm_E)
        return self._logits(x_TE[step.logits_index_R])

    def _attention(
        self, h_TE: torch.Tensor, layer: LayerWeights, group: GroupStep, kv_BJKSD: torch.Tensor, angles: Angles
    ) -> torch.Tensor:
        config = self.config
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_THD = layer.qkv(h_TE).view(h_TE.shape[0], -1, head_dim)
        q_THD, k_TJD, v_TJD = torch.split(qkv_THD, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD, k_TJD = self._norm(q_THD, layer.q_norm_D), self._norm(k_TJD, layer.k_norm_D)
        q_THD, k_TJD = rotary(q_THD, angles.cos_TF, angles.sin_TF), rotary(k_TJD, angles.cos_TF, angles.sin_TF)
        kv_write(kv_BJKSD, k_TJD, v_TJD, group.block_ids_T, group.offsets_T)
        out_THD = paged_attention(q_THD, kv_BJKSD, group.plan, config.attention_scale, config.attention_soft_cap)
        return layer.output(out_THD.view(h_TE.shape[0], num_heads * head_dim))

    def _logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        x_RE = self._norm(x_RE, self.weights.final_norm_E)
        logits_RV = functional.linear(x_RE, self.weights.head_VE)
        if self.config.logits_soft_cap is not None:
            logits_RV.div_(self.config.logits_soft_cap).tanh_().mul_(self.config.logits_soft_cap)
        return logits_RV.float()

    def _norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, gain, self.config.rms_norm_eps)

    def _angles(self, spec: RotarySpec, positions_T: torch.Tensor) -> Angles:
        angles_TF = positions_T[:, None].float() * self._frequencies[spec]
        factor = spec.attention_factor
        return Angles((angles_TF.cos() * factor).to(self.dtype), (angles_TF.sin() * factor).to(self.dtype))
