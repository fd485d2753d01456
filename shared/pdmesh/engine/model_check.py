"""Whether a model can be served as configured, from its configuration alone: in milliseconds, without torch."""

from typing import Any

from pdmesh.config import EngineConfig
from pdmesh.config.contradictions import needs_cpu_library
from pdmesh.engine.host_memory import total_bytes
from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint_quantization import already_quantised, no_four_bits
from pdmesh.models.ggml_types import PLAIN_TYPES, GGMLType
from pdmesh.models.source import ModelSource, read_config, read_gguf_metadata, resolve
from pdmesh_kernels.cpu.limits import MAX_HEAD_DIM

FOUR_BITS = frozenset({GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K})
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
    if config.long_prefill_token_threshold > longest and not config.long_prefill_token_threshold_fits:
        raise ConfigError(
            f"long-prefill-token-threshold {config.long_prefill_token_threshold} is more than the {longest} tokens that the "
            f"model was made for: it must be in 1…{longest}, or 0 for none"
        )
    _check_library(config, source, model)
    _check_memory(config, model)
    return source


def _check_library(config: EngineConfig, source: ModelSource, model: dict[str, Any]) -> None:
    """Refuse what the CPU library cannot do with this model where nothing else may serve it."""
    needing = needs_cpu_library(config)
    if not needing:
        return
    head_dim = model["head_dim"]
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"{needing}: the CPU library's heads have an even number up to {MAX_HEAD_DIM}; this model's head_dim is {head_dim}"
        )
    if config.quantization == "int8_activations":
        if not _may_have_four_bits(source, model):
            raise no_four_bits(config.model)
    elif config.quantization != "none" and _is_quantised(source, model):
        raise already_quantised(config.model, config.quantization)


def _may_have_four_bits(source: ModelSource, model: dict[str, Any]) -> bool:
    """Whether some weights are in 4 bits; that they can be kept so is known only when they are read."""
    if source.kind == "hf":
        return (model.get("quantization_config") or {}).get("bits") == 4
    tensors = read_gguf_metadata(source.path).tensors.values()
    return any(tensor.type_id in FOUR_BITS for tensor in tensors)


def _is_quantised(source: ModelSource, model: dict[str, Any]) -> bool:
    if source.kind == "hf":
        return bool(model.get("quantization_config"))
    tensors = read_gguf_metadata(source.path).tensors.values()
    return any(tensor.type_id not in PLAIN_TYPES for tensor in tensors)


def _check_memory(config: EngineConfig, model: dict[str, Any]) -> None:
    """Refuse a pool that the machine does not have, or that could not hold the context in the smallest type that may be meant;
    the core knows exactly."""
    pool_bytes, most_bytes = config.kv_cache_memory_bytes, total_bytes()
    if pool_bytes > most_bytes:
        raise ConfigError(
            f"kv-cache-memory-bytes {pool_bytes} is more than all the memory there is, {most_bytes} bytes"
        )
    if model.get("sliding_window"):
        # Which layers keep less than everything is for who builds the model to say.
        return
    item_bytes = ITEM_BYTES.get(config.dtype, min(ITEM_BYTES.values())) if config.kv_cache_dtype == "auto" else 1
    token_bytes = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * item_bytes
    needed = token_bytes * max(config.max_model_len, config.block_size, 1)
    if 0 < pool_bytes < needed:
        raise ConfigError(
            f"kv-cache-memory-bytes {pool_bytes} is too little: {needed // token_bytes} tokens of this "
            f"model take {needed} bytes"
        )
