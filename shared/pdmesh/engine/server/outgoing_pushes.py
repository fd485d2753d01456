"""The owner's end of pushes: answers `KVPeer.Push`, lets the core write, and says how far it is.

A push begins on an offer that may still be open, and even a moment before its request is here, as proxy and consumer are not
ordered. From the begin until the core's last word the offer table counts its writer: no block of the offer is given away, and
whoever asks is told that it still writes. A push ends early when its transfer or its offer does.
"""

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from pdmesh.connector.active import PullEnd
from pdmesh.connector.base import PeerPool
from pdmesh.connector.owner import PoolOwner
from pdmesh.engine.messages import CoreReady, Use
from pdmesh.engine.push_messages import BeginPush, PushReport, StopPush
from pdmesh.engine.server.attempts import reason_of
from pdmesh.engine.server.core_peers import Core, CorePeers
from pdmesh.engine.server.identity import engine_id_of
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.open_offers import OpenOffers
from pdmesh.engine.server.orderly_writes import OrderlyWrites
from pdmesh.errors import MeshError, TransferFailed
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import NUM_REMEMBERED, OfferTable
from pdmesh.protocol.pushes import PushOrder, PushProgress, progress_to_pb
from pdmesh.protocol.states import Reason, TransferState
from pdmesh.turns import Turns

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
NUM_ATTACHED = 64
"""Consumers that are written to at other times than now and stay connected: one that is replaced comes back under another id."""
LOST = ("peer_lost", "error:", "timeout")
"""How reasons begin after which a consumer is connected anew for the next push."""


@dataclass(slots=True, eq=False)
class _Attached:
    """A consumer's pool, as it was connected."""

    metadata: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class _Outgoing:
    transfer_id: str
    offer_id: str
    consumer_id: str
    attached: _Attached
    reports: "asyncio.Queue[PushReport]" = field(default_factory=asyncio.Queue)
    is_told_to_stop: bool = False


