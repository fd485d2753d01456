"""The cache of packed weights: whole or absent, packed once, and never trusted when anything about it is wrong."""

import contextlib
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdmesh_kernels.cpu import weight_folder, weight_index
from pdmesh_kernels.cpu.weight_file import WeightFile, create_weight_file, open_weight_file
from pdmesh_kernels.cpu.weight_index import Entry, EntryMeta

KEY = "model 0123, bf16, interface 1"
META = EntryMeta(kind="weight", format=1, num_outputs=48, num_inputs=64, group=32, is_gated=True)
ENTRIES = [
    Entry("layers.0.mlp", META, 3 * 4096 + 1),
    Entry("norm", EntryMeta(kind="vector", format=0, num_outputs=7, num_inputs=1), 28),
    Entry("head", META, 64),
]
WAIT_S = 60.0

# What a service does at its start, in a process of its own. Arguments: path, key, megabytes, seconds that packing takes.
PROGRAM = """
import sys, time
from pathlib import Path
from pdmesh_kernels.cpu.weight_file import create_weight_file
from pdmesh_kernels.cpu.weight_index import Entry, EntryMeta
path, key, megabytes, pack_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
def fill(file):
    print("packing", flush=True)
    file.array("a")[:] = 7
    time.sleep(pack_s)
meta = EntryMeta(kind="weight", format=1, num_outputs=32, num_inputs=64)
file = create_weight_file(path, key, [Entry("a", meta, megabytes << 20)], fill)
print("private" if file.path is None else "shared", int(file.array("a").min()), flush=True)
"""


