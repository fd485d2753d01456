"""AWQ and GPTQ checkpoints: the numbers that they mean, as plain weights and as codes, and what is refused."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pdmesh.engine.backend import ProgressCallback
from pdmesh.engine.cpu_backend import CpuBackend
from pdmesh.errors import ConfigError
from pdmesh.models.checkpoint_quantization import parse_quantization
from pdmesh.models.packed_word_weights import PackedWordWeights
from pdmesh.models.safetensors_weights import SafetensorsWeights
from support.sequences import LoadedBackend, Sequence
from support.tiny_models import make_tiny
from support.tiny_packed import Layout, make_tiny_packed

PROMPT = list(range(5, 40))
LAYOUTS: tuple[tuple[Layout, dict[str, int | bool]], ...] = (
    ("awq", {}),
    ("awq", {"group": 64}),
    ("gptq", {}),
    ("gptq", {"group": -1}),
    ("gptq", {"is_symmetric": True}),
    ("gptq", {"is_act_order": True}),
    ("gptq", {"bits": 8, "is_symmetric": True}),
    ("gptq", {"bits": 8}),
    ("gptq_v2", {}),
)


def logits_of(model: Path) -> torch.Tensor:
    loaded = LoadedBackend(str(model))
    try:
        return loaded.step([(Sequence(PROMPT), len(PROMPT))])
    finally:
        loaded.close()


def open_packed(folder: Path) -> PackedWordWeights:
    quantization = parse_quantization(json.loads((folder / "config.json").read_text()), str(folder))
    assert quantization is not None
    return PackedWordWeights(SafetensorsWeights(folder), quantization)


@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_weights_are_those_of_the_format(layout: Layout, options: dict[str, int | bool], tmp_path: Path) -> None:
    # One kind of projection has 160 inputs, no multiple of 64: its last group is a part of one.
    packed, plain = make_tiny_packed(make_tiny("llama_tied", tmp_path / "made"), tmp_path, layout, **options)  # type: ignore[arg-type]
    wanted = load_file(plain / "model.safetensors")
    reader = open_packed(packed)
    try:
        assert reader.regions.keys() - {"model.layers.0.mlp.down_proj.bias"} == wanted.keys()
        has_kind = not options.get("is_act_order") and (options.get("bits") != 8 or bool(options.get("is_symmetric")))
        for name, weight in wanted.items():
            target = torch.full(weight.shape, torch.nan)
            reader.read(name, target)
            np.testing.assert_array_equal(target.numpy(), weight, err_msg=name)
            kind = reader.quantised_kind(name)
            assert (kind is not None) == (has_kind and "_proj" in name)
            if kind is not None:
                assert kind.bits == options.get("bits", 4)
                assert kind.is_symmetric == bool(options.get("is_symmetric"))
                np.testing.assert_array_equal(reader.read_quantised(name).dequantised(), weight)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        ("awq", {}, ""),
        ("awq", {"group": 16}, "groups of 16, no multiple of 32"),
        ("gptq", {"is_act_order": True}, "reordered groups"),
        ("gptq", {"bits": 8}, "8 bits with zero points"),
    ],
    ids=str,
)
def test_what_is_kept_in_more_bits_than_it_has_is_told(
    layout: Layout,
    options: dict[str, int | bool],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A checkpoint in groups of 16 took four times its memory and time, and nothing said so."""
    monkeypatch.setattr("pdmesh_kernels.cpu.weight_folder.cache_folder", lambda: tmp_path / "cache")
    packed, _ = make_tiny_packed(make_tiny("llama_tied", tmp_path / "made"), tmp_path, layout, **options)  # type: ignore[arg-type]
    num_projections = 4 * json.loads((packed / "config.json").read_text())["num_hidden_layers"]
    # A second start finds them packed.
    for dtype in ("bfloat16", "bfloat16", "float32"):
        caplog.clear()
        with closing(CpuBackend(1)) as backend:
            info = backend.load(str(packed), dtype, None, ProgressCallback())
        is_told = bool(reason) and dtype == "bfloat16"
        assert info.expanded_weights == ({reason: num_projections} if is_told else {})
        lines = [record.message for record in caplog.records if "kept in bfloat16" in record.message]
        assert len(lines) == is_told
        assert all(f"{num_projections} of {num_projections + 1} weight" in line and reason in line for line in lines)


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_a_packed_checkpoint_gives_the_logits_of_its_plain_numbers(layout: Layout, tmp_path: Path) -> None:
    packed, plain = make_tiny_packed(make_tiny("qwen2", tmp_path / "made"), tmp_path, layout)
    found = logits_of(packed)
    assert torch.equal(found, logits_of(plain))
    assert not torch.equal(found, logits_of(tmp_path / "made"))


def test_fingerprints_differ_by_what_the_words_mean(tmp_path: Path) -> None:
    packed, _ = make_tiny_packed(make_tiny("llama_tied", tmp_path / "made"), tmp_path, "gptq")
    first = LoadedBackend(str(packed))
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (packed / "config.json").write_text(json.dumps(config))
    second = LoadedBackend(str(packed))
    try:
        assert first.info.fingerprint != second.info.fingerprint
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes' is not supported; supported: awq, gptq"),
        ({"bits": 3}, r"quantization_config\.bits 3 is not supported for gptq; supported: 4 and 8"),
        ({"quant_method": "awq", "bits": 8}, r"bits 8 is not supported for awq; supported: 4$"),
        ({"quant_method": "awq", "version": "gemv"}, r"quantization_config\.version 'gemv' is not supported"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"dynamic": {"-:.*": {}}}, r"quantization_config\.dynamic"),
        ({"group_size": 0}, r"group_size must be -1 or a whole number above 0, is 0"),
        ({"group_size": 64}, r"down_proj\.qzeros is \[5, 8\], but 4 bits in groups of 64 ask for \[3, 8\]"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    packed, _ = make_tiny_packed(make_tiny("llama_tied", tmp_path / "made"), tmp_path, "gptq")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= change
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        LoadedBackend(str(packed))


def test_broken_tensors_are_named(tmp_path: Path) -> None:
    packed, _ = make_tiny_packed(make_tiny("llama_tied", tmp_path / "made"), tmp_path, "gptq")
    whole = load_file(packed / "model.safetensors")
    stem = "model.layers.0.mlp.up_proj"
    broken = {
        "scales is missing": {name: value for name, value in whole.items() if name != f"{stem}.scales"},
        "qweight is torch.float32, must be int32": whole
        | {f"{stem}.qweight": whole[f"{stem}.qweight"].astype(np.float32)},
        "g_idx names groups that there are not": whole | {f"{stem}.g_idx": whole[f"{stem}.g_idx"] + 1},
        "down_proj.bias.* not expected": whole | {"model.layers.0.mlp.down_proj.bias": np.ones(64, dtype=np.float16)},
    }
    for message, tensors in broken.items():
        save_file(tensors, packed / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            LoadedBackend(str(packed))
