"""Tiny GGUF files, written as llama.cpp's converter writes them, from the tiny checkpoints' weights."""

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pdmesh.models.ggml_types import GGMLType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tiny_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: GGMLType = GGMLType.F32,
    value_kind: GGMLType | None = None,
    rope_factors: list[float] | None = None,
) -> Path:
    """Convert a `make_tiny` checkpoint (not mistral) into `path`; matrices become `kind`, vectors stay F32.

    `value_kind`: for the projections of values, which llama.cpp's mixtures keep in more bits. Holds the vocabulary's tokens,
    but no merges: enough for the engine, not for a tokenizer.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = config["model_type"].removesuffix("_text")
    is_gemma = arch.startswith("gemma")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if is_gemma:
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(3)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if arch == "llama" and ".q_proj." in name:
            weight = _pairs(weight, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            weight = _pairs(weight, config["num_key_value_heads"])
        if is_gemma and name.endswith("norm.weight"):
            weight = weight + np.float32(1)
        wanted = value_kind if value_kind is not None and ".v_proj." in name else kind
        quantized = gguf.GGMLQuantizationType(wanted if weight.ndim == 2 else GGMLType.F32)
        writer.add_tensor(
            _gguf_name(name, is_gemma=is_gemma), gguf.quants.quantize(weight, quantized), raw_dtype=quantized
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _gguf_name(name: str, *, is_gemma: bool) -> str:
    names = NAMES | {"post_attention_layernorm": "post_attention_norm"} if is_gemma else NAMES
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"
