"""What an engine does about its own KV when somebody has got other bytes than were summed: look again, and let go of all that may
rest on it.

Memory here may be damaged, or the way from it: only blocks that have changed here cost the prefix cache, and each content once.
"""

import asyncio
import logging
from typing import Protocol

from pdmesh.connector.checksums import PoolSums
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.errors import MeshError
from pdmesh.protocol.messages import GroupBlocks

log = logging.getLogger(__name__)

# Each waits for the one thread that sums: what comes beyond is of the same memory, and looked at when it is read again.
MAX_LOOKS = 64


class Tasks(Protocol):
    """Where what nobody waits for runs."""

    def create_task(self, coro: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]: ...


class Damage:
    """Knows which of this engine's blocks have changed in memory. Without `sums` nothing is known of any."""

    def __init__(
        self, *, sums: PoolSums | None, resets: PrefixCacheResets, tasks: Tasks, metrics: EngineMetrics
    ) -> None:
        self._sums = sums
        self._resets = resets
        self._tasks = tasks
        self._metrics = metrics
        self._num_looks = 0
        self._known: dict[int, int] = {}
        """Generation in which a block was found damaged: at most one entry for each block of the pool."""

    def suspect(self, groups: list[GroupBlocks]) -> None:
        """Look at blocks that somebody got otherwise; returns at once."""
        if self._sums is None or self._num_looks >= MAX_LOOKS:
            return
        self._num_looks += 1
        self._tasks.create_task(self._look(groups))

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
