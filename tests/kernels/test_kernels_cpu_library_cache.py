"""A library that was compiled at the first start: whole and this user's own, or it is compiled again."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdmesh_kernels.cpu import build, library
from pdmesh_kernels.cpu.library import Library, LibraryError
from pdmesh_kernels.sample_scan import make_scanner

WAIT_S = 60.0
# Takes the lock as a build does, and is stuck in it.
STUCK = """
import pathlib, sys, time
from pdmesh_kernels.cpu import library
with library._locked(pathlib.Path(sys.argv[1])):
    print("building", flush=True)
    time.sleep(600)
"""


class Builds:
    """In place of the compiler, which takes half a minute: hands out what it made before."""

    def __init__(self, made: Path) -> None:
        self.made = made
        self.count = 0

    def __call__(self, target: Path) -> None:
        self.count += 1
        shutil.copy(self.made, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pdmesh"


@pytest.fixture
def builds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    made = library.load().path
    monkeypatch.setattr(library, "PACKAGED", folder / "nowhere.so")
    monkeypatch.setattr(library, "cache_folder", lambda: folder)
    counting = Builds(made)
    monkeypatch.setattr(library, "build", counting)
    return counting


def load() -> Library:
    return library.load.__wrapped__()


def cached(folder: Path) -> Path:
    return folder / f"libpdmesh_cpu-{build.source_digest()}.so"


def test_it_is_built_once(folder: Path, builds: Builds) -> None:
    for _ in range(2):
        assert load().path == cached(folder)
    assert builds.count == 1


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_pages(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def let_others_write(path: Path) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize("damage", [empty, truncate, lose_pages, let_others_write])
def test_a_damaged_one_is_built_anew(folder: Path, builds: Builds, damage: Callable[[Path], None]) -> None:
    """After a crash of the machine the name was there without the content: a start computed with PyTorch, or died of SIGBUS."""
    folder.mkdir()
    # Not one that this process has mapped: that would be cut off under it.
    shutil.copy(builds.made, cached(folder))
    damage(cached(folder))
    with pytest.raises(LibraryError):
        library.find()
    assert load().path == cached(folder)
    assert builds.count == 1
    assert library.find().path == cached(folder)


def test_who_must_not_build_does_without_a_damaged_one(folder: Path, builds: Builds) -> None:
    """It was there, and so was built anew: a start with PyTorch alone waited half a minute for a compiler."""
    folder.mkdir()
    shutil.copy(builds.made, cached(folder))
    truncate(cached(folder))
    with pytest.raises(LibraryError):
        make_scanner(may_build=False)
    assert builds.count == 0


def test_code_that_others_may_have_written_is_not_run(folder: Path, builds: Builds) -> None:
    """Whoever could write to the cache's folder could have engines of all its users run their code."""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    shutil.copy(builds.made, cached(folder))
    with pytest.raises(LibraryError, match="can be written by, another user"):
        library.find()
    with pytest.raises(LibraryError, match="can be written by, another user"):
        load()
    assert builds.count == 0


def test_what_a_killed_build_has_left_is_removed(folder: Path, builds: Builds) -> None:
    folder.mkdir()
    left, other = folder / f"{build._unfinished(cached(folder))}abc.so", folder / "weights.so"
    left.write_bytes(b"x")
    other.write_bytes(b"x")
    load()
    assert sorted(folder.iterdir()) == sorted([cached(folder), other, folder / "build.lock"])


def test_a_stuck_build_is_not_waited_for_forever(folder: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "BUILDING_TIMEOUT_S", 0.1)
    folder.mkdir()
    stuck = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(folder / "build.lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "building\n"
        stuck.send_signal(signal.SIGSTOP)
        with pytest.raises(LibraryError, match="another process has been building it for"):
            load()
    finally:
        stuck.kill()
        stuck.communicate(timeout=WAIT_S)
    # Its lock ended with it.
    assert load().path == cached(folder)


def test_nothing_is_built_for_a_processor_that_has_none_of_it(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on an old processor compiled for half a minute, to find out what the library in the package had said."""
    monkeypatch.setattr(library, "PACKAGED", builds.made)
    monkeypatch.setattr(Library, "isas", [])
    with pytest.raises(LibraryError, match="this processor has none of AVX2"):
        load()
    assert builds.count == 0


def test_the_real_one_is_whole(tmp_path: Path) -> None:
    path = shutil.copy(library.load().path, tmp_path / "x.so")
    assert build.is_whole(path)
    os.truncate(path, path.stat().st_size - 1)
    assert not build.is_whole(path)
