"""Somebody got other bytes than an engine summed: only what has changed in its own memory costs it its cache, and that once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.owner import is_corrupt
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.engine.server.damage import Damage
from pdmesh.protocol.messages import GroupBlocks
from support.pool_node import make_pool

SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
BLOCKS = [2, 5, 6]


class Counted:
    """Stands for the metrics and the resets that the class under test has of its engine."""

    def __init__(self) -> None:
        self.num_damaged = 0
        self.resets: list[list[int]] = []
        self.kv_damaged = self

    def inc(self, amount: int) -> None:
        self.num_damaged += amount

    async def reset(self, damaged: list[GroupBlocks]) -> None:
        self.resets.append([block_id for blocks in damaged for block_id in blocks.block_ids])


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = make_pool(SHAPE, filled=True)
    yield made
    made.close()


def test_a_healthy_owner_keeps_its_cache_and_damage_costs_it_once(pool: KVPool) -> None:
    counted = Counted()
    blocks = [GroupBlocks(group=0, block_ids=BLOCKS, generations=pool.generations_of(BLOCKS))]

    async def scenario() -> None:
        with PoolSums(pool) as sums:
            await sums.of(blocks, 0)
            async with asyncio.TaskGroup() as tasks:
                damage = Damage(sums=sums, resets=counted, tasks=tasks, metrics=counted, block_size=16)  # type: ignore[arg-type]
                for _ in range(3):
                    damage.suspect(blocks)
                    assert await damage.is_whole(blocks)
                assert counted.resets == []
                pool.blocks[5, 100] ^= 1
                for _ in range(3):
                    damage.suspect(blocks)
                    assert not await damage.is_whole(blocks)
                pool.blocks[6, 100] ^= 1
                assert not await damage.is_whole(blocks)

    asyncio.run(scenario())
    assert counted.resets == [[5], [6]]
    assert counted.num_damaged == 2


def test_what_prompts_begin_with_is_looked_at_when_it_is_reused_and_not_at_each(pool: KVPool) -> None:
    counted = Counted()
    blocks = [GroupBlocks(group=0, block_ids=BLOCKS, generations=pool.generations_of(BLOCKS))]

    async def scenario() -> None:
        with PoolSums(pool) as sums:
            await sums.of(blocks, 0)
            pool.blocks[BLOCKS, 100] ^= 1
            async with asyncio.TaskGroup() as tasks:
                damage = Damage(sums=sums, resets=counted, tasks=tasks, metrics=counted, block_size=16)  # type: ignore[arg-type]
                damage.reused(blocks, 15)
                damage.reused(blocks, 40)
                damage.reused(blocks, 40)

    asyncio.run(scenario())
    # The third is not wholly of what was reused.
    assert counted.resets == [BLOCKS[:2]]


def test_only_a_corrupt_end_is_a_reason_to_look() -> None:
    assert is_corrupt(False, "corrupt")
    assert is_corrupt(False, "corrupt: blocks came otherwise")
    assert not any(is_corrupt(*end) for end in [(True, "corrupt"), (False, "stale"), (False, "aborted"), (False, "")])
