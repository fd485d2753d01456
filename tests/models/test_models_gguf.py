"""GGUF files: metadata, names, row order, quantised blocks, and what a broken file says."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pdmesh.errors import ConfigError
from pdmesh.models.ggml_types import GGMLType
from pdmesh.models.gguf_dequantize import BLOCK_FORMATS, dequantize
from pdmesh.models.gguf_metadata import read_gguf_metadata
from pdmesh.models.source import DEMO_MODEL, read_config, resolve
from support.sequences import LoadedBackend, Sequence
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import Kind, make_tiny

PROMPT = list(range(5, 60))


def logits_of(model: Path) -> torch.Tensor:
    loaded = LoadedBackend(str(model))
    try:
        return loaded.step([(Sequence(PROMPT), len(PROMPT))])
    finally:
        loaded.close()


@pytest.mark.parametrize("kind", ["llama_tied", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_same_logits_as_the_checkpoint_it_was_made_from(kind: Kind, tmp_path: Path) -> None:
    checkpoint = make_tiny(kind, tmp_path / "checkpoint")
    if kind.startswith("gemma"):
        # A GGUF file does not say it; it follows from the number of layers.
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": config["head_dim"]}))
    found = logits_of(make_tiny_gguf(checkpoint, tmp_path / "model.gguf"))
    torch.testing.assert_close(found, logits_of(checkpoint), rtol=1e-5, atol=1e-5)


def test_rope_factors_equal_llama3_scaling(tmp_path: Path) -> None:
    checkpoint = make_tiny("llama3", tmp_path / "checkpoint")
    # What llama.cpp's converter writes for factor 8, low 1, high 4, original context 128, theta 5e5, head_dim 16.
    wavelengths = [2 * np.pi * 500000.0 ** (2 * index / 16) for index in range(8)]
    shares = [min(1.0, max(0.0, (128 / length - 1) / 3)) for length in wavelengths]
    factors = [1 / ((1 - share) / 8 + share) for share in shares]
    assert factors[0] == 1.0
    assert 1.0 < factors[1] < 8.0
    assert factors[7] == 8.0
    found = logits_of(make_tiny_gguf(checkpoint, tmp_path / "model.gguf", rope_factors=factors))
    torch.testing.assert_close(found, logits_of(checkpoint), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [*BLOCK_FORMATS, GGMLType.BF16, GGMLType.F16, GGMLType.Q5_0], ids=lambda kind: kind.name
)
def test_dequantised_blocks_equal_those_of_gguf(kind: GGMLType) -> None:
    weights = np.random.default_rng(0).standard_normal((70, 4 * 32)).astype(np.float32)
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(kind))
    wanted = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind)))
    found = torch.full(weights.shape, torch.nan)
    dequantize(torch.from_numpy(raw.view(np.uint8).reshape(-1)), kind, found)
    assert torch.equal(found, wanted)
    assert (found - torch.from_numpy(weights)).abs().max() < 0.3


def test_dequantises_in_more_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.models.gguf_dequantize.CHUNK_BLOCKS", 7)
    test_dequantised_blocks_equal_those_of_gguf(GGMLType.Q4_1)


def test_quantised_file_gives_nearly_the_same_logits(tmp_path: Path) -> None:
    checkpoint = make_tiny("llama_tied", tmp_path / "checkpoint")
    found = logits_of(make_tiny_gguf(checkpoint, tmp_path / "model.gguf", kind=GGMLType.Q8_0))
    wanted = logits_of(checkpoint)
    assert not torch.equal(found, wanted)
    assert (found - wanted).norm() / wanted.norm() < 0.05


def test_configuration_of_the_demo_model() -> None:
    source = resolve(DEMO_MODEL)
    config = read_config(source)
    assert (source.kind, source.name) == ("gguf", DEMO_MODEL)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert (config["head_dim"], config["vocab_size"], config["rope_theta"]) == (64, 49152, 100000.0)
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == [2]


def test_end_tokens_of_a_turn_count_as_ends(tmp_path: Path) -> None:
    path = make_tiny_gguf(make_tiny("llama_tied", tmp_path / "checkpoint"), tmp_path / "model.gguf")
    assert read_config(resolve(str(path)))["eos_token_id"] == [1, 3]


def test_metadata_equals_that_of_gguf(tmp_path: Path) -> None:
    path = make_tiny_gguf(make_tiny("llama_tied", tmp_path / "checkpoint"), tmp_path / "model.gguf", kind=GGMLType.Q4_0)
    wanted = gguf.GGUFReader(path)
    found = read_gguf_metadata(path)
    assert found.values == {
        key: field.contents() for key, field in wanted.fields.items() if not key.startswith("GGUF.")
    }
    assert {name: (info.offset, info.type_id) for name, info in found.tensors.items()} == {
        tensor.name: (tensor.data_offset, int(tensor.tensor_type)) for tensor in wanted.tensors
    }


def test_every_truncation_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    whole = make_tiny_gguf(make_tiny("llama_tied", tmp_path / "checkpoint"), tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 10, 24, 60, 200, 900, 3000, len(whole) // 2, len(whole) - 100]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf") as caught:
            LoadedBackend(str(path))
        assert "\n" not in caught.value.message


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "garbage.gguf"
    for seed in range(50):
        path.write_bytes(b"GGUF\x03\x00\x00\x00" + np.random.default_rng(seed).bytes(400))
        with pytest.raises(ConfigError, match=r"garbage\.gguf"):
            read_gguf_metadata(path)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    checkpoint = make_tiny("qwen2", tmp_path / "checkpoint")
    config = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(config.replace('"qwen2"', '"rwkv7"'))
    with pytest.raises(ConfigError, match="rwkv7 is not supported; supported: Gemma2ForCausalLM, Gemma3"):
        LoadedBackend(str(make_tiny_gguf(checkpoint, tmp_path / "model.gguf")))


def test_the_types_are_those_that_gguf_knows() -> None:
    known = {kind.name: (int(kind), *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {kind.name: (int(kind), kind.block_items, kind.block_bytes) for kind in GGMLType} == known
