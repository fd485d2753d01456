"""An arena at work: its slots, the offers that pin them, the owner's rpc half, and the puller that fills them."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from pdmesh.connector.options import ConnectorOptions
from pdmesh.connector.owner import PoolOwner
from pdmesh.errors import DeadlineExceeded
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OFFER_LEASE_S, EndedOffer, OfferTable
from pdmesh.security import MeshSecret
from pdmesh_kvcache.arena import Arena
from pdmesh_kvcache.puller import Puller

log = logging.getLogger(__name__)

# After a defect; leases have ten seconds.
REAPER_PAUSE_S = 1.0


class ArenaHost:
    """An async context manager that runs one arena; enter it before use, leave it only when `is_quiet`.

    A lookup is an offer and a transfer in one, both under the id that its engine minted: `open_lookup`, then `pin_lookup`
    what is found, then `seal_lookup`. Whatever becomes of the lookup, its pins go with the offer: released, ended or expired;
    under an offer that is gone nothing is pinned.
    """

    def __init__(
        self,
        arena: Arena,
        connectors: list[str],
        secret: MeshSecret,
        *,
        on_loopback: bool,
        options: dict[str, ConnectorOptions],
        on_left_out: Callable[[str], None],
    ) -> None:
        self.arena = arena
        self.index = arena.index
        self.offers = OfferTable()
        self.puller = Puller(
            arena,
            connectors,
            secret,
            on_loopback=on_loopback,
            options=options,
            on_metadata=self._metadata_changed,
            on_left_out=on_left_out,
        )
        self.retiring = False
        """Takes nothing new; goes when nothing uses it any more."""
        self._num_users = 0
        self._owner: PoolOwner | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.arena.close)
            await stack.enter_async_context(self.puller)
            self._owner = PoolOwner(
                peer_id=self.arena.peer_id,
                pool=self.arena.pool,
                offers=self.offers,
                connectors=self.puller.metadata,
                model_fingerprint=self.arena.kind.model_fingerprint,
                layout_fingerprints=[self.arena.kind.layout_fingerprint],
                on_ended=self._on_ended,
                sums=self.arena.sums,
            )
            reaper = asyncio.create_task(_run_on(self._owner), name=f"leases of {self.arena.peer_id}")
            stack.push_async_callback(_ended, reaper)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def owner(self) -> PoolOwner:
        """The rpc half."""
        assert self._owner is not None, "the host was not entered"
        return self._owner

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is pinned, filling or about to be."""
        return self._num_users == 0 and self.offers.num_open == 0 and self.arena.is_quiet

    @contextmanager
    def in_use(self) -> Iterator[Self]:
        """Keep it alive meanwhile."""
        self._num_users += 1
        try:
            yield self
        finally:
            self._num_users -= 1

    def open_lookup(self, transfer_id: str, within_s: float) -> None:
        """Start a lookup. Raises ValueError when the id was used before, if only by an end that overtook it."""
        if self.offers.outcome_of(transfer_id) is not None:
            raise ValueError(f"transfer {transfer_id} has ended")
        self.offers.open(
            transfer_id,
            request_id=transfer_id,
            digest=b"",
            lease_s=OFFER_LEASE_S,
            release_on_commit=True,
            seal_within_s=within_s,
        )
        self.owner.settle()

    def pin_lookup(self, transfer_id: str, keys: list[bytes]) -> list[int]:
        """Pin held keys for a lookup; returns their slots. Raises DeadlineExceeded when its offer has expired."""
        # An offer that is not sealed yet gets no more time by it.
        if not self.offers.renew(transfer_id):
            raise DeadlineExceeded("the lookup's offer has expired")
        return self.index.pin(lookup_pin(transfer_id), keys)

    def seal_lookup(self, transfer_id: str, consumer_id: str, group: int, slots: list[int]) -> GroupBlocks:
        """Give the pinned slots to the consumer until it ends its transfer or stops renewing it.

        Raises DeadlineExceeded when the lookup's offer has expired.
        """
        blocks = self.arena.blocks_of(group, slots)
        if not self.offers.seal(transfer_id, [blocks], 0):
            raise DeadlineExceeded("the lookup's offer has expired")
        # How long its request lives the lookup does not say: the consumer, which reads when the request gets its turn, renews.
        self.offers.begin(transfer_id, consumer_id, transfer_id, b"", remaining_s=math.inf)
        self.owner.settle()
        return blocks

    def end_lookup(self, transfer_id: str) -> None:
        """Let go of what a lookup pinned, whatever has become of its offer; its consumer must not read any more."""
        self.offers.release(transfer_id)
        self.owner.settle()
        self.index.unpin(lookup_pin(transfer_id))

    async def discard_damaged(self, transfer_id: str) -> int:
        """Look at what a lookup has pinned and make blocks invisible whose bytes have changed; returns how many."""
        keys = self.index.pinned_by(lookup_pin(transfer_id))
        pin_id = f"check {transfer_id}"
        slots = self.index.pin(pin_id, keys)
        try:
            damaged = set(await asyncio.to_thread(self.arena.damaged, slots))
            bad = [key for key, slot in zip(keys, slots, strict=True) if slot in damaged]
            self.index.condemn(bad)
        finally:
            self.index.unpin(pin_id)
        return len(bad)

    def _metadata_changed(self, connector: str, metadata: bytes) -> None:
        self.puller.metadata[connector] = metadata
        if self._owner is not None:
            self._owner.set_metadata(connector, metadata)

    def _on_ended(self, ended: EndedOffer) -> None:
        self.index.unpin(lookup_pin(ended.offer_id))


def lookup_pin(transfer_id: str) -> str:
    """Name of a lookup's pins, apart from those that the service makes for itself."""
    return f"lookup {transfer_id}"


async def _run_on(owner: PoolOwner) -> None:
    """Keep an owner's leases, whatever meets it: without that pins would stay for ever, and nobody would see why."""
    while True:
        try:
            await owner.run()
        except Exception:
            log.exception("the leases of %s could not be kept; trying again", owner.peer_id)
            await asyncio.sleep(REAPER_PAUSE_S)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
