"""Which architectures pdmesh runs, and how each one's configuration is read."""

from collections.abc import Callable
from typing import Any

from pdmesh.models.architectures import supported_architecture
from pdmesh.models.model_config import ModelConfig, common_fields


def parse_model_config(config: dict[str, Any], model: str) -> ModelConfig:
    """Turn what `source.read_config` gave into a ModelConfig; raises ConfigError that lists what is supported."""
    known = supported_architecture(config.get("architectures") or [config["model_type"]], model)
    fields = common_fields(config, model) | ARCHITECTURES[known](config)
    windows = fields.pop("windows", None) or (None,) * fields["num_layers"]
    return ModelConfig(architecture=known, windows=windows, **fields)


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _windows_of_later_layers(config)}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True, "windows": _windows_of_later_layers(config)}


def _mistral(config: dict[str, Any]) -> dict[str, Any]:
    return {"windows": (config.get("sliding_window"),) * config["num_hidden_layers"]}


def _windows_of_later_layers(config: dict[str, Any]) -> tuple[int | None, ...] | None:
    if not config.get("use_sliding_window", False):
        return None
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    first = config.get("max_window_layers", num_layers)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


ARCHITECTURES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
"""Each of `architectures.SUPPORTED` -> the ModelConfig fields that only it decides."""