def start(path: Path, megabytes: int = 1, pack_s: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), KEY, str(megabytes), str(pack_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return output.splitlines()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights" / "abc.weights"


def fill(file: WeightFile) -> None:
    for number, entry in enumerate(file.entries):
        array = file.array(entry.name)
        array[:] = np.arange(array.size) % 251 + number


def never(file: WeightFile) -> None:
    raise AssertionError("packed although a file was there")


def wait_until_synced() -> None:
    for thread in threading.enumerate():
        if thread.name == "pdmesh-weights-sync":
            thread.join(WAIT_S)


def create(path: Path | None, key: str = KEY) -> WeightFile:
    file = create_weight_file(path, key, ENTRIES, fill)
    wait_until_synced()
    return file


def assert_filled(file: WeightFile) -> None:
    assert file.entries == ENTRIES
    for number, entry in enumerate(ENTRIES):
        array = file.array(entry.name)
        assert array.shape == (entry.num_bytes,)
        assert array.ctypes.data % 64 == 0
        assert file.meta(entry.name) == entry.meta
        np.testing.assert_array_equal(array, (np.arange(entry.num_bytes) % 251 + number).astype(np.uint8))
        assert not array.flags.writeable


def test_filled_file_is_opened_with_what_was_written(path: Path) -> None:
    assert open_weight_file(path, KEY) is None
    assert_filled(create(path))
    opened = open_weight_file(path, KEY)
    assert opened is not None
    assert_filled(opened)
    assert opened.path == path
    assert data_offset(path) % 4096 == 0
    with pytest.raises(KeyError, match="no weight tail"):
        opened.array("tail")
    array = opened.array("head")
    opened.close()
    assert array[1] == 3
    with pytest.raises(ValueError, match="closed"):
        opened.array("head")


def test_second_service_opens_instead_of_packing(path: Path) -> None:
    create(path)
    assert_filled(create_weight_file(path, KEY, ENTRIES, never))


def test_private_memory_has_the_same_interface() -> None:
    file = create(None)
    assert file.path is None
    assert_filled(file)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_huge_pages_are_asked_for_while_it_is_filled_and_when_it_is_used(path: Path) -> None:
    """Written through small pages, a file stayed in them for all services of the host, however they mapped it."""
    wants: list[bool] = []

    def fill_and_look(file: WeightFile) -> None:
        fill(file)
        wants.append(has_huge_pages(file))

    for target in (path, None):
        file = create_weight_file(target, KEY, ENTRIES, fill_and_look)
        wants.append(has_huge_pages(file))
        file.close()
    opened = open_weight_file(path, KEY)
    assert opened is not None
    assert [*wants, has_huge_pages(opened)] == [True] * 5


def has_huge_pages(file: WeightFile) -> bool:
    """Whether the memory of its first entry was advised to."""
    address, is_here = file.array(ENTRIES[0].name).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            is_here = begin <= address < end
        elif first == "VmFlags:" and is_here:
            return "hg" in rest
    raise AssertionError("not mapped")


def test_mapping_is_shared_with_the_file(path: Path) -> None:
    file = create(path)
    with path.open("r+b") as other:
        other.seek(data_offset(path))
        other.write(b"\xee")
    assert file.array("layers.0.mlp")[0] == 0xEE


def data_offset(path: Path) -> int:
    return int(struct.unpack_from("<Q", path.read_bytes(), 24)[0])


@pytest.mark.parametrize(
    "entries",
    [
        [Entry("", META, 64)],
        [Entry("a", META, 0)],
        [Entry("a", META, 64), Entry("a", META, 64)],
    ],
    ids=["no name", "no bytes", "one name twice"],
)
def test_entries_must_be_named_pieces(path: Path, entries: list[Entry]) -> None:
    with pytest.raises(ValueError, match="names are unique and bytes positive"):
        create_weight_file(path, KEY, entries, never)


def damaged(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "empty":
        content.clear()
    elif how == "zeros":
        content[:] = bytes(len(content))
    elif how == "magic":
        content[0] ^= 1
    elif how == "version":
        content[8] += 1
    elif how == "truncated":
        del content[-4096:]
    elif how == "longer":
        content += bytes(4096)
    elif how == "index size":
        struct.pack_into("<Q", content, 16, 1 << 62)
    elif how == "index":
        content[:] = content.replace(b'"num_outputs": 48', b'"num_outputs": 49')
    elif how == "data before index":
        struct.pack_into("<Q", content, 24, 64)
    elif how == "header only":
        del content[100:]
    elif how == "a weight":
        content[struct.unpack_from("<Q", content, 24)[0] + 3 * 4096] ^= 0x80
    elif how == "a page":
        # As a disk that lost a write gives it back.
        content[-4096:] = bytes(4096)
    elif how == "not synced, another boot":
        content[12] = 0
        content[40] ^= 1
    elif how == "no boot":
        content[12] = 0
        content[40:76] = bytes(36)
    else:
        raise AssertionError(how)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "zeros",
        "magic",
        "version",
        "truncated",
        "longer",
        "index size",
        "index",
        "header only",
        "data before index",
        "a weight",
        "a page",
        "not synced, another boot",
        "no boot",
    ],
)
def test_damaged_file_is_removed_and_packed_anew(path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of what lay in the weights themselves nothing was seen: it was computed with."""
    create(path).close()
    damaged(path, how)
    assert open_weight_file(path, KEY) is None
    assert not path.exists()
    assert "stale" in caplog.text
    assert_filled(create(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", -64),
        ("offset", 64),
        ("offset", 20001),
        ("offset", 1 << 60),
        ("offset", None),
        ("num_bytes", -64),
        ("num_bytes", 0),
        ("num_bytes", 13000),
        ("num_bytes", 1 << 60),
        ("num_bytes", "all"),
        ("name", None),
    ],
)
def test_no_index_can_point_outside(path: Path, field: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a right checksum, as a broken writer would have made it."""
    original = json.dumps

    def dumps(index: dict[str, list[dict[str, object]]]) -> str:
        if field == "name":
            index["entries"][0]["unknown"] = index["entries"][0].pop("name")
        else:
            index["entries"][0][field] = value
        return original(index)

    with monkeypatch.context() as patch:
        patch.setattr(weight_index.json, "dumps", dumps)
        create(path).close()
    assert open_weight_file(path, KEY) is None
    assert not path.exists()


def test_file_of_another_key_is_stale(path: Path) -> None:
    create(path, "another model").close()
    assert open_weight_file(path, KEY) is None
    assert not path.exists()


def test_unsynced_file_of_this_boot_serves_and_is_synced_then(path: Path) -> None:
    create(path).close()
    content = bytearray(path.read_bytes())
    assert content[12] == 1
    content[12] = 0
    path.write_bytes(content)
    file = open_weight_file(path, KEY)
    assert file is not None
    wait_until_synced()
    assert path.read_bytes()[12] == 1


def test_what_fill_raises_is_raised_and_nothing_stays(path: Path) -> None:
    def fails(file: WeightFile) -> None:
        file.array("head")[:] = 1
        raise OSError("the checkpoint cannot be read")

    with pytest.raises(OSError, match="checkpoint"):
        create_weight_file(path, KEY, ENTRIES, fails)
    assert [entry.suffix for entry in path.parent.iterdir()] == [".lock"]
    assert_filled(create(path))


def test_services_that_start_together_pack_once(path: Path) -> None:
    services = [start(path, pack_s=0.3) for _ in range(4)]
    outputs = [lines_of(service) for service in services]
    assert sorted(len(output) for output in outputs) == [1, 1, 1, 2]
    assert {output[-1] for output in outputs} == {"shared 7"}


def test_killed_writer_leaves_nothing_that_counts(path: Path) -> None:
    killed = start(path, pack_s=WAIT_S)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "packing\n"
    waiting = start(path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=WAIT_S)
    assert lines_of(waiting) == ["packing", "shared 7"]
    assert sorted(entry.suffix for entry in path.parent.iterdir()) == [".lock", ".weights"]


def test_stuck_writer_is_not_waited_for_forever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_folder, "PACKING_TIMEOUT_S", 0.1)
    stuck = start(path, pack_s=WAIT_S)
    try:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "packing\n"
        file = create(path)
        assert file.path is None
        assert_filled(file)
    finally:
        stuck.kill()
        stuck.communicate()


