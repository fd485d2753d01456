"""Tiny checkpoints with random weights and a working tokenizer, so that whole services run on them in a test.

Written with numpy, safetensors and tokenizers alone: seconds of transformers' import are for the tests that compare to it.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Kind = Literal["llama", "llama3", "llama_tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]
KINDS: tuple[Kind, ...] = ("llama", "llama3", "llama_tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")

HIDDEN = 64
INTERMEDIATE = 160
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
MAX_POSITIONS = 1024
SLIDING_WINDOW = 20
GEMMA = {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "sliding_window": SLIDING_WINDOW,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. A prefill computes the prompt; a decode goes on from there.",
    "Tell me a story about the sea, the wind and the old town. What is the capital of France?",
    "user assistant system message role content hello world one two three four five six seven eight nine ten",
    "Größe, déjà vu, 你好，世界, привет, ありがとう 0123456789 {}[]()<>+-*/=_#@!?;:",
)


def make_tiny(kind: Kind, folder: Path, *, seed: int = 0, num_shards: int = 1) -> Path:
    """Write a checkpoint of `kind` into `folder` (made when absent) and return it. Same seed, same bytes.

    float32, 2 layers (Gemma: 5, of which 2 see all and 3 a window), 4 heads over 2 KV heads, vocabulary of a few hundred,
    1024 positions. Weights are large enough that the greedy choice is seldom a tie.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = _write_tokenizer(folder)
    config = _config(kind, vocab_size)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3], "bos_token_id": 0}))
    _write_weights(folder, _weights(config, np.random.default_rng(seed)), num_shards)
    return folder


def _config(kind: Kind, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "vocab_size": vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    match kind:
        case "llama":
            special: dict[str, Any] = {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
        case "llama3":
            scaling = {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
            special = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": scaling}
        case "llama_tied":
            special = {"model_type": "llama", "tie_word_embeddings": True}
        case "qwen2":
            special = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": None}
        case "qwen3":
            special = {"model_type": "qwen3", "head_dim": 32, "attention_bias": False}
        case "mistral":
            special = {"model_type": "mistral", "head_dim": 32, "sliding_window": SLIDING_WINDOW}
        case "gemma2":
            special = GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
            special["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
        case "gemma3":
            special = GEMMA | {"model_type": "gemma3_text", "sliding_window_pattern": 2}
            special |= {"rope_theta": 50000.0, "rope_local_base_freq": 1000.0, "tie_word_embeddings": False}
    config |= special
    config["architectures"] = [config["model_type"].removesuffix("_text").capitalize() + "ForCausalLM"]
    return config


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    head_dim = config.get("head_dim") or HIDDEN // NUM_HEADS
    q_size, kv_size = NUM_HEADS * head_dim, NUM_KV_HEADS * head_dim
    qkv_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    out_bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    is_gemma = config["model_type"].startswith("gemma")

    def normal(*shape: int, scale: float = 0.15) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def gain(size: int) -> NDArray[np.float32]:
        return normal(size) + np.float32(not is_gemma)

    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], HIDDEN, scale=0.5),
        "model.norm.weight": gain(HIDDEN),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(config["vocab_size"], HIDDEN, scale=0.3)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights[f"{at}.input_layernorm.weight"] = gain(HIDDEN)
        weights[f"{at}.post_attention_layernorm.weight"] = gain(HIDDEN)
        if is_gemma:
            weights[f"{at}.pre_feedforward_layernorm.weight"] = gain(HIDDEN)
            weights[f"{at}.post_feedforward_layernorm.weight"] = gain(HIDDEN)
        linears = [
            ("self_attn.q_proj", q_size, HIDDEN, qkv_bias),
            ("self_attn.k_proj", kv_size, HIDDEN, qkv_bias),
            ("self_attn.v_proj", kv_size, HIDDEN, qkv_bias),
            ("self_attn.o_proj", HIDDEN, q_size, out_bias),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN, mlp_bias),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN, mlp_bias),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE, mlp_bias),
        ]
        for name, num_out, num_in, has_bias in linears:
            weights[f"{at}.{name}.weight"] = normal(num_out, num_in)
            if has_bias:
                weights[f"{at}.{name}.bias"] = normal(num_out)
        if config["model_type"] in ("qwen3", "gemma3_text"):
            weights[f"{at}.self_attn.q_norm.weight"] = gain(head_dim)
            weights[f"{at}.self_attn.k_norm.weight"] = gain(head_dim)
    return weights


def _write_weights(folder: Path, weights: dict[str, NDArray[np.float32]], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: weights[name] for name in part}, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(folder: Path) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    size: int = tokenizer.get_vocab_size()
    return size
