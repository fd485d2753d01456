"""The sums that an owner tells of its blocks: each content once, what may grow anew, nothing on the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pdmesh.connector.active import UNKNOWN
from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.protocol.messages import GroupBlocks
from pdmesh_kernels.block_sum import sum_blocks
from support.pool_node import listed, make_pool, write_block

SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
BLOCK_SIZE = 16


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = make_pool(SHAPE, filled=True)
    yield made
    made.close()


@pytest.fixture
def sums(pool: KVPool) -> Iterator[PoolSums]:
    with PoolSums(pool, block_size=BLOCK_SIZE) as made:
        yield made


def told(sums: PoolSums, blocks: GroupBlocks, num_tokens: int) -> list[int]:
    [with_sums] = asyncio.run(sums.of([blocks], num_tokens))
    return with_sums.checksums


def test_every_block_has_the_sum_of_its_bytes(pool: KVPool, sums: PoolSums) -> None:
    assert told(sums, listed(pool, [5, 0, 3]), 48) == sum_blocks(pool.blocks, [5, 0, 3]).tolist()
    assert told(sums, listed(pool, []), 48) == []


def test_a_content_is_summed_once_so_that_later_damage_is_found(pool: KVPool, sums: PoolSums) -> None:
    before = told(sums, listed(pool, [1, 2]), 32)
    pool.blocks[1, 77] ^= 1
    assert told(sums, listed(pool, [1, 2]), 32) == before
    write_block(pool, 1)
    assert told(sums, listed(pool, [1, 2]), 32) == sum_blocks(pool.blocks, [1, 2]).tolist()


def test_a_block_that_is_not_full_is_summed_anew_when_it_is_promised_again(pool: KVPool, sums: PoolSums) -> None:
    blocks = listed(pool, [1, 2])
    sums.prepare([blocks], 20)
    before = told(sums, blocks, 20)
    # Its request goes on and fills it under the same generation.
    pool.blocks[2, 3000:] = 9
    assert told(sums, blocks, 20) == before
    sums.prepare([blocks], 32)
    after = told(sums, blocks, 32)
    assert (after[0], after[1]) == (before[0], sum_blocks(pool.blocks, [2]).tolist()[0])
    assert after[1] != before[1]
    # Now it is full.
    pool.blocks[2, 3000] ^= 1
    sums.prepare([blocks], 32)
    assert told(sums, blocks, 32) == after


def test_nothing_is_told_of_a_block_that_is_written_while_it_is_read(pool: KVPool, sums: PoolSums) -> None:
    """A sum of before would make what a consumer reads look damaged."""
    blocks = listed(pool, [1, 2])
    sums.prepare([blocks], 20, grows=True)
    assert told(sums, blocks, 20) == [*sum_blocks(pool.blocks, [1]).tolist(), UNKNOWN]
    pool.blocks[2, 3000:] = 9
    # Full by now, and in another offer.
    sums.prepare([blocks], 32, grows=True)
    assert told(sums, blocks, 32) == sum_blocks(pool.blocks, [1, 2]).tolist()


def test_the_sum_of_a_later_content_is_not_told_for_an_earlier_one(
    pool: KVPool, sums: PoolSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing holds the sources of a write that has ended: the first may be another prompt's by the time it is summed."""

    def late(blocks: np.ndarray, ids: np.ndarray) -> np.ndarray:
        write_block(pool, 3)
        return sum_blocks(blocks, ids)

    before = listed(pool, [3, 4])
    monkeypatch.setattr("pdmesh.connector.checksums.sum_blocks", late)
    assert told(sums, before, 32) == [UNKNOWN, *sum_blocks(pool.blocks, [4]).tolist()]
    monkeypatch.undo()
    assert told(sums, listed(pool, [3, 4]), 32) == sum_blocks(pool.blocks, [3, 4]).tolist()


