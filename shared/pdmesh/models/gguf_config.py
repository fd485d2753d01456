"""A GGUF file's key-values as a Hugging Face configuration. Free of torch."""

import struct
from typing import Any

from pdmesh.errors import ConfigError
from pdmesh.models.architectures import supported_architecture
from pdmesh.models.gguf_metadata import GGUFMetadata

ARCHITECTURES = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""general.architecture -> Hugging Face's. llama.cpp files Mistral under llama."""
# Gemma's largest scale scores by the hidden size's share of a head instead of head_dim; its files do not say so, and
# llama.cpp tells it by its layers as well.
LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
ROPE_FACTORS_TENSOR = "rope_freqs.weight"
F32 = 0


def gguf_config(metadata: GGUFMetadata) -> dict[str, Any]:
    """Translate. Keys as `source.read_config` promises.

    Raises ConfigError, for an architecture that is not supported before anything else.
    """
    arch = metadata.architecture
    name = supported_architecture([ARCHITECTURES.get(arch, arch)], str(metadata.path))
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else metadata.integer(f"{arch}.vocab_size")
    hidden_size = metadata.integer(f"{arch}.embedding_length")
    num_heads = metadata.integer(f"{arch}.attention.head_count")
    context = metadata.integer(f"{arch}.context_length")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    embedding = metadata.tensors.get("token_embd.weight")
    config = {
        "model_type": arch,
        "architectures": [name],
        "num_hidden_layers": metadata.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": metadata.integer(f"{arch}.attention.key_length", hidden_size // num_heads),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer(f"{arch}.feed_forward_length"),
        "vocab_size": embedding.shape[0] if embedding and len(embedding.shape) == 2 else vocab_size,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, arch, context),
        "rope_local_theta": None,
        "rope_local_scaling": None,
        "sliding_window": metadata.get(f"{arch}.attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in metadata.tensors,
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "hidden_act": "silu",
        "eos_token_id": list(dict.fromkeys(token for token in eos if isinstance(token, int))),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "dtype": None,
    }
    return config | _gemma(metadata, arch, config) if arch in LARGEST_GEMMA_LAYERS else config


def _gemma(metadata: GGUFMetadata, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    if num_layers == LARGEST_GEMMA_LAYERS[arch]:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "sliding_window": metadata.integer(f"{arch}.attention.sliding_window"),
        "attn_logit_softcapping": metadata.get(f"{arch}.attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get(f"{arch}.final_logit_softcapping"),
    }
    if arch == "gemma3":
        # Older converters write neither pattern nor local base: all models of this kind have the same.
        found["sliding_window_pattern"] = metadata.integer(f"{arch}.attention.sliding_window_pattern", 6)
        found["rope_local_theta"] = metadata.number(f"{arch}.rope.freq_base_swa", 10000.0)
    return found


def _rope_scaling(metadata: GGUFMetadata, arch: str, context: int) -> dict[str, Any] | None:
    if ROPE_FACTORS_TENSOR in metadata.tensors:
        return {"rope_type": "freq_factors", "factors": _rope_factors(metadata)}
    kind = metadata.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": metadata.number(f"{arch}.rope.scaling.factor", 1.0),
        "original_max_position_embeddings": metadata.integer(f"{arch}.rope.scaling.original_context_length", context),
    }


def _rope_factors(metadata: GGUFMetadata) -> list[float]:
    """Read the per-frequency divisors by which llama.cpp's converter writes Llama 3's rope scaling."""
    info = metadata.tensors[ROPE_FACTORS_TENSOR]
    if info.type_id != F32 or len(info.shape) != 1:
        raise ConfigError(f"{metadata.path}: tensor {info.name} must be one row of F32; convert the file again")
    with metadata.path.open("rb") as file:
        file.seek(info.offset)
        data = file.read(4 * info.shape[0])
    if len(data) != 4 * info.shape[0]:
        raise ConfigError(f"{metadata.path}: broken or truncated GGUF file (tensor {info.name}); download it again")
    return list(struct.unpack(f"<{info.shape[0]}f", data))
