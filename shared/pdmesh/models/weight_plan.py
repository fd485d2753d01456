"""Which tensors of a checkpoint a decoder needs, and which of them are fused into one: a pure function of its configuration."""

from collections.abc import Iterator
from dataclasses import dataclass

from pdmesh.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x Wᵀ + b, made of one or more checkpoint projections whose outputs lie behind each other."""

    name: str
    parts: dict[str, int]
    """Checkpoint name without `.weight` -> outputs."""
    num_inputs: int
    has_bias: bool = False
    is_gated: bool = False
    """Two parts of equal size, gate and up."""

    @property
    def num_outputs(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Gain:
    """A norm's factors."""

    name: str
    """Checkpoint name without `.weight`."""
    size: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One block; what a family does not have is None."""

    attention_norm: Gain
    qkv: Projection
    q_norm: Gain | None
    k_norm: Gain | None
    output: Projection
    attention_post_norm: Gain | None
    mlp_norm: Gain
    gate_up: Projection
    down: Projection
    mlp_post_norm: Gain | None

    def gains(self) -> Iterator[Gain]:
        norms = (
            self.attention_norm,
            self.q_norm,
            self.k_norm,
            self.attention_post_norm,
            self.mlp_norm,
            self.mlp_post_norm,
        )
        yield from (gain for gain in norms if gain is not None)

    def projections(self) -> tuple[Projection, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """A whole model's."""

    embedding: Projection
    """Its outputs are the vocabulary."""
    layers: tuple[LayerPlan, ...]
    final_norm: Gain
    head: Projection
    """The embedding itself where they are tied."""

    def projections(self) -> Iterator[Projection]:
        yield self.embedding
        for layer in self.layers:
            yield from layer.projections()
        if self.head is not self.embedding:
            yield self.head

    def gains(self) -> Iterator[Gain]:
        for layer in self.layers:
            yield from layer.gains()
        yield self.final_norm

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's checkpoint name -> shape."""
        shapes: dict[str, tuple[int, ...]] = {f"{gain.name}.weight": (gain.size,) for gain in self.gains()}
        for projection in self.projections():
            for name, rows in projection.parts.items():
                shapes[f"{name}.weight"] = (rows, projection.num_inputs)
                if projection.has_bias:
                    shapes[f"{name}.bias"] = (rows,)
        return shapes


def plan_weights(config: ModelConfig) -> WeightPlan:
    """Return what `config` asks for, under Hugging Face's names."""
    embedding = Projection("embedding", {"model.embed_tokens": config.vocab_size}, config.hidden_size)
    head = embedding
    if not config.tied_embeddings:
        head = Projection("head", {"lm_head": config.vocab_size}, config.hidden_size)
    layers = tuple(_layer(config, index) for index in range(config.num_layers))
    return WeightPlan(embedding, layers, Gain("model.norm", config.hidden_size), head)


def _layer(config: ModelConfig, index: int) -> LayerPlan:
    at, name = f"model.layers.{index}", f"layers.{index}"
    hidden_size, head_dim, inner_size = config.hidden_size, config.head_dim, config.intermediate_size
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    heads = {f"{at}.self_attn.{key}_proj": size for key, size in (("q", q_size), ("k", kv_size), ("v", kv_size))}
    halves = {f"{at}.mlp.{key}_proj": inner_size for key in ("gate", "up")}
    # Where there are post-norms, the one behind attention has the name that otherwise means the one before the MLP.
    has_post = config.post_norms
    before_mlp = "pre_feedforward_layernorm" if has_post else "post_attention_layernorm"
    return LayerPlan(
        attention_norm=Gain(f"{at}.input_layernorm", hidden_size),
        qkv=Projection(f"{name}.qkv", heads, hidden_size, config.qkv_bias),
        q_norm=Gain(f"{at}.self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=Gain(f"{at}.self_attn.k_norm", head_dim) if config.qk_norm else None,
        output=Projection(f"{name}.output", {f"{at}.self_attn.o_proj": hidden_size}, q_size, config.output_bias),
        attention_post_norm=Gain(f"{at}.post_attention_layernorm", hidden_size) if has_post else None,
        mlp_norm=Gain(f"{at}.{before_mlp}", hidden_size),
        gate_up=Projection(f"{name}.gate_up", halves, hidden_size, config.mlp_bias, is_gated=True),
        down=Projection(f"{name}.down", {f"{at}.mlp.down_proj": hidden_size}, inner_size, config.mlp_bias),
        mlp_post_norm=Gain(f"{at}.post_feedforward_layernorm", hidden_size) if has_post else None,
    )
