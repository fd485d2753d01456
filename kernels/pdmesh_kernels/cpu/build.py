"""Compiles the CPU library: used by the wheel's build hook, by ./dev, and where neither ran, once at the first start.

Standard library only. Each instruction set's kernels are one translation unit with its own flags; which one runs is decided at
run time, so a library built on one x86-64 machine serves all.
"""

import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "src"
LIBRARY = "libpdmesh_cpu.so"
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off")
WARNINGS = ("-Wall", "-Wextra")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
ISA_FLAGS = {
    "block_sum_avx2": AVX2,
    "block_sum_avx512": AVX512,
    "sampling_avx2": AVX2,
    "sampling_avx512": AVX512,
    "kernels_avx2": AVX2,
    "kernels_avx512": AVX512,
    "kernels_avx512_bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "kernels_amx": (*AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""Translation unit -> the flags that the others must not have."""
PACKING_SOURCES = ("kernels.h", "pack.cpp", "pack_quantised.cpp", "quantised_panels.h", "half.h")
COMPILE_TIMEOUT_S = 300
MAX_COMPILERS = 8
"""At a time: each takes up to half a GB."""
# Of 64-bit ELF files: where the section table begins, and further behind how large an entry is and how many there are.
_SECTIONS = struct.Struct("<40xQ10xHH")


class BuildError(Exception):
    """Why there is no library; one line for the operator, then the compiler's own words."""


def compiler() -> str | None:
    """Return the C++ compiler to use: $CXX, else the first of c++, g++, clang++ on the path; None when there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def source_digest() -> str:
    """Name what the library is built from: sources and flags."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, sorted(ISA_FLAGS.items()))).encode())
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def packing_digest() -> str:
    """Name how weights lie in panels."""
    digest = hashlib.sha256()
    for name in PACKING_SOURCES:
        digest.update((SOURCES / name).read_bytes())
    return digest.hexdigest()[:16]


def is_supported() -> bool:
    """Whether this platform can have the library at all."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def is_current(library: Path) -> bool:
    """Whether the file was built from what `source_digest` names, which every library carries as text."""
    try:
        return source_digest().encode() in library.read_bytes()
    except FileNotFoundError:
        return False


def is_whole(library: Path) -> bool:
    """Whether the file is a library that ends where its header says: linkers put the table of sections last."""
    with library.open("rb") as file:
        head, size = file.read(_SECTIONS.size), os.fstat(file.fileno()).st_size
    if len(head) < _SECTIONS.size or not head.startswith(b"\x7fELF"):
        return False
    begin, entry_bytes, num_entries = _SECTIONS.unpack(head)
    end: int = begin + entry_bytes * num_entries
    return begin > 0 and end <= size


def platform_tag() -> str:
    """Return the wheel tag for a library that was built here: it needs this C library or a newer one."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return f"linux_{platform.machine()}"
    major, minor = version.split(".")[:2]
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def build(target: Path, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile and link the library to `target`, which appears whole or not at all; half a minute of CPU. Raises BuildError."""
    if not is_supported():
        raise BuildError(f"the CPU library is for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found (set CXX, or install g++ or clang++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pdmesh-build-") as folder:
        units = sorted(SOURCES.glob("*.cpp"))
        with ThreadPoolExecutor(min(MAX_COMPILERS, len(os.sched_getaffinity(0)))) as threads:
            objects = list(threads.map(lambda unit: _compile(cxx, unit, Path(folder), extra_flags), units))
        descriptor, linked = tempfile.mkstemp(dir=target.parent, prefix=_unfinished(target), suffix=".so")
        os.close(descriptor)
        try:
            _run([cxx, "-shared", "-pthread", *extra_flags, *map(str, objects), "-o", linked])
            os.chmod(linked, 0o755)
            # Else a crash of the machine could leave the name without the content.
            with open(linked, "rb") as file:
                os.fsync(file.fileno())
            os.replace(linked, target)
        except BaseException:
            os.unlink(linked)
            raise


def remove_unfinished(target: Path) -> None:
    """Remove what builds of `target` left that were killed. Not while one may be under way."""
    for unfinished in target.parent.glob(f"{_unfinished(target)}*"):
        unfinished.unlink(missing_ok=True)


def _unfinished(target: Path) -> str:
    return f".{target.stem}-"


def _compile(cxx: str, unit: Path, folder: Path, extra_flags: tuple[str, ...]) -> Path:
    target = folder / f"{unit.stem}.o"
    # The tables, dispatch and packing must run anywhere: only kernels get an instruction set's flags.
    flags = [*COMMON_FLAGS, *WARNINGS, *ISA_FLAGS.get(unit.stem, ()), *extra_flags]
    if unit.stem == "isa":
        flags.append(f'-DPDM_SOURCE_DIGEST="{source_digest()}"')
    _run([cxx, *flags, "-c", str(unit), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildError(f"{command[0]} could not be run: {exc}") from exc
    if done.returncode:
        raise BuildError(f"{command[0]} failed on {command[-3]}:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / LIBRARY)
