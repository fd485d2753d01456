"""Which architectures pdmesh runs, and how each one's configuration is read."""

from collections.abc import Callable
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.models.architectures import supported_architecture
from pdmesh.models.layer_windows import same_window, windows_by_pattern, windows_of_later_layers
from pdmesh.models.model_config import ModelConfig, common_fields


def parse_model_config(config: dict[str, Any], model: str) -> ModelConfig:
    """Turn what `source.read_config` gave into a ModelConfig; raises ConfigError that lists what is supported."""
    known = supported_architecture(config.get("architectures") or [config["model_type"]], model)
    fields = common_fields(config, model) | ARCHITECTURES[known](config, model)
    return ModelConfig(architecture=known, **fields)


def _llama(config: dict[str, Any], model: str) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _qwen2(config: dict[str, Any], model: str) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": windows_of_later_layers(config, model)}


def _qwen3(config: dict[str, Any], model: str) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    windows = windows_of_later_layers(config, model)
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "windows": windows}


def _mistral(config: dict[str, Any], model: str) -> dict[str, Any]:
    return {"windows": same_window(config, model)}


def _gemma2(config: dict[str, Any], model: str) -> dict[str, Any]:
    cap = _soft_cap(config, "attn_logit_softcapping", model)
    return _gemma(config, model) | {"windows": windows_by_pattern(config, model, 2), "attention_soft_cap": cap}


def _gemma3(config: dict[str, Any], model: str) -> dict[str, Any]:
    # attn_logit_softcapping is not for this one: no checkpoint sets it, and transformers would not heed it.
    windows = windows_by_pattern(config, model, config.get("sliding_window_pattern", 6))
    return _gemma(config, model) | {"windows": windows, "qk_norm": True}


def _gemma(config: dict[str, Any], model: str) -> dict[str, Any]:
    if config.get("use_bidirectional_attention"):
        raise ConfigError(f"{model}: use_bidirectional_attention is not supported; supported: causal attention")
    bias = bool(config.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "post_norms": True,
        "unit_offset_norms": True,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "attention_scale": _positive(config, "query_pre_attn_scalar", model) ** -0.5,
        "logits_soft_cap": _soft_cap(config, "final_logit_softcapping", model),
    }


def _soft_cap(config: dict[str, Any], key: str, model: str) -> float | None:
    return None if config.get(key) is None else _positive(config, key, model)


def _positive(config: dict[str, Any], key: str, model: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{model}: {key} must be a number more than 0, is {value!r}")
    return float(value)


ARCHITECTURES: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
"""Each of `architectures.SUPPORTED` -> the ModelConfig fields that only it decides."""
