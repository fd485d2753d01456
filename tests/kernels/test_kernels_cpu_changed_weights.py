"""A weights file that somebody changes while it is in use: noticed, and told; by what merely was near it, nobody is disturbed."""

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdmesh_kernels.cpu import weight_file
from pdmesh_kernels.cpu.library import Library
from pdmesh_kernels.cpu.mappings import name_mapping
from pdmesh_kernels.cpu.weight_file import WeightFile, WeightsChangedError, create_weight_file, open_weight_file
from pdmesh_kernels.cpu.weight_index import Entry, EntryMeta

KEY = "model"
ENTRIES = [Entry("a", EntryMeta(kind="weight", format=1, num_outputs=32, num_inputs=64), 3 << 20)]
WAIT_S = 60.0

# Reads an array of a file that is cut short behind its back. Arguments: path.
PROGRAM = """
import os, sys
from pathlib import Path
from pdmesh_kernels.cpu.weight_file import open_weight_file
file = open_weight_file(Path(sys.argv[1]), "model")
array = file.array("a")
print(int(array[-1]), flush=True)
os.truncate(sys.argv[1], 4096)
print(int(array[-1]), flush=True)
"""


def fill(file: WeightFile) -> None:
    file.array("a")[:] = 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights" / "abc.weights"


@pytest.fixture(params=["made", "opened"])
def file(request: pytest.FixtureRequest, path: Path) -> WeightFile:
    made = create_weight_file(path, KEY, ENTRIES, fill)
    # Or what it writes into the header then is a change to be looked at.
    wait_until_synced()
    if request.param == "made":
        return made
    made.close()
    opened = open_weight_file(path, KEY)
    assert opened is not None
    return opened


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as other:
        other.seek(offset)
        other.write(content)


def write_a_weight(path: Path) -> None:
    overwrite(path, 2 << 20, b"\x08")


def write_by_a_mapping(path: Path) -> None:
    with path.open("r+b") as other, mmap.mmap(other.fileno(), 0) as memory:
        memory[2 << 20] = 8


def cut_and_filled_up(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    os.truncate(path, size)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def cut(path: Path) -> None:
    os.truncate(path, 4096)


@pytest.mark.parametrize("change", [write_a_weight, write_by_a_mapping, cut_and_filled_up, lengthen, cut])
def test_a_change_is_noticed(file: WeightFile, path: Path, change: Callable[[Path], None]) -> None:
    """An engine went on with the other weights, and gave wrong tokens."""
    file.check()
    change(path)
    for _ in range(2):
        with pytest.raises(WeightsChangedError, match=str(path)):
            file.check()
    file.close()
    # It is not taken for what it says it is.
    assert open_weight_file(path, KEY) is None


def same_again(path: Path) -> None:
    overwrite(path, 2 << 20, b"\x07")


def touched(path: Path) -> None:
    os.utime(path)


@pytest.mark.parametrize("change", [same_again, touched])
def test_what_changes_no_weight_is_looked_at_once(
    file: WeightFile, path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = count_sums(monkeypatch)
    change(path)
    for _ in range(3):
        file.check()
    assert len(sums) == 1


def test_a_service_that_opens_it_costs_the_others_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A use was noted in the time of change: each start had every engine of the host sum its weights in the midst of a step."""
    file = create_weight_file(path, KEY, ENTRIES, fill)
    wait_until_synced()
    used_at = path.stat().st_atime
    other = open_weight_file(path, KEY)
    wait_until_synced()
    assert other is not None
    assert path.stat().st_atime > used_at
    sums = count_sums(monkeypatch)
    file.check()
    other.check()
    assert not sums


def test_removed_or_closed_it_is_not_looked_at(file: WeightFile, path: Path) -> None:
    path.unlink()
    file.check()
    file.close()
    file.check()


def test_private_memory_has_nothing_to_be_checked() -> None:
    create_weight_file(None, KEY, ENTRIES, fill).check()


def count_sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sums: list[int] = []
    digest = weight_file._data_digest

    def counted(memory: mmap.mmap, begin: int, end: int) -> bytes:
        sums.append(end)
        return digest(memory, begin, end)

    monkeypatch.setattr(weight_file, "_data_digest", counted)
    return sums


def wait_until_synced() -> None:
    for thread in threading.enumerate():
        if thread.name == "pdmesh-weights-sync":
            thread.join(WAIT_S)


def test_who_reads_what_is_not_there_any_more_ends_with_a_word(path: Path, library: Library) -> None:
    """It ended with the signal and no word."""
    assert library.path
    create_weight_file(path, KEY, ENTRIES, fill).close()
    command = [sys.executable, "-c", PROGRAM, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "7\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"weights cache: {path} cannot be read any more")


@pytest.mark.parametrize("what", ["another mapping", "a mapping that is gone", "sent"])
def test_a_signal_that_is_of_nothing_that_was_named_ends_as_ever(tmp_path: Path, library: Library, what: str) -> None:
    assert library.path
    program = f"""
import ctypes, mmap, os, signal
from pdmesh_kernels.cpu.mappings import name_mapping
def mapped(name):
    with open(os.path.join({str(tmp_path)!r}, name), "w+b") as file:
        file.truncate(8192)
        return mmap.mmap(file.fileno(), 8192)
named, other = mapped("named"), mapped("other")
name_mapping(named, "of the named one")
if {what!r} == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
elif {what!r} == "another mapping":
    os.truncate(os.path.join({str(tmp_path)!r}, "other"), 0)
    other[5000]
else:
    address = ctypes.addressof(ctypes.c_char.from_buffer(named))
    del named
    import gc; gc.collect()
    libc = ctypes.CDLL(None)
    integers = [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *integers]
    descriptor = os.open(os.path.join({str(tmp_path)!r}, "other"), os.O_RDWR)
    fixed = 16
    assert libc.mmap(address, 8192, 1, mmap.MAP_SHARED | fixed, descriptor, 0) == address
    os.truncate(descriptor, 0)
    ctypes.string_at(address + 5000, 1)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGBUS, "")


def test_more_mappings_than_can_be_named_are_no_error(library: Library) -> None:
    memories = [mmap.mmap(-1, 4096) for _ in range(100)]
    for memory in memories:
        name_mapping(memory, "x" * 5000)
    assert np.frombuffer(memories[0], np.uint8).sum() == 0
    memories.clear()
    memory = mmap.mmap(-1, 4096)
    number = library.functions.pdm_name_mapping(np.frombuffer(memory, np.uint8).ctypes.data, 4096, b"again\n")
    library.functions.pdm_forget_mapping(number)
    assert number >= 0
