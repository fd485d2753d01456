"""Pulls a block of the own pool into another one over a connector, and compares: the proof that the connector moves KV here.

Two free blocks are taken for it, when there are two and no step under way may still write to them.
"""

from collections import deque

import numpy as np

from pdmesh.connector.base import Pull, PullResult
from pdmesh.connector.ledger import BlockLists
from pdmesh.connector.pool import KVPool
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.messages import OwnBlockPulled, PullOwnBlock

PREFIX = "own-block-"
"""Of these transfers' ids: requests' have other ones."""
# As 16- or 32-bit floats these bytes are small numbers: whatever reads past a sequence's end must find no NaN.
PATTERN_BYTES = 61


class SelfPulls:
    """Carries out one order at a time. Knows no connector: the core starts what `next_pull` returns and brings its end."""

    def __init__(self, kv: KVManager, pool: KVPool) -> None:
        self._kv = kv
        self._pool = pool
        self._orders: deque[PullOwnBlock] = deque()
        self._blocks: BlockLists | None = None
        """Taken for the first order."""
        self._safe_after = 0
        """Steps that must have ended first."""
        self._is_pulling = False

    @property
    def blocks(self) -> list[BlockLists]:
        """What is referenced here."""
        return [] if self._blocks is None else [self._blocks]

    def order(self, order: PullOwnBlock) -> None:
        self._orders.append(order)

    def next_pull(self, *, num_submitted: int, num_ended: int) -> Pull | None:
        """Return the pull to start now, if one may start. The counts are of steps."""
        if not self._orders or self._is_pulling:
            return None
        if self._blocks is None:
            self._blocks = self._kv.borrow(2)
            self._safe_after = num_submitted
        if self._blocks is None or num_ended < self._safe_after:
            return None
        source, target = self._blocks[0]
        order = self._orders[0]
        self._pool.blocks[source] = _pattern(self._pool.shape.block_bytes)
        self._pool.blocks[target] = 0
        self._is_pulling = True
        return Pull(
            transfer_id=f"{PREFIX}{order.number}",
            peer_id=order.peer_id,
            source_block_ids=[source],
            generations=self._pool.generations_of([source]),
            target_block_ids=[target],
            deadline_s=order.deadline_s,
        )

    def ended(self, result: PullResult) -> OwnBlockPulled | None:
        """Take a pull's end; None when it was not one of these."""
        if not result.transfer_id.startswith(PREFIX) or self._blocks is None:
            return None
        order, (source, target) = self._orders.popleft(), self._blocks[0]
        is_equal = np.array_equal(self._pool.blocks[target], _pattern(self._pool.shape.block_bytes))
        self._pool.blocks[[source, target]] = 0
        self._kv.drop(self._blocks)
        self._blocks, self._is_pulling = None, False
        error = result.reason or ("" if is_equal else "what arrived is not what was there")
        return OwnBlockPulled(number=order.number, error=error)


def _pattern(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return (np.arange(num_bytes) % PATTERN_BYTES).astype(np.uint8)
