"""`auto` is the CPU library where it can serve the model, and says why where it is not."""

import contextlib
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine import backends
from pdmesh.engine.backend import ProgressCallback
from pdmesh.engine.backends import ChosenBackend, make_backend
from pdmesh.engine.server import preflight
from pdmesh.errors import ConfigError
from pdmesh.models.ggml_types import GGMLType
from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import LibraryError
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import make_tiny
from support.tiny_packed import make_tiny_packed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("llama", tmp_path_factory.mktemp("models") / "llama"))


def choose(model: str, **settings: Any) -> ChosenBackend:
    chosen = make_backend(EngineConfig(model=model, cpu_threads=1, **settings))
    chosen.backend.close()
    return chosen


def no_library() -> None:
    raise LibraryError("no C++ compiler was found")


def test_auto_is_the_cpu_library(model: str) -> None:
    chosen = choose(model)
    assert (chosen.backend.name, chosen.fallback) == ("cpu", "")
    assert chosen.backend.instruction_set


def test_the_instruction_set_is_the_one_that_was_asked_for(model: str) -> None:
    assert choose(model, cpu_isa="avx2").backend.instruction_set == "avx2"


@pytest.mark.parametrize(
    ("settings", "cause", "words"),
    [
        ({"dtype": "float16"}, "dtype", "dtype float16"),
        ({"block_size": 16}, "block_size", "block-size 16 is not a multiple of 32"),
    ],
)
def test_auto_falls_back_to_pytorch_and_says_why(
    model: str, settings: dict[str, Any], cause: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = choose(model, **settings)
    assert (chosen.backend.name, chosen.fallback) == ("torch", cause)
    [line] = [record.getMessage() for record in caplog.records if record.name == backends.__name__]
    assert words in line


def test_auto_falls_back_for_heads_that_the_library_cannot_hold(model: str, tmp_path: Path) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 512}))
    assert choose(str(tmp_path)).fallback == "head_dim"


def test_auto_falls_back_without_a_library(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "load", no_library)
    chosen = choose(model)
    assert (chosen.backend.name, chosen.fallback) == ("torch", "no_library")
    assert "no C++ compiler was found" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "int8"},
        {"quantization": "int8_activations"},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"cpu_isa": "avx2"},
    ],
)
def test_what_only_the_library_can_is_not_dropped_quietly(
    model: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "load", no_library)
    name, value = next(iter(settings.items()))
    with pytest.raises(
        ConfigError, match=f"{name.replace('_', '-')} {value} needs the CPU library.*no C\\+\\+ compiler"
    ):
        choose(model, **settings)


@pytest.mark.parametrize("kind", ["Q4_1, values Q5_1", "Q5_0", "gptq", "gptq act order"])
@pytest.mark.parametrize("quantization", ["int8", "int8_weight_only"])
def test_a_quantised_checkpoint_is_not_quantised_again(
    tmp_path: Path, kind: str, quantization: Literal["int8", "int8_weight_only"]
) -> None:
    """Projections that are kept in bf16, as in mixtures such as Q4_K_M, were made int8, others were not, and nothing said so."""
    plain, path = make_tiny("llama_tied", tmp_path / "made"), tmp_path / "model.gguf"
    if kind.startswith("gptq"):
        path, _ = make_tiny_packed(plain, tmp_path, "gptq", is_act_order=kind != "gptq")
    elif kind == "Q5_0":
        make_tiny_gguf(plain, path, kind=GGMLType.Q5_0)
    else:
        make_tiny_gguf(plain, path, kind=GGMLType.Q4_1, value_kind=GGMLType.Q5_1)
    config = EngineConfig(model=str(path), cpu_threads=1, quantization=quantization)
    backend = make_backend(config).backend
    with (
        contextlib.closing(backend),
        pytest.raises(ConfigError, match=f"quantization {quantization}: .* is quantised already"),
    ):
        backend.load(config.model, "auto", None, ProgressCallback())


def test_torch_is_torch_without_a_fallback(model: str) -> None:
    chosen = choose(model, backend="torch")
    assert (chosen.backend.name, chosen.fallback) == ("torch", "")


def test_cpu_is_refused_where_it_cannot_serve(model: str) -> None:
    backend = make_backend(EngineConfig(model=model, backend="cpu", cpu_threads=1)).backend
    with contextlib.closing(backend), pytest.raises(ConfigError, match="dtype: 'float16' is not for the CPU library"):
        backend.load(model, "float16", None, ProgressCallback())


def test_an_instruction_set_that_the_processor_lacks_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old:
        isas = (Isa.AVX2,)

    monkeypatch.setattr(preflight, "load", Old)
    preflight.check_isa("avx2")
    with pytest.raises(ConfigError, match="cpu-isa amx: this processor has avx2"):
        preflight.check_isa("amx")