def test_a_caller_that_leaves_takes_no_sum_from_the_others(
    pool: KVPool, sums: PoolSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_sum = threading.Event()

    def waiting(blocks: np.ndarray, ids: np.ndarray) -> np.ndarray:
        may_sum.wait(10)
        return sum_blocks(blocks, ids)

    async def scene() -> None:
        sums.prepare([listed(pool, [0])], 16)
        # In line behind the first.
        sums.prepare([listed(pool, [1])], 16)
        leaving = asyncio.create_task(sums.of([listed(pool, [1])], 16))
        await asyncio.sleep(0)
        leaving.cancel()
        assert isinstance((await asyncio.gather(leaving, return_exceptions=True))[0], asyncio.CancelledError)
        may_sum.set()
        for block_id in (0, 1, 2):
            [blocks] = await asyncio.wait_for(sums.of([listed(pool, [block_id])], 16), 10)
            assert blocks.checksums == sum_blocks(pool.blocks, [block_id]).tolist()

    monkeypatch.setattr("pdmesh.connector.checksums.sum_blocks", waiting)
    asyncio.run(scene())


def test_blocks_of_a_window_are_full_by_their_place_in_the_prompt(pool: KVPool, sums: PoolSums) -> None:
    blocks = listed(pool, [4, 5], first_block=3)
    before = told(sums, blocks, 64 + 3)
    pool.blocks[5] = 1
    pool.blocks[4] = 1
    sums.prepare([blocks], 64 + 3)
    after = told(sums, blocks, 64 + 3)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_what_the_core_has_summed_is_told_as_it_is(
    pool: KVPool, sums: PoolSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.connector.checksums.sum_blocks", None)
    whole, window = listed(pool, [1, 2]), listed(pool, [4, 5], first_block=1)
    sums.adopt([whole, window], [[7, (1 << 64) - 1], [9, 10]], 40)
    assert told(sums, whole, 40) == [7, (1 << 64) - 1]
    assert told(sums, window, 40) == [9, 10]
    write_block(pool, 1)
    monkeypatch.undo()
    assert told(sums, listed(pool, [1, 2]), 40) == [*sum_blocks(pool.blocks, [1]).tolist(), (1 << 64) - 1]


def test_what_is_known_already_stays_whatever_the_core_says(pool: KVPool, sums: PoolSums) -> None:
    before = told(sums, listed(pool, [1]), 16)
    sums.adopt([listed(pool, [1, 2])], [[before[0] ^ 1, 8]], 32)
    sums.adopt([listed(pool, [1, 2])], [[5, 6]], 32)
    assert told(sums, listed(pool, [1, 2]), 32) == [*before, 8]


def test_of_a_block_that_is_not_full_the_core_knows_better(pool: KVPool, sums: PoolSums) -> None:
    """As with those that are summed here: it may have grown under its generation."""
    blocks = listed(pool, [1, 2])
    sums.adopt([blocks], [[7, 8]], 20)
    sums.adopt([blocks], [[5, 9]], 24)
    assert told(sums, blocks, 24) == [7, 9]
    # Full by now, which what is known of it was not.
    sums.prepare([blocks], 32)
    assert told(sums, blocks, 32) == [7, *sum_blocks(pool.blocks, [2]).tolist()]
    sums.adopt([blocks], [[5, 6]], 32)
    assert told(sums, blocks, 32) == [7, *sum_blocks(pool.blocks, [2]).tolist()]


def test_only_what_the_core_has_summed_full_can_be_found_damaged(pool: KVPool, sums: PoolSums) -> None:
    blocks = listed(pool, [1, 2])
    sums.adopt([blocks], [sum_blocks(pool.blocks, [1, 2]).tolist()], 20)
    assert changed(sums, blocks) == []
    pool.blocks[[1, 2], 77] ^= 1
    assert changed(sums, blocks) == [1]


def test_what_somebody_else_summed_is_kept_until_the_content_changes(pool: KVPool) -> None:
    with PoolSums(pool) as sums:
        blocks = listed(pool, [0, 1])
        assert sums.with_known(blocks).checksums == []
        sums.note([0, 1], blocks.generations, [7, 8])
        assert sums.with_known(blocks).checksums == [7, 8]
        write_block(pool, 0)
        assert sums.with_known(listed(pool, [0, 1])).checksums == []


def test_a_map_that_may_only_be_read_is_enough(pool: KVPool) -> None:
    reader = KVPool(pool.fd, SHAPE, writable=False)
    with PoolSums(reader, block_size=BLOCK_SIZE) as sums:
        assert told(sums, listed(pool, [6]), 16) == sum_blocks(pool.blocks, [6]).tolist()
    reader.close()


def test_the_loop_goes_on_meanwhile(pool: KVPool, sums: PoolSums, monkeypatch: pytest.MonkeyPatch) -> None:
    may_sum = asyncio.Event()

    def waiting(blocks: np.ndarray, ids: np.ndarray) -> np.ndarray:
        asyncio.run_coroutine_threadsafe(may_sum.wait(), loop).result(10)
        return np.zeros(len(ids), dtype=np.uint64)

    async def scene() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        asking = asyncio.create_task(sums.of([listed(pool, [0])], 16))
        await asyncio.sleep(0)
        may_sum.set()
        [blocks] = await asyncio.wait_for(asking, 10)
        assert blocks.checksums == [0]

    loop: asyncio.AbstractEventLoop
    monkeypatch.setattr("pdmesh.connector.checksums.sum_blocks", waiting)
    asyncio.run(scene())


def changed(sums: PoolSums, blocks: GroupBlocks) -> list[int]:
    return [block_id for each in asyncio.run(sums.changed([blocks])) for block_id in each.block_ids]


def test_only_blocks_that_changed_under_their_sum_are_damaged(pool: KVPool, sums: PoolSums) -> None:
    blocks = listed(pool, [5, 0, 3, 4])
    # The last is not full, and nothing is known of the one before it.
    told(sums, listed(pool, [5, 0]), 32)
    told(sums, listed(pool, [4], first_block=2), 40)
    assert changed(sums, blocks) == []
    pool.blocks[[5, 3, 4], 77] ^= 1
    assert changed(sums, blocks) == [5]
    write_block(pool, 5)
    assert changed(sums, blocks) == []
    assert changed(sums, listed(pool, [5, 0, 3, 4])) == []
