"""Whether a model can be served as configured, from its configuration alone: in milliseconds, without torch."""

from typing import Any

from pdmesh.config import EngineConfig
from pdmesh.errors import ConfigError
from pdmesh.models.source import ModelSource, read_config, resolve

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_model(config: EngineConfig) -> ModelSource:
    """Find the model and see that it can be served as configured. Blocks; raises ConfigError."""
    if not config.model:
        raise ConfigError("model is not set: name a Hugging Face directory or id, or a GGUF file")
    source = resolve(config.model)
    model = read_config(source)
    longest = model["max_position_embeddings"]
    if config.max_model_len > longest:
        raise ConfigError(
            f"max-model-len {config.max_model_len} is more than the {longest} tokens that the model was made for"
        )
    _check_memory(config, model)
    return source


def _check_memory(config: EngineConfig, model: dict[str, Any]) -> None:
    """Refuse a pool that could not hold the context in the smallest type that may be meant; the core knows exactly."""
    if model.get("sliding_window"):
        # Which layers keep less than everything is for who builds the model to say.
        return
    item_bytes = ITEM_BYTES.get(config.dtype, min(ITEM_BYTES.values()))
    token_bytes = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * item_bytes
    needed = token_bytes * max(config.max_model_len, config.block_size, 1)
    if 0 < config.kv_cache_memory_bytes < needed:
        raise ConfigError(
            f"kv-cache-memory-bytes {config.kv_cache_memory_bytes} is too little: {needed // token_bytes} tokens of this "
            f"model take {needed} bytes"
        )
