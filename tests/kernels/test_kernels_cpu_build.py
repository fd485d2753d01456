"""How the CPU library gets into a wheel, and what happens where it can't."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from pdmesh_kernels.cpu import build, library

ROOT = Path(__file__).resolve().parents[2]
IN_WHEEL = f"pdmesh_kernels/cpu/{build.LIBRARY}"
BUILD_TIMEOUT_S = 500


def test_tests_leave_the_usual_cache_alone_and_share_one() -> None:
    folder = library.cache_folder()
    assert folder.is_relative_to(tempfile.gettempdir())
    assert library.is_ours(folder.stat())
    seen = subprocess.run(
        [sys.executable, "-c", "from pdmesh_kernels.cpu.library import cache_folder; print(cache_folder())"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert seen.stdout.strip() == str(folder)


def needs_compiler() -> None:
    if build.compiler() is None or not build.is_supported():
        pytest.skip("no C++ compiler, or no Linux on x86-64")


def run_build(source: Path, target: Path, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(target)]
    variables = os.environ | environment
    return subprocess.run(
        command, cwd=source, env=variables, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )


def copy_of_tree(target: Path) -> Path:
    """What git has, without what was built: a checkout."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", ".*_cache")
    for name in ("shared", "kernels", "services"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, target / name)
    return target


def test_wheel_without_a_compiler_is_for_any_platform(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path)
    done = run_build(tree, tmp_path / "dist", "wheel", CXX="", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "without the CPU library: no C++ compiler" in done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert IN_WHEEL not in names
    assert "pdmesh_kernels/cpu/src/pdmesh_cpu.h" in names


def test_images_can_insist_on_the_library(tmp_path: Path) -> None:
    needs_compiler()
    tree = copy_of_tree(tmp_path)
    done = run_build(tree, tmp_path / "dist", "wheel", CXX="", PATH="/nowhere", PDMESH_CPU_LIBRARY="required")
    assert done.returncode != 0
    assert "no C++ compiler" in done.stderr + done.stdout
    for service in ("prefill", "decode"):
        dockerfile = (ROOT / "services" / service / "Dockerfile").read_text()
        assert "PDMESH_CPU_LIBRARY=required" in dockerfile
        assert "g++" in dockerfile


def test_every_image_has_what_the_build_reads() -> None:
    for service in ("proxy", "prefill", "decode", "kvcache"):
        assert "hatch_build.py" in (ROOT / "services" / service / "Dockerfile").read_text()


def test_compiler_that_fails_is_named_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiler()
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(build.BuildError, match=r"/bin/false failed on .*\.cpp"):
        build.build(tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


def test_no_more_compilers_than_cores_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to half a GB: a container of two cores on a large machine ran as many as that one has cores."""
    needs_compiler()
    log, slow = tmp_path / "log", tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho begin >> {log}; sleep 0.02; echo end >> {log}\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    (tmp_path / "made").mkdir()
    build.build(tmp_path / "made" / "x.so")
    lines = log.read_text().split()
    assert lines == ["begin", "end"] * (len(lines) // 2)
    assert len(lines) > 8


def test_library_is_current_only_for_its_own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "SOURCES", sources)
    built = tmp_path / "lib.so"
    assert not build.is_current(built)
    built.write_bytes(b"\x7fELF..." + build.source_digest().encode() + b"\0")
    assert build.is_current(built)
    (sources / "notes.txt").write_text("no source")
    assert build.is_current(built)
    (sources / "a.cpp").write_text("int b;")
    assert not build.is_current(built)


def test_source_distribution_has_sources_and_no_binary(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path)
    (tree / "kernels" / IN_WHEEL).write_bytes(b"stale")
    done = run_build(tree, tmp_path / "dist", "sdist")
    assert done.returncode == 0, done.stderr
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    sources = {path.name for path in (root / "kernels/pdmesh_kernels/cpu/src").iterdir()}
    assert sources == {path.name for path in build.SOURCES.iterdir()}
    assert (root / "hatch_build.py").exists()
    assert not list(root.rglob("*.so"))


def test_wheel_takes_the_library_that_is_there(tmp_path: Path) -> None:
    needs_compiler()
    tree = copy_of_tree(tmp_path)
    built = tree / "kernels" / IN_WHEEL
    shutil.copy(library.load().path, built)
    # Compiling would fail.
    done = run_build(tree, tmp_path / "dist", "wheel", CXX="/bin/false", PDMESH_CPU_LIBRARY="required")
    assert done.returncode == 0, done.stderr
    assert_wheel_has_a_library(tmp_path)


def test_wheel_takes_no_library_that_is_cut_off(tmp_path: Path) -> None:
    needs_compiler()
    tree = copy_of_tree(tmp_path)
    built = tree / "kernels" / IN_WHEEL
    shutil.copy(library.load().path, built)
    os.truncate(built, built.stat().st_size - 4096)
    assert build.is_current(built)
    done = run_build(tree, tmp_path / "dist", "wheel", CXX="/bin/false", PDMESH_CPU_LIBRARY="required")
    assert done.returncode != 0
    assert "/bin/false failed on" in done.stderr + done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_wheel_of_a_checkout_compiles(tmp_path: Path) -> None:
    needs_compiler()
    tree = copy_of_tree(tmp_path)
    # Of other sources: not to be taken.
    (tree / "kernels" / IN_WHEEL).write_bytes(b"stale")
    done = run_build(tree, tmp_path / "dist", "wheel", PDMESH_CPU_LIBRARY="required")
    assert done.returncode == 0, done.stderr
    assert_wheel_has_a_library(tmp_path)


def assert_wheel_has_a_library(tmp_path: Path) -> None:
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{build.platform_tag()}.whl")
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=BUILD_TIMEOUT_S)
    program = (
        "from pdmesh_kernels.cpu.library import load; library = load(); print(library.path, library.isas[-1].name)"
    )
    # Whatever it would build, it would fail to.
    environment = {"PYTHONPATH": str(installed), "CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(installed / IN_WHEEL), "AVX2"], done.stderr
