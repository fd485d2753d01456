"""A model's configuration as the model code reads it: checked, typed, defaults filled in."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint_quantization import parse_quantization
from pdmesh.models.rotary_config import parse_rotary
from pdmesh_kernels.rotary_frequencies import RotarySpec


class Activation(Enum):
    """Of the feed-forward's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


# Hugging Face's names.
ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama or Gemma family."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rotary: RotarySpec
    local_rotary: RotarySpec
    """Of layers with a window."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer, tokens, the query's included; None: full attention."""
    activation: Activation
    qkv_bias: bool = False
    output_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each query and key head before it is turned (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """Normalise what attention and feed-forward return before it is added, too (Gemma)."""
    unit_offset_norms: bool = False
    """A norm's gain is one more than the checkpoint says (Gemma)."""
    embedding_scale: float = 1.0
    attention_scale: float
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    tied_embeddings: bool = False


def common_fields(config: dict[str, Any], model: str) -> dict[str, Any]:
    """Return ModelConfig's fields that every architecture reads alike, from what `source.read_config` gave.

    Raises ConfigError, naming `model`, for a feature that is not supported.
    """
    parse_quantization(config, model)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if num_heads % num_kv_heads:
        raise ConfigError(f"{model}: {num_heads} attention heads are no multiple of {num_kv_heads} key-value heads")
    rotary = parse_rotary(config["rope_theta"], config["rope_scaling"], config, model)
    local_theta, local_scaling = config["rope_local_theta"], config["rope_local_scaling"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rotary": rotary,
        "local_rotary": rotary if local_theta is None else parse_rotary(local_theta, local_scaling, config, model),
        "windows": (None,) * config["num_hidden_layers"],
        "activation": _activation(config, model),
        "attention_scale": config["head_dim"] ** -0.5,
        "tied_embeddings": config["tie_word_embeddings"],
    }


def _activation(config: dict[str, Any], model: str) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in ACTIVATIONS:
        raise ConfigError(f"{model}: hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
