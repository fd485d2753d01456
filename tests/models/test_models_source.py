"""Finding a model and reading its configuration: every wrong name or setting is one line that says what to do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdmesh.errors import ConfigError
from pdmesh.models.model_config import ModelConfig
from pdmesh.models.registry import parse_model_config
from pdmesh.models.source import read_config, resolve
from pdmesh_kernels.rotary_frequencies import RotaryScaling
from support.tiny_models import Kind, make_tiny


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "tiny-llama")


def change(folder: Path, **changes: Any) -> dict[str, Any]:
    """Rewrite config.json and return what `read_config` makes of it. None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return read_config(resolve(str(folder)))


def parsed(folder: Path, **changes: Any) -> ModelConfig:
    return parse_model_config(change(folder, **changes), str(folder))


def test_reading_a_configuration_needs_no_torch(llama: Path) -> None:
    code = f"import sys; from pdmesh.models.source import *; read_config(resolve({str(llama)!r})); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"


def test_a_directory_is_named_by_itself(llama: Path) -> None:
    source = resolve(str(llama))
    assert (source.kind, source.name, source.path) == ("hf", "tiny-llama", llama)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no model")
    for model, expected in [
        ("", "model: none given"),
        ("/no/such/place", "/no/such/place does not exist"),
        ("nowhere/model.gguf", r"nowhere/model\.gguf does not exist"),
        (str(tmp_path / "empty"), "empty has no config.json"),
        (str(tmp_path / "notes.txt"), r"notes\.txt is neither a \.gguf file nor a directory"),
        ("no such name", "no valid Hugging Face id"),
    ]:
        with pytest.raises(ConfigError, match=expected) as caught:
            resolve(model)
        assert "\n" not in caught.value.message


def test_a_directory_with_two_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"2 \.gguf files: name one"):
        resolve(str(tmp_path))


def test_broken_json_is_named(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        read_config(resolve(str(llama)))


def test_end_tokens_of_both_files_count(llama: Path) -> None:
    assert change(llama, eos_token_id=7)["eos_token_id"] == [1, 3, 7]
    (llama / "generation_config.json").unlink()
    assert change(llama, eos_token_id=[2, 7])["eos_token_id"] == [2, 7]


def test_rope_parameters_of_transformers_5_read_like_the_older_keys(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path / "llama3")
    old = read_config(resolve(str(folder)))
    new = change(
        folder, rope_theta=None, rope_scaling=None, rope_parameters=old["rope_scaling"] | {"rope_theta": 500000.0}
    )
    assert (
        (new["rope_theta"], new["rope_scaling"])
        == (old["rope_theta"], old["rope_scaling"])
        == (5e5, new["rope_scaling"])
    )


def test_missing_keys_are_named(llama: Path) -> None:
    with pytest.raises(ConfigError, match="lacks vocab_size"):
        change(llama, vocab_size=None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is not supported; supported: Gemma2ForCausalLM, Gemma3",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantisation 'fp8' is not supported"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope' is not supported; supported: default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_attention_heads": 5}, "5 attention heads are no multiple of 2"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(llama: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parsed(llama, **changes)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": False, "windows": (None, None)}),
        ("qwen2", {"qkv_bias": True, "output_bias": False, "mlp_bias": False, "head_dim": 16}),
        ("qwen3", {"qkv_bias": False, "qk_norm": True, "head_dim": 32}),
        ("mistral", {"qkv_bias": False, "windows": (20, 20), "head_dim": 32}),
    ],
)
def test_each_architecture_reads_its_own_keys(tmp_path: Path, kind: Kind, expected: dict[str, object]) -> None:
    config = parsed(make_tiny(kind, tmp_path / kind))
    assert {name: getattr(config, name) for name in expected} == expected


def test_qwen2_slides_only_from_the_layer_that_it_says(tmp_path: Path) -> None:
    folder = make_tiny("qwen2", tmp_path / "qwen2")
    config = parsed(folder, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    assert config.windows == (None, 9)


def test_yarn_defaults_are_those_of_the_paper(llama: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    rotary = parsed(llama, rope_scaling=scaling).rotary
    assert (rotary.scaling, rotary.beta_fast, rotary.beta_slow) == (RotaryScaling.YARN, 32.0, 1.0)
    assert rotary.attention_factor == pytest.approx(1.1386294)
