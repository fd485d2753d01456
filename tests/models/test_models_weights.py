"""Loading checkpoints: shards, what is missing or left over, and fingerprints that differ exactly when results do."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from pdmesh.engine.backend import ProgressCallback
from pdmesh.engine.torch_backend import TorchBackend
from pdmesh.errors import ConfigError
from pdmesh.models import loading
from pdmesh.models.kv_layout import KVLayout
from pdmesh.models.loading import LoadedModel, load_model
from support.sequences import LoadedBackend, Sequence
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import SLIDING_WINDOW, make_tiny


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(str(folder), dtype, lambda fraction: None)


def edit(folder: Path, **changes: np.ndarray | None) -> None:
    """Set or (None) remove tensors; dots in names are written as double underscores."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del weights[key]
        else:
            weights[key] = value
    save_file(weights, folder / "model.safetensors")


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    whole, sharded = (
        load(make_tiny("qwen3", tmp_path / "whole")),
        load(make_tiny("qwen3", tmp_path / "s", num_shards=3)),
    )
    for name, target in whole.model.weights.targets.items():
        assert torch.equal(target, sharded.model.weights.targets[name]), name
    assert whole.fingerprints.model == sharded.fingerprints.model


def test_every_weight_is_filled(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    found = load(folder).model.weights.targets
    for name, wanted in load_file(folder / "model.safetensors").items():
        assert torch.equal(found[name], torch.from_numpy(wanted)), name


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "llama")
    edit(folder, extra__weight=np.zeros((2, 2), np.float32))
    with pytest.raises(ConfigError, match=r"tensor extra\.weight is not expected"):
        load(folder)
    edit(folder, extra__weight=None, model__norm__weight=np.zeros(7, np.float32))
    with pytest.raises(
        ConfigError, match=r"tensor model\.norm\.weight is \[7\], but its configuration asks for \[64\]"
    ):
        load(folder)
    edit(folder, model__norm__weight=None)
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight is missing"):
        load(folder)


def test_what_old_checkpoints_carry_along_is_ignored(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "llama")
    edit(
        folder,
        lm_head__weight=np.zeros((2, 2), np.float32),
        model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(8, np.float32),
    )
    load(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "llama")
    edit(folder, model__norm__weight=np.zeros(64, np.int8))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is I8; supported"):
        load(folder)


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", num_shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"00002-of-00002\.safetensors: broken or truncated"):
        load(folder)
    second.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no safetensors index"):
        load(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        load(folder)


def test_equal_files_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    assert (
        load(make_tiny("llama", tmp_path / "a")).fingerprints == load(make_tiny("llama", tmp_path / "b")).fingerprints
    )


def test_fingerprints_differ_by_weights_dtype_rope_and_encoding(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "llama")
    found = [load(folder).fingerprints.model, load(folder, torch.bfloat16).fingerprints.model]
    found.append(load(make_tiny_gguf(folder, tmp_path / "model.gguf")).fingerprints.model)
    found.append(load(make_tiny("llama_tied", tmp_path / "other", seed=1)).fingerprints.model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    found.append(load(folder).fingerprints.model)
    assert len(set(found)) == len(found)
    assert all(len(fingerprint) == 32 for fingerprint in found)


def test_weights_have_one_fingerprint_in_all_dtypes(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "llama")
    wide, narrow = (load(folder, dtype).fingerprints for dtype in (torch.float32, torch.bfloat16))
    assert wide.weights == narrow.weights
    assert wide.model != narrow.model
    assert load(make_tiny("llama_tied", tmp_path / "other", seed=1)).fingerprints.weights != wide.weights


def test_how_far_one_may_compute_is_not_in_the_fingerprint(tmp_path: Path) -> None:
    folder = make_tiny("llama_tied", tmp_path / "llama")
    before = load(folder).fingerprints.model
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    assert load(folder).fingerprints.model == before


def test_layout_fingerprints_differ_by_every_field() -> None:
    base = KVLayout(
        layers=(0, 1), window=None, num_layers=2, num_kv_heads=3, head_dim=8, dtype="float32", block_size=16
    )
    changes: list[dict[str, Any]] = [
        {"block_size": 32},
        {"dtype": "bfloat16"},
        {"num_layers": 3, "num_kv_heads": 2},
        {"window": 16},
        {"window": 32},
        {"head_dim": 16, "block_size": 8},
        {"layers": (0, 2)},
        {"layers": (0,)},
    ]
    others = [dataclasses.replace(base, **change) for change in changes]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(changes)
    assert base.block_bytes == 2 * 2 * 3 * 8 * 16 * 4


def test_a_block_holds_what_the_layout_says(tmp_path: Path) -> None:
    loaded = LoadedBackend(str(make_tiny("qwen2", tmp_path / "qwen2")), block_size=16)
    sequence = Sequence(list(range(10, 27)))
    loaded.step([(sequence, 17)])
    first, second = loaded.pool.blocks[sequence.blocks[0]].view(np.float32).reshape(2, 2, 2, 2, 16, 16)
    assert (first != 0).all()
    assert (second[:, :, :, 0] != 0).all()
    assert (second[:, :, :, 1:] == 0).all()
    loaded.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_is_near(tmp_path: Path, dtype: str) -> None:
    folder, prompt = make_tiny("qwen3", tmp_path / "qwen3"), list(range(20, 60))
    wide, narrow = LoadedBackend(str(folder)), LoadedBackend(str(folder), dtype=dtype)
    wanted, found = (backend.step([(Sequence(prompt), 40)]) for backend in (wide, narrow))
    assert narrow.info.dtype == dtype
    assert narrow.info.groups[0].block_bytes * 2 == wide.info.groups[0].block_bytes
    assert found.dtype == torch.float32
    assert (found - wanted).norm() / wanted.norm() < 0.05
    wide.close()
    narrow.close()


def test_what_the_backend_says_of_the_model(tmp_path: Path) -> None:
    loaded = LoadedBackend(str(make_tiny("mistral", tmp_path / "mistral")), dtype="auto")
    info = loaded.info
    assert (info.dtype, info.max_model_len, info.eos_token_ids) == ("float32", 1024, (1, 3))
    (group,) = info.groups
    assert (group.kind, group.window, group.layers, group.block_size) == ("sliding", SLIDING_WINDOW, (0, 1), 16)
    loaded.close()


def test_progress_rises_to_one_and_repeats_nothing(tmp_path: Path) -> None:
    class Recorder(ProgressCallback):
        def __init__(self) -> None:
            self.calls: list[tuple[str, float]] = []

        def __call__(self, stage: str, fraction: float) -> None:
            self.calls.append((stage, fraction))

    recorder = Recorder()
    TorchBackend(1).load(str(make_tiny("llama", tmp_path / "llama")), "float32", None, recorder)
    assert {stage for stage, _ in recorder.calls} == {"weights"}
    fractions = [fraction for _, fraction in recorder.calls]
    assert fractions == sorted(set(fractions))
    assert fractions[-1] == 1.0


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights were the old ones and its name the new ones', and engines of those took its KV."""
    folder = make_tiny("llama", tmp_path / "model")
    original = loading.fill

    def fill(*args: Any) -> None:
        original(*args)
        edit(folder, model__norm__weight=np.ones(64, dtype=np.float32))

    monkeypatch.setattr(loading, "fill", fill)
    with pytest.raises(ConfigError, match=r"model\.safetensors: has changed while it was read"):
        load(folder)
