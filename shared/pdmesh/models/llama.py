"""The Llama family: Llama, Mistral, Qwen2, Qwen3. Pre-norm blocks of grouped-query attention and a gated feed-forward.

The legend: T tokens of a step, R of them with logits, E hidden, H query heads, J key-value heads, D head_dim, F rotary
frequencies (D/2), I intermediate, V vocabulary; B blocks, K key and value, S slots of a block, in the pool.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from pdmesh.models.model_config import ModelConfig
from pdmesh.models.step import ModelStep
from pdmesh_kernels.kv_write import kv_write
from pdmesh_kernels.paged_attention import paged_attention
from pdmesh_kernels.rms_norm import rms_norm
from pdmesh_kernels.rotary import inverse_frequencies, rotary
from pdmesh_kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x Wᵀ + b."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    window: int | None
    attention_norm_E: torch.Tensor
    qkv: Linear
    """E -> (H + 2 J) D: queries, keys, values."""
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    output: Linear
    mlp_norm_E: torch.Tensor
    gate_up: Linear
    """E -> 2 I: gate, up."""
    down: Linear


class LlamaModel:
    """Owns its weights, uninitialised until every one of `targets` is filled."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype
        self._targets: dict[str, torch.Tensor] = {}
        self.embedding_VE = self._weight("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.final_norm_E = self._weight("model.norm.weight", config.hidden_size)
        self.head_VE = self.embedding_VE
        if not config.tied_embeddings:
            self.head_VE = self._weight("lm_head.weight", config.vocab_size, config.hidden_size)
        self.frequencies_F = inverse_frequencies(config.rotary)

    @property
    def targets(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> the memory that its tensor belongs into, often part of a fused one."""
        return self._targets

    def forward(self, step: ModelStep, kv_BLJKSD: torch.Tensor) -> torch.Tensor:
        """Write the step's keys and values into the pool; return logits, float32 [R, V]."""
        angles_TF = step.positions_T[:, None].float() * self.frequencies_F
        factor = self.config.rotary.attention_factor
        cos_TF, sin_TF = (angles_TF.cos() * factor).to(self.dtype), (angles_TF.sin() * factor).to(self.dtype)
        eps = self.config.rms_norm_eps
        x_TE = functional.embedding(step.token_ids_T, self.embedding_VE)
        for index, layer in enumerate(self.layers):
            h_TE = rms_norm(x_TE, layer.attention_norm_E, eps)
            x_TE += self._attention(h_TE, layer, step, kv_BLJKSD[:, index], cos_TF, sin_TF)
            h_TE = rms_norm(x_TE, layer.mlp_norm_E, eps)
            x_TE += layer.down(silu_mul(layer.gate_up(h_TE)))
        x_RE = rms_norm(x_TE[step.logits_index_R], self.final_norm_E, eps)
        return functional.linear(x_RE, self.head_VE).float()

    def _attention(
        self,
        h_TE: torch.Tensor,
        layer: Layer,
        step: ModelStep,
        kv_BJKSD: torch.Tensor,
        cos_TF: torch.Tensor,
        sin_TF: torch.Tensor,
    ) -> torch.Tensor:
        config = self.config
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_THD = layer.qkv(h_TE).view(h_TE.shape[0], -1, head_dim)
        q_THD, k_TJD, v_TJD = torch.split(qkv_THD, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD = rms_norm(q_THD, layer.q_norm_D, config.rms_norm_eps)
            k_TJD = rms_norm(k_TJD, layer.k_norm_D, config.rms_norm_eps)
        q_THD, k_TJD = rotary(q_THD, cos_TF, sin_TF), rotary(k_TJD, cos_TF, sin_TF)
        kv_write(kv_BJKSD, k_TJD, v_TJD, step.block_ids_T, step.offsets_T)
        out_THD = paged_attention(q_THD, kv_BJKSD, step.plans[layer.window], head_dim**-0.5)
        return layer.output(out_THD.view(h_TE.shape[0], num_heads * head_dim))

    # ---- weights ---------------------------------------------------------------------------------

    def _layer(self, index: int) -> Layer:
        config, at = self.config, f"model.layers.{index}"
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        halves = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        has_qk_norm = config.qk_norm
        return Layer(
            window=config.windows[index],
            attention_norm_E=self._weight(f"{at}.input_layernorm.weight", config.hidden_size),
            qkv=self._linear(f"{at}.self_attn", heads, config.hidden_size, config.qkv_bias),
            q_norm_D=self._weight(f"{at}.self_attn.q_norm.weight", config.head_dim) if has_qk_norm else None,
            k_norm_D=self._weight(f"{at}.self_attn.k_norm.weight", config.head_dim) if has_qk_norm else None,
            output=self._linear(f"{at}.self_attn", {"o_proj": config.hidden_size}, q_size, config.output_bias),
            mlp_norm_E=self._weight(f"{at}.post_attention_layernorm.weight", config.hidden_size),
            gate_up=self._linear(f"{at}.mlp", halves, config.hidden_size, config.mlp_bias),
            down=self._linear(
                f"{at}.mlp", {"down_proj": config.hidden_size}, config.intermediate_size, config.mlp_bias
            ),
        )

    def _weight(self, name: str, *shape: int) -> torch.Tensor:
        self._targets[name] = torch.empty(shape, dtype=self.dtype)
        return self._targets[name]

    def _linear(self, prefix: str, parts: dict[str, int], num_in: int, has_bias: bool) -> Linear:
        """Make one projection of several checkpoint ones, `parts` name -> rows."""
        sizes = list(parts.values())
        weight = torch.empty(sum(sizes), num_in, dtype=self.dtype)
        bias = torch.empty(sum(sizes), dtype=self.dtype) if has_bias else None
        for name, rows in zip(parts, torch.split(weight, sizes), strict=True):
            self._targets[f"{prefix}.{name}.weight"] = rows
        if bias is not None:
            for name, rows in zip(parts, torch.split(bias, sizes), strict=True):
                self._targets[f"{prefix}.{name}.bias"] = rows
        return Linear(weight, bias)
