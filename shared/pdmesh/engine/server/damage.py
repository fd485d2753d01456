"""What an engine does about its own KV when somebody has got other bytes than were summed: look again, and let go of all that may
rest on it.

Memory here may be damaged, or the way from it: only blocks that have changed here cost the prefix cache, and each content once.
"""

import asyncio
import logging
import math
import time
from typing import Protocol

from pdmesh.connector.checksums import PoolSums
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.errors import MeshError
from pdmesh.protocol.messages import GroupBlocks

log = logging.getLogger(__name__)

# Each waits for the one thread that sums: what comes beyond is of the same memory, and looked at when it is read again.
MAX_LOOKS = 64
# Of a block that one prompt after another begins with. Summing takes 0.05 ms per MB, beside the steps.
LOOK_AGAIN_S = 5.0


class Tasks(Protocol):
    """Where what nobody waits for runs."""

    def create_task(self, coro: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]: ...


class Damage:
    """Knows which of this engine's blocks have changed in memory. Without `sums` nothing is known of any."""

    def __init__(
        self,
        *,
        sums: PoolSums | None,
        resets: PrefixCacheResets,
        tasks: Tasks,
        metrics: EngineMetrics,
        block_size: int,
    ) -> None:
        self._block_size = block_size
        self._sums = sums
        self._resets = resets
        self._tasks = tasks
        self._metrics = metrics
        self._num_looks = 0
        self._looked_s: dict[int, float] = {}
        """When a block was last looked at because it was reused."""
        self._known: dict[int, int] = {}
        """Generation in which a block was found damaged: at most one entry for each block of the pool."""

    def suspect(self, groups: list[GroupBlocks]) -> None:
        """Look at blocks that somebody got otherwise; returns at once."""
        if self._sums is None or self._num_looks >= MAX_LOOKS:
            return
        self._num_looks += 1
        self._tasks.create_task(self._look(groups))

    def reused(self, groups: list[GroupBlocks], num_tokens: int) -> None:
        """Look at the blocks of an offer's first `num_tokens`, which were there before, where that is due; returns at once.

        Whoever has those itself reads only what was computed behind them, with sums that are right.
        """
        now, due = time.monotonic(), []
        for blocks in groups:
            end = max(0, num_tokens // self._block_size - blocks.first_block)
            pairs = list(zip(blocks.block_ids[:end], blocks.generations[:end], strict=True))
            pairs = [(each, word) for each, word in pairs if now - self._looked_s.get(each, -math.inf) >= LOOK_AGAIN_S]
            if pairs:
                self._looked_s.update(dict.fromkeys((each for each, _ in pairs), now))
                ids, words = [each for each, _ in pairs], [word for _, word in pairs]
                due.append(GroupBlocks(group=blocks.group, block_ids=ids, generations=words))
        if due:
            self.suspect(due)

    async def is_whole(self, groups: list[GroupBlocks]) -> bool:
        """Whether none of the blocks has changed since it was summed, as far as it was; what has is dealt with first."""
        changed = [] if self._sums is None else await self._sums.changed(groups)
        news = [_without(blocks, self._known) for blocks in changed]
        news = [blocks for blocks in news if blocks.block_ids]
        if news:
            await self._found(news)
        return not changed

    async def _look(self, groups: list[GroupBlocks]) -> None:
        try:
            await self.is_whole(groups)
        finally:
            self._num_looks -= 1

    async def _found(self, news: list[GroupBlocks]) -> None:
        for blocks in news:
            self._known.update(zip(blocks.block_ids, blocks.generations, strict=True))
        num_blocks = sum(len(blocks.block_ids) for blocks in news)
        self._metrics.kv_damaged.inc(num_blocks)
        log.error(
            "%d KV blocks in this engine's memory are not what was computed: the prefix cache is emptied, and requests that hold "
            "them end. Its host's memory should be tested if this happens again",
            num_blocks,
        )
        try:
            await self._resets.reset(news)
        except MeshError as exc:
            # The core is gone or hangs: whoever watches it ends what runs.
            log.error("the prefix cache could not be emptied: %s", exc.message)


def _without(blocks: GroupBlocks, known: dict[int, int]) -> GroupBlocks:
    pairs = zip(blocks.block_ids, blocks.generations, strict=True)
    new = [(block_id, generation) for block_id, generation in pairs if known.get(block_id) != generation]
    return GroupBlocks(
        group=blocks.group, block_ids=[each for each, _ in new], generations=[generation for _, generation in new]
    )
