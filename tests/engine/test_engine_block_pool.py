"""The block pool: order of reuse, keys that survive being free, generations, and its own check."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.block_pool import BlockPool


def test_a_free_cached_block_is_found_and_taken_again() -> None:
    pool = BlockPool(4, 1)
    [block] = pool.allocate(1)
    pool.register(0, block, b"k")
    pool.release([block])
    assert pool.num_free == 4
    assert pool.find(0, b"k") == block
    pool.acquire([block])
    assert pool.num_free == 3
    pool.check_integrity([[block]])


def test_blocks_without_content_are_taken_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool = BlockPool(4, 1)
    cached = pool.allocate(3)
    for block in cached:
        pool.register(0, block, bytes([block]))
    pool.release(cached[:2])
    pool.release(cached[2:])
    # The tail of the first chain goes before its head.
    assert pool.allocate(4) == [3, cached[1], cached[0], cached[2]]
    assert not any(pool.find(0, bytes([block])) for block in cached)


def test_an_evicted_key_is_gone() -> None:
    pool = BlockPool(1, 1)
    [block] = pool.allocate(1)
    pool.register(0, block, b"k")
    pool.release([block])
    pool.allocate(1)
    assert pool.find(0, b"k") is None


def test_a_second_block_with_the_same_content_stays_unnamed() -> None:
    pool = BlockPool(2, 1)
    first, second = pool.allocate(2)
    pool.register(0, first, b"k")
    pool.register(0, second, b"k")
    assert pool.find(0, b"k") == first
    pool.release([first, second])
    pool.check_integrity([])


@pytest.fixture
def memory() -> Iterator[KVPool]:
    shape = PoolShape(3, 64)
    fd = create_pool_file("test")
    size_pool_file(fd, shape)
    mapped = KVPool(fd, shape, writable=True)
    yield mapped
    mapped.close()


def test_every_allocation_gives_a_block_a_new_generation(memory: KVPool) -> None:
    pool = BlockPool(3, 1, memory)
    blocks = pool.allocate(2)
    before = pool.generations_of(blocks)
    pool.acquire(blocks)
    pool.release(blocks)
    pool.release(blocks)
    assert pool.generations_of(blocks) == before
    again = pool.allocate(3)
    assert set(blocks) <= set(again)
    assert pool.generations_of(blocks) == [word + 1 for word in before]


def test_releasing_too_often_is_caught() -> None:
    pool = BlockPool(2, 1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_the_check_notices_a_lost_reference() -> None:
    pool = BlockPool(2, 1)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check_integrity([])


def test_a_copy_is_ordered_for_the_next_step_and_keeps_its_source_until_then(memory: KVPool) -> None:
    pool = BlockPool(3, 1, memory)
    [block] = pool.allocate(1)
    before = memory.generations_of([0, 1])
    copied = pool.copy(block)
    assert copied != block
    assert pool.generations_of([copied]) == [before[copied] + 1]
    assert pool.generations_of([block]) == [before[block]]
    pool.release([block])
    pool.check_integrity([[copied]])
    assert pool.num_free == 1, "what is still to be copied must not be given to anyone"
    assert pool.take_copies() == [(block, copied)]
    assert pool.num_free == 2
    assert pool.take_copies() == []


def test_a_copy_of_a_copy_that_is_only_ordered_is_made_of_the_first(memory: KVPool) -> None:
    pool = BlockPool(3, 1, memory)
    [block] = pool.allocate(1)
    second = pool.copy(block)
    third = pool.copy(second)
    assert pool.take_copies() == [(block, second), (block, third)]


def test_nothing_is_copied_into_a_block_that_someone_else_has_taken_meanwhile() -> None:
    pool = BlockPool(2, 1)
    [block] = pool.allocate(1)
    copied = pool.copy(block)
    pool.release([copied])
    assert pool.allocate(1) == [copied]
    assert pool.take_copies() == []
    pool.check_integrity([[block], [copied]])


def test_equal_keys_of_two_groups_are_two_blocks() -> None:
    pool = BlockPool(2, 2)
    first, second = pool.allocate(2)
    assert pool.register(0, first, b"k")
    assert pool.register(1, second, b"k")
    assert (pool.find(0, b"k"), pool.find(1, b"k")) == (first, second)
    pool.forget([first])
    assert (pool.find(0, b"k"), pool.find(1, b"k")) == (None, second)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_moves_keeps_every_block_in_one_place(data: st.DataObject) -> None:
    pool, held, next_key = BlockPool(6, 1), [], 0
    for _ in range(data.draw(st.integers(1, 40))):
        move = data.draw(st.sampled_from(["allocate", "share", "release", "register", "forget", "copy", "take"]))
        if move == "allocate" and pool.num_free:
            held.append(pool.allocate(data.draw(st.integers(1, pool.num_free))))
        elif move == "share" and pool._by_key[0]:
            key = data.draw(st.sampled_from(sorted(pool._by_key[0])))
            block = pool.find(0, key)
            assert block is not None
            pool.acquire([block])
            held.append([block])
        elif move == "release" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif move == "register" and held:
            pool.register(0, data.draw(st.sampled_from(held[-1])), bytes([next_key]))
            next_key += 1
        elif move == "forget" and held:
            pool.forget(held[0])
        elif move == "copy" and held and pool.num_free:
            held.append([pool.copy(held[-1][0])])
        elif move == "take":
            pool.take_copies()
        pool.check_integrity(held)