def test_a_pipe_in_its_place_is_not_read(path: Path) -> None:
    """An engine waited for somebody to write into it, and so did those that made room."""
    path.parent.mkdir(mode=0o700)
    other = path.with_name("other.weights")
    for pipe in (path, other):
        os.mkfifo(pipe, 0o600)
        os.utime(pipe, (0, 0))
    assert_filled(create(path))
    assert path.is_file()
    assert not other.exists()


def test_who_waits_for_another_writer_shows_that_it_lives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gives up a core that says nothing for half as long as another one may pack."""
    monkeypatch.setattr(weight_folder, "_SIGN_OF_LIFE_S", 0.0)
    writer = start(path, pack_s=0.5)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "packing\n"
    signs: list[bool] = []
    meta = EntryMeta(kind="weight", format=1, num_outputs=32, num_inputs=64)
    file = create_weight_file(path, KEY, [Entry("a", meta, 1 << 20)], never, lambda: signs.append(True))
    assert file.path == path
    assert signs
    writer.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode()):
        pytest.skip(f"a small disk cannot be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(folder), 2)


def test_full_disk_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "disk" / "weights" / "abc.weights"
    with small_disk(tmp_path / "disk", 3 << 20):
        process = start(path, megabytes=4)
        output, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, output.split()) == (0, ["packing", "private", "7"]), errors
        assert "packed at each start" in errors
        assert [entry.suffix for entry in path.parent.iterdir()] == [".lock"]


def test_full_disk_is_made_room_on(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "weights"
    with small_disk(tmp_path / "disk", 3 << 20):
        assert lines_of(start(folder / "old.weights", megabytes=2))[-1] == "shared 7"
        assert lines_of(start(folder / "new.weights", megabytes=2))[-1] == "shared 7"
        assert not (folder / "old.weights").exists()


@pytest.mark.parametrize("kind", ["a file", "nowhere", "other's"])
def test_folder_that_cannot_be_used_costs_one_line(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    if kind == "a file":
        folder.write_text("")
    elif kind == "nowhere":
        folder = Path("/proc/weights")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    file = create(folder / "abc.weights")
    assert file.path is None
    assert_filled(file)
    assert len([record for record in caplog.records if "packed at each start" in record.message]) == 1


def test_read_only_folder_still_opens_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "weights"
    with small_disk(tmp_path / "disk", 3 << 20):
        create(folder / "abc.weights").close()
        libc = ctypes.CDLL(None)
        read_only_remount = 1 | 32
        assert libc.mount(b"tmpfs", os.fsencode(tmp_path / "disk"), b"tmpfs", read_only_remount, None) == 0
        file = open_weight_file(folder / "abc.weights", KEY)
        assert file is not None
        assert_filled(file)
        assert create(folder / "other.weights").path is None
        file.close()


def test_no_home_is_no_folder(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert weight_folder.weight_path(KEY) is None
    assert "home" in caplog.text


def test_each_key_has_its_own_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = weight_folder.weight_path(KEY)
    assert path is not None
    assert path.parent == tmp_path / "pdmesh" / "weights"
    assert path == weight_folder.weight_path(KEY) != weight_folder.weight_path(KEY + "1")


def test_unused_files_leave_the_folder_and_open_ones_stay(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["old", "used", "open", "recent"]
    files = {name: create(path.with_name(f"{name}.weights")) for name in names}
    past_s = time.time() - weight_folder.MAX_UNUSED_S - 60
    for name in ("old", "used", "open"):
        os.utime(path.with_name(f"{name}.weights"), (past_s, past_s))
    for name in ("old", "used", "recent"):
        files.pop(name).close()
    opened = open_weight_file(path.with_name("used.weights"), KEY)
    assert opened is not None
    opened.close()
    create(path).close()
    assert {entry.stem for entry in path.parent.glob("*.weights")} == {"used", "open", "recent", "abc"}
    assert not path.with_name("old.lock").exists()

    # An array alone keeps its file.
    array = files["open"].array("head")
    files.pop("open").close()
    size = path.stat().st_size
    monkeypatch.setattr(weight_folder, "MAX_FOLDER_BYTES", 3 * size)
    os.utime(path, (past_s + 120, past_s + 120))
    create(path.with_name("next.weights")).close()
    assert {entry.stem for entry in path.parent.glob("*.weights")} == {"open", "used", "next"}
    assert array[0] == 2


def test_abandoned_temporary_files_are_removed(path: Path) -> None:
    create(path).close()
    old, young, written = (path.with_name(f"other.{number}.tmp") for number in range(3))
    for temporary in (old, young, written):
        temporary.write_bytes(b"x")
    long_ago_s = time.time() - 3600
    os.utime(old, (long_ago_s, long_ago_s))
    os.utime(written, (long_ago_s, long_ago_s))
    descriptor = os.open(written, os.O_RDWR)
    assert weight_folder.hold(descriptor)
    create(path.with_name("next.weights")).close()
    assert {entry.name for entry in path.parent.glob("*.tmp")} == {young.name, written.name}
    os.close(descriptor)


def test_file_that_another_user_can_write_is_not_trusted(path: Path) -> None:
    create(path).close()
    path.chmod(0o666)
    assert open_weight_file(path, KEY) is None
