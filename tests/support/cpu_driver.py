"""Builds the C++ driver of tests/kernels/cpu_driver with the CPU library's sources, under a sanitizer."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from pdmesh_kernels.cpu import build
from pdmesh_kernels.cpu.abi import Isa

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests" / "kernels" / "cpu_driver"
BUILT = ROOT / ".pdmesh" / "cpu_driver"
COMPILE_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 300.0

Sanitizers = tuple[str, ...]
ADDRESS: Sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREAD: Sanitizers = ("-fsanitize=thread",)


def run_driver(what: str, isa: Isa, seed: int, count: int, sanitizers: Sanitizers, isas: tuple[Isa, ...]) -> str:
    """Run the driver, which aborts on whatever is wrong; skips where this machine can't."""
    program = _driver(sanitizers, isas)
    command = [*_launcher(), str(program), what, str(int(isa)), str(seed), str(count)]
    options = {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    done = subprocess.run(
        command, env=os.environ | options, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    return done.stdout


@cache
def _driver(sanitizers: Sanitizers, isas: tuple[Isa, ...]) -> Path:
    """Build it, unless an earlier run has from the same sources."""
    compiler = build.compiler()
    if compiler is None or not build.is_supported():
        pytest.skip("no C++ compiler, or no Linux on x86-64")
    _require_sanitizer(compiler, sanitizers)
    present = {f"kernels_{isa.name.lower()}" for isa in isas}
    units = [
        unit
        for unit in sorted(build.SOURCES.glob("*.cpp"))
        if not unit.stem.startswith("kernels_") or unit.stem in present
    ]
    units += sorted(DRIVER.glob("*.cpp"))
    flags = ["-std=c++17", "-O1", "-g1", "-fno-math-errno", "-ffp-contract=off", f"-I{build.SOURCES}", *sanitizers]
    flags += [f"-DHAS_{name.upper()}" for name in sorted(present)]
    digest = hashlib.sha256(f"{compiler} {flags} {build.source_digest()}".encode())
    for path in sorted(DRIVER.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    target = BUILT / f"driver-{digest.hexdigest()[:16]}"
    if target.exists():
        return target
    BUILT.mkdir(parents=True, exist_ok=True)
    objects = BUILT / f"{target.name}.{os.getpid()}"
    objects.mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        made = list(threads.map(lambda unit: _compile(compiler, unit, objects, flags), units))
    _run([compiler, *sanitizers, "-pthread", *map(str, made), "-o", str(objects / "driver")])
    for old in BUILT.glob("driver-*"):
        if old.is_file() and len(list(BUILT.glob("driver-*"))) > 8:
            old.unlink(missing_ok=True)
    (objects / "driver").rename(target)
    shutil.rmtree(objects)
    return target


def _compile(compiler: str, unit: Path, folder: Path, flags: list[str]) -> Path:
    target = folder / f"{unit.stem}.o"
    _run([compiler, *flags, *build.ISA_FLAGS.get(unit.stem, ()), "-c", str(unit), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


def _require_sanitizer(compiler: str, sanitizers: Sanitizers) -> None:
    BUILT.mkdir(parents=True, exist_ok=True)
    probe = BUILT / f"probe.{os.getpid()}"
    try:
        command = [compiler, *sanitizers, "-x", "c++", "-", "-o", str(probe)]
        built = subprocess.run(command, input="int main() {}", text=True, capture_output=True, timeout=60, check=False)
        if built.returncode:
            pytest.skip(f"{compiler} has no {sanitizers[0]}: {built.stderr.strip()[-200:]}")
        ran = subprocess.run([*_launcher(), str(probe)], capture_output=True, text=True, timeout=60, check=False)
        if ran.returncode:
            pytest.skip(f"{sanitizers[0]} does not run here: {ran.stderr.strip()[-200:]}")
    finally:
        probe.unlink(missing_ok=True)


def _launcher() -> list[str]:
    """The thread sanitizer wants its memory where address randomisation with many bits does not leave it."""
    setarch = shutil.which("setarch")
    return [setarch, "-R"] if setarch else []
