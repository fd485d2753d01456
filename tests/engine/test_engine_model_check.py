"""What a model's configuration alone shows to be impossible is refused before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.model_check import check_model
from pdmesh.errors import ConfigError
from pdmesh.models.ggml_types import GGMLType
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import make_tiny
from support.tiny_packed import make_tiny_packed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama_tied", tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize(
    "settings", [{"backend": "cpu"}, {"cpu_isa": "avx2"}, {"kv_cache_dtype": "int8_per_token_head"}], ids=str
)
def test_heads_that_the_library_cannot_hold_are_refused_where_it_must_serve(
    model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 512}))
    name, value = next(iter(settings.items()))
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} {value}: .* up to 256; .* head_dim is 512"):
        check_model(EngineConfig(model=str(tmp_path), **settings))
    check_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("kind", [GGMLType.Q4_1, GGMLType.Q5_0, None], ids=str)
def test_a_quantised_checkpoint_is_not_quantised_again(model: Path, tmp_path: Path, kind: GGMLType | None) -> None:
    if kind is None:
        path, _ = make_tiny_packed(model, tmp_path, "gptq")
    else:
        path = make_tiny_gguf(model, tmp_path / "model.gguf", kind=kind)
    with pytest.raises(ConfigError, match=r"quantization int8_weight_only: .* is quantised already"):
        check_model(EngineConfig(model=str(path), quantization="int8_weight_only"))
    check_model(EngineConfig(model=str(path), kv_cache_dtype="int8_per_token_head"))


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.BF16, None], ids=str)
def test_one_in_plain_numbers_may_be(model: Path, tmp_path: Path, kind: GGMLType | None) -> None:
    path = model if kind is None else make_tiny_gguf(model, tmp_path / "model.gguf", kind=kind)
    check_model(EngineConfig(model=str(path), quantization="int8"))


@pytest.mark.parametrize(
    ("kind", "is_fit"),
    [
        ("gptq", True),
        (GGMLType.Q4_0, True),
        (GGMLType.Q4_1, True),
        (GGMLType.Q8_0, False),
        (GGMLType.BF16, False),
        ("plain", False),
    ],
    ids=str,
)
def test_activations_are_quantised_for_weights_in_four_bits(
    model: Path, tmp_path: Path, kind: GGMLType | str, is_fit: bool
) -> None:
    if isinstance(kind, GGMLType):
        path = make_tiny_gguf(model, tmp_path / "model.gguf", kind=kind)
    else:
        path = make_tiny_packed(model, tmp_path, "gptq")[0] if kind == "gptq" else model
    config = EngineConfig(model=str(path), quantization="int8_activations")
    if is_fit:
        check_model(config)
        return
    with pytest.raises(ConfigError, match=r"quantization int8_activations: .* has no weights that are kept in 4 bits"):
        check_model(config)
