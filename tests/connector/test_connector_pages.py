"""Memory that is taken ahead of a pool's first writes: soon, a little, and of nothing while nothing is given out."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from pdmesh.connector.pages import PagesAhead
from pdmesh.connector.pool import PAGE_BYTES, KVPool, PoolShape, create_pool_file, size_pool_file
from support.no_threads import REFUSAL, refuse_threads
from support.until import until

SHAPE = PoolShape(num_blocks=64, block_bytes=32 << 10)


def fresh_pool(shape: PoolShape = SHAPE) -> KVPool:
    fd = create_pool_file("test")
    size_pool_file(fd, shape)
    pool = KVPool(fd, shape, writable=True)
    os.close(fd)
    return pool


def num_taken(pool: KVPool) -> int:
    """Whole blocks that have memory."""
    return (os.fstat(pool.fd).st_blocks * 512 - pool.shape.header_bytes) // pool.shape.block_bytes


def mapped(pool: KVPool) -> list[int]:
    """Blocks whose pages this process has found, all of them: the kernel also maps a few around each."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(pool.blocks.ctypes.data // PAGE_BYTES * 8)
        words = np.frombuffer(pages.read(pool.blocks.nbytes // PAGE_BYTES * 8), dtype="<u8")
    # A word's uppermost bit says that its page is present.
    is_mapped = (words.reshape(pool.shape.num_blocks, -1) >> np.uint64(63)).all(axis=1)
    found: list[int] = np.flatnonzero(is_mapped).tolist()
    return found


def test_memory_is_taken_for_what_comes_next_and_for_no_more() -> None:
    pool = fresh_pool()
    with PagesAhead(pool, bytes_ahead=5 * SHAPE.block_bytes):
        assert num_taken(pool) == 0
        pool.bump([0, 1, 2])
        # Blocks 3 to 7: those that are given out get theirs from whoever writes.
        until(lambda: num_taken(pool) == 5)
        # Again, in any order: that is nothing new.
        pool.bump([2, 0])
        pool.bump([9, 8])
        until(lambda: num_taken(pool) == 10)
        assert pool.blocks[10:15].max() == 0
    assert num_taken(pool) == 10
    pool.close()


def test_it_ends_at_the_pools_end_and_with_the_pool() -> None:
    pool = fresh_pool()
    with PagesAhead(pool, bytes_ahead=1 << 30):
        # An eighth at most.
        pool.bump([0])
        until(lambda: num_taken(pool) == 8)
        pool.bump([63])
        time.sleep(0.02)
    assert num_taken(pool) == 8
    assert not [thread for thread in threading.enumerate() if thread.name == "pages-ahead"]
    pool.bump([1])
    pool.close()


def test_a_pool_of_few_blocks_is_left_alone() -> None:
    pool = fresh_pool(PoolShape(num_blocks=4, block_bytes=4096))
    with PagesAhead(pool):
        pool.bump([0])
    assert num_taken(pool) == 0
    pool.close()


def test_who_reads_has_what_comes_next_mapped_and_takes_no_memory() -> None:
    pool = fresh_pool(PoolShape(num_blocks=64, block_bytes=256 << 10))
    pool.blocks[:6] = 1
    reader = KVPool(pool.fd, pool.shape, writable=False)
    with PagesAhead(reader, bytes_ahead=5 * pool.shape.block_bytes) as pages:
        assert mapped(reader) == []
        pages.note([1, 0])
        # The sixth block is the owner's last.
        until(lambda: mapped(reader) == [2, 3, 4, 5])
        pool.blocks[6:20] = 1
        pages.note([3, 2])
        until(lambda: mapped(reader) == [*range(2, 9)])
        pages.note([63])
        time.sleep(0.02)
        assert mapped(reader) == [*range(2, 9)]
        assert num_taken(pool) == 20
    reader.close()
    pool.close()


def test_who_gives_blocks_out_goes_on_where_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the limit of threads it ended the one that copies for all pulls of shared memory, and failed the sums of blocks."""
    pool = fresh_pool()
    with monkeypatch.context() as patch, PagesAhead(pool) as pages:
        refuse_threads(patch)
        pool.bump([0])
        # Said once; what is only faster is not tried again and again.
        pool.bump([9])
        pages.note([10])
        assert [REFUSAL in record.getMessage() for record in caplog.records] == [True]
    assert num_taken(pool) == 0
    pool.close()
