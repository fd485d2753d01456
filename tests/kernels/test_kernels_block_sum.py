"""Sums of blocks: the CPU library against the definition, what they must tell apart, and what is refused."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from pdmesh_kernels import block_sum
from pdmesh_kernels.block_sum import reference
from pdmesh_kernels.block_sum.cpu import CpuBlockSums
from pdmesh_kernels.cpu.abi import Isa
from pdmesh_kernels.cpu.library import LibraryError, load

SIZES = [1, 63, 64, 65, 1000, 4096, 368_640]
SOURCE = np.random.default_rng(5)


@pytest.fixture(params=[Isa.AVX2, Isa.AVX512])
def library(request: pytest.FixtureRequest) -> CpuBlockSums:
    try:
        loaded = load()
    except LibraryError as exc:
        pytest.skip(str(exc))
    if request.param not in loaded.isas:
        pytest.skip(f"this processor has no {request.param.name}")
    return CpuBlockSums(loaded, request.param)


def random_blocks(num: int, size: int) -> NDArray[np.uint8]:
    return SOURCE.integers(0, 256, (num, size), dtype=np.uint8)


def ids(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def sum_of(block: NDArray[np.uint8]) -> int:
    return int(reference.sum_blocks(block[None, :], ids(0))[0])


@pytest.mark.parametrize("size", SIZES)
def test_the_library_sums_as_defined(library: CpuBlockSums, size: int) -> None:
    blocks = random_blocks(4, size)
    blocks[3] = 0xFF
    wanted = reference.sum_blocks(blocks, ids(3, 0, 2, 2))
    assert library.sum_blocks(blocks, ids(3, 0, 2, 2)).tolist() == wanted.tolist()
    assert len(set(wanted.tolist())) == 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_the_library_copies_what_it_sums_and_nothing_else(library: CpuBlockSums, size: int, offset: int) -> None:
    source = random_blocks(3, size)
    memory = np.full(64 + 5 * size + 64, 0xEE, dtype=np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    target = memory[begin : begin + 5 * size].reshape(5, size)
    sums = library.copy_blocks(target, ids(3, 1), source, ids(0, 2))
    assert sums.tolist() == reference.sum_blocks(source, ids(0, 2)).tolist()
    assert (target[3] == source[0]).all()
    assert (target[1] == source[2]).all()
    target[[1, 3]] = 0xEE
    assert (memory == 0xEE).all()


def test_numpy_alone_copies_the_same() -> None:
    source, target = random_blocks(3, 100), np.zeros((2, 100), dtype=np.uint8)
    sums = reference.copy_blocks(target, ids(1, 0), source, ids(2, 1))
    assert sums.tolist() == reference.sum_blocks(source, ids(2, 1)).tolist()
    assert (target == source[[1, 2]]).all()


def test_every_flipped_bit_shows() -> None:
    block = random_blocks(1, 200)[0]
    sums = {sum_of(block)}
    for place, bit in itertools.product(range(200), range(8)):
        block[place] ^= 1 << bit
        sums.add(sum_of(block))
        block[place] ^= 1 << bit
    assert len(sums) == 1 + 200 * 8


def test_two_high_bits_that_cancel_in_a_plain_sum_show() -> None:
    # An even number of rows apart, the weights of a sum modulo 2**64 would hide them.
    block = np.zeros(64 * 64, dtype=np.uint8)
    before = sum_of(block)
    block[7] ^= 0x80
    block[7 + 2 * 64] ^= 0x80
    assert sum_of(block) != before


def test_swapped_shifted_missing_and_shorter_content_shows() -> None:
    block = random_blocks(1, 64 * 10)[0]
    rows = block.reshape(10, 64)
    swapped, columns, missing = rows.copy(), rows.copy(), rows.copy()
    swapped[[2, 7]] = rows[[7, 2]]
    columns[:, [0, 4]] = rows[:, [4, 0]]
    missing[5:] = 0
    others = [swapped.reshape(-1), columns.reshape(-1), missing.reshape(-1), np.roll(block, 64), block[:-1]]
    assert len({sum_of(each) for each in [block, *others]}) == 1 + len(others)
    zeros = np.zeros(128, dtype=np.uint8)
    assert len({sum_of(zeros[:size]) for size in (1, 64, 65, 128)}) == 4


def test_wrong_arrays_and_ids_are_refused() -> None:
    blocks = random_blocks(2, 64)
    with pytest.raises(ValueError, match="outside"):
        block_sum.sum_blocks(blocks, [2])
    with pytest.raises(ValueError, match="outside"):
        block_sum.copy_blocks(blocks, [-1], blocks.copy(), [0])
    with pytest.raises(ValueError, match="cannot be"):
        block_sum.copy_blocks(blocks, [0], random_blocks(2, 32), [0])
    with pytest.raises(ValueError, match="cannot be"):
        block_sum.copy_blocks(blocks, [0, 1], blocks.copy(), [0])
    with pytest.raises(TypeError, match="contiguous"):
        block_sum.sum_blocks(blocks[:, ::2], [0])


def test_it_is_the_same_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, target = random_blocks(3, 640), np.zeros((3, 640), dtype=np.uint8)
    sums = block_sum.copy_blocks(target, [2, 1], blocks, [0, 1])
    monkeypatch.setattr(block_sum, "_library", lambda: None)
    assert block_sum.sum_blocks(target, [2, 1]).tolist() == sums.tolist()
    assert block_sum.copy_blocks(target, [0], blocks, [0]).tolist() == sums.tolist()[:1]


@pytest.mark.parametrize("has_library", [True, False])
def test_blocks_are_summed_as_they_arrive_and_no_sooner(monkeypatch: pytest.MonkeyPatch, has_library: bool) -> None:
    if not has_library:
        monkeypatch.setattr(block_sum, "_library", lambda: None)
    content, blocks = random_blocks(6, 640), np.zeros((9, 640), dtype=np.uint8)
    places = [8, 0, 3, 4, 7, 2]
    arrivals = block_sum.Arrivals(blocks, places)
    follower = threading.Thread(target=arrivals.follow, args=(5.0,))
    follower.start()
    for num in (1, 4, 6):
        for place in range(num):
            blocks[places[place]] = content[place]
        assert not arrivals.is_whole
        arrivals.note(num)
        time.sleep(0.002)
    follower.join(10)
    assert arrivals.is_whole
    assert not arrivals.has_more
    assert arrivals.sums.tolist() == block_sum.sum_blocks(content, range(6)).tolist()


@pytest.mark.parametrize("has_library", [True, False])
def test_who_follows_arrivals_leaves_when_nothing_comes_or_it_is_over(
    monkeypatch: pytest.MonkeyPatch, has_library: bool
) -> None:
    if not has_library:
        monkeypatch.setattr(block_sum, "_library", lambda: None)
    blocks = random_blocks(3, 64)
    arrivals = block_sum.Arrivals(blocks, [2, 1, 0])
    arrivals.note(2)
    assert arrivals.has_more
    arrivals.follow(0.001)
    assert (arrivals.is_whole, arrivals.has_more) == (False, False)
    assert arrivals.sums.tolist() == [*block_sum.sum_blocks(blocks, [2, 1]).tolist(), 0]
    follower = threading.Thread(target=arrivals.follow, args=(60.0,))
    follower.start()
    arrivals.note(-1)
    follower.join(10)
    assert not follower.is_alive()
    assert not arrivals.is_whole


def test_it_brings_no_torch_along() -> None:
    code = (
        "import sys, numpy as np; from pdmesh_kernels import block_sum;"
        "block_sum.sum_blocks(np.zeros((1, 64), np.uint8), [0]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
