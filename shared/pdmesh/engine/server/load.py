"""What this engine tells proxies about its load: the latest numbers, and a wake-up when they change."""

import asyncio
import time

import msgspec

from pdmesh.engine.stats import Stats
from pdmesh.protocol import mesh_pb2
from pdmesh.protocol.offers import OfferTable
from pdmesh.protocol.wire import to_ms


class LoadBoard:
    """Holds the load of the engine; waiters wake at the next change."""

    def __init__(self, epoch: int, offers: OfferTable) -> None:
        self._epoch = epoch
        self._offers = offers
        self._changed = asyncio.Event()
        self.stats = Stats()
        self.num_submitted = 0
        """Requests sent to the core since its latest statistics."""
        self.draining = False
        self._has_core = True
        self._ends_s = 0.0
        """When what runs is ended, once it drains; monotonic."""
        self.version = 0
        """Grows with every change."""

    @property
    def num_offers(self) -> int:
        """Offers whose blocks are held."""
        return self._offers.num_open

    @property
    def num_transfers(self) -> int:
        """Pulls by others that read from these offers now."""
        return self._offers.num_transfers

    @property
    def num_queued(self) -> int:
        """Requests that wait, as far as known here."""
        return self.stats.num_waiting + self.stats.num_waiting_remote + self.num_submitted

    def update(self, stats: Stats) -> None:
        """Take the core's latest statistics."""
        # What a core had said before it died may be read after it.
        self.stats = stats if self._has_core else _at_rest(stats)
        self.num_submitted = 0
        self.touch()

    def core_died(self) -> None:
        """Nothing runs any more, and nothing new is taken; what was counted stays."""
        self._has_core = False
        self.update(self.stats)
        self.drain()

    def drain(self, timeout_s: float = 0.0) -> None:
        """Tell proxies to send nothing new, and how long what runs has."""
        self.draining = True
        self._ends_s = time.monotonic() + timeout_s
        self.touch()

    def touch(self) -> None:
        """Wake all waiters."""
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def newer(self, version: int) -> None:
        """Return once the load is newer than `version`; waits as long as the engine is at rest."""
        if self.version == version:
            await self._changed.wait()

    def report(self) -> mesh_pb2.LoadReport:
        stats = self.stats
        return mesh_pb2.LoadReport(
            num_running=stats.num_running,
            num_waiting=self.num_queued,
            num_waiting_tokens=stats.num_waiting_tokens,
            kv_usage=stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0,
            draining=self.draining,
            epoch=self._epoch,
            num_offers=self.num_offers,
            drain_remaining_ms=to_ms(max(0.0, self._ends_s - time.monotonic())) if self.draining else 0,
        )


def _at_rest(stats: Stats) -> Stats:
    """Those of a core that holds and computes nothing."""
    return msgspec.structs.replace(
        stats,
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        num_waiting_remote=0,
        num_blocks_used=0,
        num_blocks_quarantined=0,
        num_offers_held=0,
        num_lanes_used=0,
    )
