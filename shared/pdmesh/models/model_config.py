"""A model's configuration as the model code reads it: checked, typed, defaults filled in."""

import math
from dataclasses import dataclass
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh_kernels.rotary import RotaryScaling, RotarySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family."""

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
    qkv_bias: bool = False
    output_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Normalise each query and key head before it is turned (Qwen3)."""
    tied_embeddings: bool = False
    windows: tuple[int | None, ...]
    """Sliding window of each layer, tokens; None: full attention."""


def common_fields(config: dict[str, Any], model: str) -> dict[str, Any]:
    """Return ModelConfig's fields that every architecture reads alike, from what `source.read_config` gave.

    Raises ConfigError, naming `model`, for a feature that is not supported.
    """
    _refuse_unsupported(config, model)
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if num_heads % num_kv_heads:
        raise ConfigError(f"{model}: {num_heads} attention heads are no multiple of {num_kv_heads} key-value heads")
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
        "rotary": _rotary(config, model),
        "tied_embeddings": config["tie_word_embeddings"],
    }


def _refuse_unsupported(config: dict[str, Any], model: str) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ConfigError(f"{model}: quantisation {method!r} is not supported; use an unquantised or a GGUF checkpoint")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{model}: hidden_act {activation!r} is not supported; supported: silu")
    rope = config["rope_scaling"] or {}
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ConfigError(f"{model}: partial_rotary_factor {partial} is not supported; supported: 1.0")


def _rotary(config: dict[str, Any], model: str) -> RotarySpec:
    rope: dict[str, Any] = config["rope_scaling"] or {}
    name = rope.get("rope_type", RotaryScaling.DEFAULT.value)
    try:
        scaling = RotaryScaling(name)
    except ValueError as exc:
        supported = ", ".join(kind.value for kind in RotaryScaling)
        raise ConfigError(f"{model}: rope type {name!r} is not supported; supported: {supported}") from exc
    fields: dict[str, Any] = {"head_dim": config["head_dim"], "theta": config["rope_theta"], "scaling": scaling}
    try:
        fields |= _scaling_fields(scaling, rope, config)
    except KeyError as exc:
        raise ConfigError(f"{model}: rope type {name!r} needs {exc} in the model's rope_scaling") from exc
    return RotarySpec(**fields)


def _scaling_fields(scaling: RotaryScaling, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    match scaling:
        case RotaryScaling.DEFAULT | RotaryScaling.DYNAMIC:
            return {}
        case RotaryScaling.LINEAR:
            return {"factor": float(rope["factor"])}
        case RotaryScaling.FREQ_FACTORS:
            return {"factors": tuple(rope["factors"])}
        case RotaryScaling.LLAMA3:
            return {
                "factor": float(rope["factor"]),
                "low_freq_factor": float(rope["low_freq_factor"]),
                "high_freq_factor": float(rope["high_freq_factor"]),
                "original_max_positions": int(rope["original_max_position_embeddings"]),
            }
        case RotaryScaling.YARN:
            original = int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
            factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
            return {
                "factor": factor,
                "original_max_positions": original,
                "beta_fast": float(rope.get("beta_fast") or 32.0),
                "beta_slow": float(rope.get("beta_slow") or 1.0),
                "truncate": bool(rope.get("truncate", True)),
                "attention_factor": _yarn_attention_factor(rope, factor),
            }


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)
