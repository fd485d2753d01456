"""Packed weights and their cache: what is in the checkpoint is what is served, and torch is left as it was."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from pdmesh.errors import ConfigError
from pdmesh.models import cpu_weights
from pdmesh.models.checkpoint import open_checkpoint
from pdmesh.models.content_digest import FileStates
from pdmesh.models.cpu_weights import load_cpu_weights
from pdmesh.models.fingerprint import fingerprints
from pdmesh.models.weight_formats import Quantization
from pdmesh_kernels.cpu import packing
from pdmesh_kernels.cpu.library import load
from pdmesh_kernels.cpu.packing import PackedWeight, unpack_row
from support.tiny_models import make_tiny

TABLE = "model.embed_tokens"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("pdmesh_kernels.cpu.weight_folder.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("pdmesh.models.content_digest.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "weights"


def start(folder: Path, row: int, num_threads: int = 2) -> tuple[str, NDArray[np.float32]]:
    """Load as an engine does; return the fingerprint and a row of the table of the vocabulary."""
    library = load()
    with open_checkpoint(str(folder)) as checkpoint:
        states = FileStates(checkpoint.reader.stored_regions())
        name = fingerprints(checkpoint.config, checkpoint.reader.stored_regions(), "float32").model
        loaded = load_cpu_weights(
            library,
            checkpoint.config,
            checkpoint.reader,
            "float32",
            Quantization.NONE,
            name,
            num_threads,
            lambda _: None,
            states.check,
        )
    try:
        return name, unpack_row(library, loaded.weights[loaded.plan.embedding.name], row).copy()
    finally:
        loaded.file.close()


def test_a_checkpoint_edited_in_place_is_packed_anew(tmp_path: Path, cache: Path) -> None:
    """The fingerprint was made of samples of large tensors: a change between them was not seen, and the old weights served."""
    folder = make_tiny("llama_tied", tmp_path / "model")
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 0))
    tensors = load_file(file)
    table = tensors[f"{TABLE}.weight"]
    row, column = table.shape[0] // 3, 5
    before, first = start(folder, row)
    np.testing.assert_array_equal(first, table[row])
    table[row, column] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    after, second = start(folder, row)
    assert before != after
    np.testing.assert_array_equal(second, table[row])
    # The third start finds what the second has packed.
    start(folder, row)
    assert len(list(cache.glob("*.weights"))) == 2


@pytest.mark.parametrize("how", ["written over", "replaced", "gone"])
def test_a_checkpoint_that_changes_while_it_is_packed_is_no_other_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What was packed of the new one had the name of the old one, and served it for ever when that came back."""
    folder, original = make_tiny("llama_tied", tmp_path / "model"), cpu_weights.pack_projection
    other = make_tiny("llama_tied", tmp_path / "other", seed=1) / "model.safetensors"
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 0))

    def change(*args: Any) -> PackedWeight:
        monkeypatch.setattr(cpu_weights, "pack_projection", original)
        packed = original(*args)
        if how == "written over":
            file.write_bytes(other.read_bytes())
        elif how == "replaced":
            other.rename(file)
        else:
            file.unlink()
        return packed

    monkeypatch.setattr(cpu_weights, "pack_projection", change)
    with pytest.raises(ConfigError, match=r"model\.safetensors: has (changed|gone) while it was read"):
        start(folder, 0, num_threads=1)
    assert not list(cache.glob("*.weights"))


def test_other_code_packs_anew(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights, read or fused by another version, had the same name: what the old one had made was served."""
    folder = make_tiny("llama_tied", tmp_path / "model")
    start(folder, 0)
    changed = tmp_path / "packing.py"
    changed.write_bytes(Path(packing.__file__).read_bytes() + b"# another\n")
    monkeypatch.setattr(packing, "__file__", str(changed))
    start(folder, 0)
    assert len(list(cache.glob("*.weights"))) == 2


def test_other_formats_are_packed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, folder = load(), make_tiny("llama_tied", tmp_path / "model")
    for group in (64, 32):
        monkeypatch.setattr("pdmesh.models.weight_formats.ONLINE_GROUP", group)
        with open_checkpoint(str(folder)) as checkpoint:
            loaded = load_cpu_weights(
                library,
                checkpoint.config,
                checkpoint.reader,
                "bfloat16",
                Quantization.INT8_WEIGHT_ONLY,
                "name",
                1,
                lambda _: None,
                lambda: None,
            )
        assert loaded.weights["layers.0.down"].group == group
        loaded.file.close()


def test_many_threads_do_not_pack_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many as a large machine has cores, a large model was in memory three times over."""
    original, active, most = cpu_weights.pack_projection, [0], [0]

    def pack(*args: Any) -> PackedWeight:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.02)
        try:
            return original(*args)
        finally:
            active[0] -= 1

    monkeypatch.setattr(cpu_weights, "MAX_PACKING_THREADS", 2)
    monkeypatch.setattr(cpu_weights, "pack_projection", pack)
    start(make_tiny("llama_tied", tmp_path / "model"), 0, num_threads=8)
    assert most[0] == 2


def test_packing_leaves_torch_its_threads(tmp_path: Path) -> None:
    """A logits processor had one thread after a start that packed, and all cores after one that did not."""
    torch.set_num_threads(3)
    try:
        start(make_tiny("llama_tied", tmp_path / "model"), 0)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
