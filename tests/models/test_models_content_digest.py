"""The digest of a checkpoint's bytes: all of them count, and they are read again only when a file may have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdmesh.models import content_digest as module
from pdmesh.models.content_digest import content_digest
from pdmesh.models.weights import TensorRegion

SIZE = 3 * module.CHUNK_BYTES // 2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(module, "SETTLED_S", -10.0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the regions that were read."""
    read: list[str] = []
    digest = module._digest

    def noted(region: TensorRegion) -> str:
        read.append(region.name)
        return digest(region)

    monkeypatch.setattr(module, "_digest", noted)
    return read


def checkpoint(path: Path) -> list[TensorRegion]:
    path.write_bytes(os.urandom(64) * (SIZE // 32))
    return [
        TensorRegion(name=name, encoding="F32", shape=(SIZE // 4,), path=path, offset=at * SIZE, num_bytes=SIZE)
        for at, name in enumerate(("a", "b"))
    ]


@pytest.mark.parametrize("at", [0, 5000, SIZE - 1, SIZE, SIZE + module.CHUNK_BYTES, 2 * SIZE - 1])
def test_every_byte_counts(tmp_path: Path, at: int) -> None:
    """Two checkpoints that differed between samples of a tensor were one model, and the mesh gave wrong tokens."""
    regions = checkpoint(tmp_path / "model")
    before = content_digest(regions)
    with (tmp_path / "model").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    assert content_digest(regions) != before


def test_unchanged_files_are_read_once(tmp_path: Path, cache: Path, reads: list[str]) -> None:
    regions = checkpoint(tmp_path / "model")
    first = content_digest(regions)
    assert content_digest(regions) == first
    assert sorted(reads) == ["a", "b"]
    # Set back, as copying tools do: that it was changed stands in the file's own time of change.
    state = (tmp_path / "model").stat()
    (tmp_path / "model").write_bytes(bytes(2 * SIZE))
    os.utime(tmp_path / "model", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert content_digest(regions) != first
    assert len(reads) == 4


def test_another_checkpoint_on_a_file_system_without_times_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of file systems give all files one time, and a file of the same size the same number."""
    monkeypatch.setattr(module, "_told", lambda states: [])
    regions = checkpoint(tmp_path / "model")
    first = content_digest(regions)
    (tmp_path / "model").write_bytes(os.urandom(64) * (SIZE // 32))
    assert content_digest(regions) != first


def test_what_was_changed_just_now_is_not_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_S", 3600.0)
    content_digest(checkpoint(tmp_path / "model"))
    assert not cache.exists()


def test_place_of_the_bytes_does_not_count_but_their_names_do(tmp_path: Path) -> None:
    regions = checkpoint(tmp_path / "model")
    data = (tmp_path / "model").read_bytes()
    moved = []
    for region in regions:
        path = tmp_path / f"shard-{region.name}"
        path.write_bytes(bytes(100) + data[region.offset : region.offset + SIZE])
        moved.append(TensorRegion(region.name, "F32", region.shape, path, 100, SIZE))
    assert content_digest(moved) == content_digest(regions)
    swapped = [
        TensorRegion(name, "F32", each.shape, each.path, each.offset, SIZE)
        for name, each in zip("ba", regions, strict=True)
    ]
    assert content_digest(swapped) != content_digest(regions)


@pytest.mark.parametrize("spoil", ["cut", "foreign", "no folder"])
def test_a_note_that_cannot_be_trusted_is_not(tmp_path: Path, cache: Path, reads: list[str], spoil: str) -> None:
    regions = checkpoint(tmp_path / "model")
    first = content_digest(regions)
    (note,) = cache.iterdir()
    if spoil == "cut":
        note.write_text("ab")
    elif spoil == "foreign":
        note.write_text("0" * 64)
        note.chmod(0o666)
    else:
        note.unlink()
        cache.rmdir()
        cache.write_text("a file")
    assert content_digest(regions) == first
    assert len(reads) == 4


def test_notes_are_bounded(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    for at in range(5):
        path = tmp_path / f"model-{at}"
        path.write_bytes(bytes([at] * 100))
        content_digest([TensorRegion("a", "F32", (25,), path, 0, 100)])
    assert len(list(cache.iterdir())) == 3