class OutgoingPushes:
    """All pushes that this engine's core writes."""

    def __init__(
        self,
        *,
        ready: CoreReady,
        core: Core,
        core_peers: CorePeers,
        owner: PoolOwner,
        offers: OfferTable,
        open_offers: OpenOffers,
        metrics: EngineMetrics,
        is_enabled: bool,
    ) -> None:
        self._ready = ready
        self._core = core
        self._core_peers = core_peers
        self._owner = owner
        self._offers = offers
        self._open_offers = open_offers
        self._metrics = metrics
        self._is_enabled = is_enabled
        self._active: dict[str, _Outgoing] = {}
        self._attached: OrderedDict[str, _Attached] = OrderedDict()
        """By consumer; that of the latest push at the end."""
        self._attaching = Turns()
        """Of those who have a consumer connected, by its engine id: one that hangs holds up its own pushes only."""
        self._unsure: OrderedDict[str, None] = OrderedDict()
        """Transfers of which bytes may be on their way to the consumer although this engine writes no more."""
        owner.on_push = self.serve
        owner.on_settled = self._stop_needless
        owner.may_arrive = self._unsure.__contains__

    def report(self, report: PushReport) -> None:
        """Take the core's word on how far a push is."""
        push = self._active.get(report.transfer_id)
        if push is None:
            return
        self._metrics.push_bytes.inc("sent", amount=report.num_bytes)
        if report.ended:
            del self._active[report.transfer_id]
            self._metrics.pushes_sent.inc("failed" if report.reason else "written", report.reason.partition(":")[0])
            if report.may_write:
                self._unsure[push.transfer_id] = None
                if len(self._unsure) > NUM_REMEMBERED:
                    self._unsure.popitem(last=False)
            # One that went over what was connected before says nothing of what is now.
            if report.reason.startswith(LOST) and self._attached.get(push.consumer_id) is push.attached:
                self._forget(push.consumer_id)
            self._offers.stopped(push.transfer_id)
            if report.reason:
                self._offers.end(push.transfer_id, False, report.reason)
            self._owner.settle()
        push.reports.put_nowait(report)

    def core_died(self) -> None:
        """End all pushes: nobody is left to write, or to say how far they are."""
        for transfer_id in list(self._active):
            # The core's transports die with it, and what they had handed to the network may arrive yet.
            self.report(
                PushReport(transfer_id=transfer_id, num_blocks=0, ended=True, reason=PullEnd.PEER_LOST, may_write=True)
            )

    async def serve(self, order: PushOrder, context: Context) -> None:
        """Run one call of a consumer until all is written, it goes away, or there is nothing more to write."""
        writes, peer_id = OrderlyWrites(context), self._owner.peer_id
        try:
            push = await self._begin(order)
        except MeshError as exc:
            self._metrics.pushes_sent.inc("refused", reason_of(exc))
            await writes.write(progress_to_pb(PushProgress(peer_id=peer_id, ended=True, error=exc)))
            return
        try:
            while True:
                report = await push.reports.get()
                error = TransferFailed(f"{report.reason}: the push was not finished") if report.reason else None
                progress = PushProgress(
                    peer_id=peer_id,
                    num_blocks=report.num_blocks,
                    checksums=await self._sums(report.sources),
                    ended=report.ended,
                    error=error,
                )
                await writes.write(progress_to_pb(progress))
                if report.ended:
                    return
        finally:
            self._stop(push)
            await writes.settle()

    async def _sums(self, sources: list[GroupBlocks]) -> list[list[int]]:
        """What has been written sums to here; empty where nothing is summed."""
        if self._owner.sums is None or not sources or not sources[0].block_ids:
            return []
        num_tokens = len(sources[0].block_ids) * self._ready.block_size
        return [each.checksums for each in await self._owner.sums.of(sources, num_tokens)]

    async def _begin(self, order: PushOrder) -> _Outgoing:
        begin = order.begin
        self._check(order)
        await self._open_offers.wait_opened(begin.offer_id)
        attached = await self._attach(order)
        if begin.transfer_id in self._active:
            raise TransferFailed(f"{Reason.TRANSFER_ENDED}: transfer {begin.transfer_id} is written already")
        self._owner.check_room(begin.transfer_id)
        try:
            self._offers.begin(
                begin.transfer_id,
                begin.consumer_id,
                begin.offer_id,
                begin.digest,
                remaining_s=begin.remaining_s,
                written=True,
            )
        finally:
            self._owner.settle()
        push = _Outgoing(
            transfer_id=begin.transfer_id, offer_id=begin.offer_id, consumer_id=begin.consumer_id, attached=attached
        )
        self._active[begin.transfer_id] = push
        self._core.send(
            BeginPush(
                transfer_id=begin.transfer_id,
                offer_id=begin.offer_id,
                peer_id=begin.consumer_id,
                first_block=order.targets[0].first_block,
                targets=[each.block_ids for each in order.targets],
            )
        )
        return push

    def _check(self, order: PushOrder) -> None:
        """Raise TransferFailed for what this engine cannot or does not write."""
        ready = self._ready
        if not self._is_enabled or order.connector not in ready.push_connectors:
            raise TransferFailed(f"no_push: this engine does not push over {order.connector or 'no connector'}")
        groups = [each.group for each in order.targets]
        shapes = {(each.first_block, len(each.block_ids)) for each in order.targets}
        if groups != list(range(len(ready.layout_fingerprints))) or len(shapes) != 1 or not order.targets[0].block_ids:
            raise TransferFailed("mismatch: the targets must be one list for each group, all of one shape")
        if order.block_bytes != ready.block_bytes:
            raise TransferFailed(
                f"mismatch: blocks of {order.block_bytes} bytes are expected, this engine's have {ready.block_bytes}"
            )

    async def _attach(self, order: PushOrder) -> _Attached:
        """Have the consumer's pool connected, as it is reached now."""
        consumer_id, targets = order.begin.consumer_id, order.targets[0]
        num_full = self._open_offers.num_tokens(order.begin.offer_id) // self._ready.block_size
        if targets.first_block + len(targets.block_ids) > num_full:
            raise TransferFailed(f"mismatch: the prompt of the offer has {num_full} full blocks")
        async with self._attaching.of(engine_id_of(consumer_id)):
            if (known := self._attached.get(consumer_id)) is not None and known.metadata == order.metadata:
                self._attached.move_to_end(consumer_id)
                return known
            for other_id in [each for each in self._attached if engine_id_of(each) == engine_id_of(consumer_id)]:
                self._forget(other_id)
            pool = PeerPool(
                peer_id=consumer_id,
                metadata=order.metadata,
                num_blocks=order.num_blocks,
                block_bytes=order.block_bytes,
            )
            await self._core_peers.attach(pool, order.connector, Use.PUSH)
            attached = self._attached[consumer_id] = _Attached(order.metadata)
            self._forget_idle(consumer_id)
            return attached

    def _forget_idle(self, latest_id: str) -> None:
        """Disconnect those that were pushed to longest ago, where there are too many."""
        writing = {push.consumer_id for push in self._active.values()} | {latest_id}
        idle = [each for each in self._attached if each not in writing]
        for consumer_id in idle[: max(0, len(idle) - NUM_ATTACHED)]:
            self._forget(consumer_id)

    def _forget(self, consumer_id: str) -> None:
        if self._attached.pop(consumer_id, None) is not None:
            self._core_peers.detach(consumer_id, Use.PUSH)

    def _stop_needless(self) -> None:
        """Stop writing for transfers that have ended, and out of offers that nobody needs any more."""
        for push in list(self._active.values()):
            is_read = self._offers.outcome_of(push.transfer_id) is TransferState.READING
            if not is_read or not self._offers.is_live(push.offer_id):
                self._stop(push)

    def _stop(self, push: _Outgoing) -> None:
        if push.transfer_id in self._active and not push.is_told_to_stop:
            push.is_told_to_stop = True
            self._core.send(StopPush(transfer_id=push.transfer_id))
