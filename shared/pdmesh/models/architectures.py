"""Names of the architectures that pdmesh runs, apart from their code, so that a service without torch can refuse others."""

from collections.abc import Sequence
from typing import Any

from pdmesh.errors import ConfigError

MODEL_TYPES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Hugging Face's `model_type` -> its class; `registry` knows how each one's configuration is read."""
SUPPORTED = frozenset(MODEL_TYPES.values())
_GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
    "gemma3_text": _GEMMA
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "max_position_embeddings": 131072},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
"""What a config.json means that is silent, by model_type, as transformers has it; a null is not silent."""


def supported_architecture(names: Sequence[str], model: str) -> str:
    """The first of a checkpoint's `architectures`, or model types, that runs here. Raises ConfigError that lists them."""
    for name in names:
        if name in SUPPORTED:
            return name
        if name in MODEL_TYPES:
            return MODEL_TYPES[name]
    found = names[0] if names else "of unknown name"
    raise ConfigError(f"{model}: architecture {found} is not supported; supported: {', '.join(sorted(SUPPORTED))}")
