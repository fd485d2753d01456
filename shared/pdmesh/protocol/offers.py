"""All offers and transfers of a pool's owner, and the leases that end what nobody ends.

No I/O: the owner's servicer calls in, and takes out what has ended with `take_ended`. What may follow what stands in
`states.py`.

The promises, kept for every order of calls: a transfer ends exactly once; an offer's blocks are given back exactly once,
and never while a transfer reads them within its lease, or while this owner's own transport writes them to a consumer; when all
leases are over and all writers have stopped nothing is left.
"""

import hmac
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from pdmesh.errors import Forbidden, TransferFailed
from pdmesh.protocol.deadlines import Deadlines
from pdmesh.protocol.messages import NO_MARKS, GroupBlocks, KVMarks
from pdmesh.protocol.offer_views import check_unmarked, narrowed
from pdmesh.protocol.states import (
    OFFER_TABLE,
    TRANSFER_TABLE,
    OfferEvent,
    OfferState,
    Reason,
    TransferEvent,
    TransferState,
    event_of_end,
)
from pdmesh.protocol.transfers import EndedOffer, OfferView

__all__ = ["EndedOffer", "OfferState", "OfferTable", "OfferView", "Reason", "TransferState"]

ValueT = TypeVar("ValueT")

OFFER_LEASE_S = 10.0
"""Life of an offer after its seal or its last renewal."""
TRANSFER_LEASE_S = 10.0
"""Life of a transfer after its begin or its last renewal."""
RENEW_INTERVAL_S = 2.0
"""How often whoever needs an offer or a transfer renews it."""
NUM_REMEMBERED = 4096
"""Ended offers and transfers that are remembered, so that a late call learns what became of them."""


@dataclass(slots=True, kw_only=True)
class _Offer:
    offer_id: str
    request_id: str
    digest: bytes
    lease_s: float
    release_on_commit: bool
    deadline_s: float = 0.0
    state: OfferState = OfferState.OPEN
    groups: list[GroupBlocks] = field(default_factory=list)
    num_tokens: int = 0
    marks: KVMarks = NO_MARKS
    reading: set[str] = field(default_factory=set)
    """Transfers within their lease."""
    writing: set[str] = field(default_factory=set)
    """Transfers, ended ones too, for which this owner's transport may still read the blocks."""
    reason: Reason = Reason.RELEASED

    @property
    def is_idle(self) -> bool:
        return not self.reading and not self.writing

    @property
    def view(self) -> OfferView:
        return OfferView(groups=self.groups, num_tokens=self.num_tokens, marks=self.marks)

    def on(self, event: OfferEvent) -> None:
        self.state = OFFER_TABLE[self.state, event]


@dataclass(slots=True, kw_only=True)
class _Transfer:
    transfer_id: str
    consumer_id: str
    offer: _Offer
    view: OfferView
    deadline_s: float
    last_deadline_s: float
    """No renewal goes beyond this: the consumer's own request is over then."""
    state: TransferState = TransferState.OPEN

    def on(self, event: TransferEvent) -> None:
        self.state = TRANSFER_TABLE[self.state, event]


class OfferTable:
    """All offers and transfers of one owner. Not thread-safe: lives on the owner's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offers: dict[str, _Offer] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._writers: dict[str, _Offer] = {}
        """Transfer id -> the offer whose blocks are being written for it."""
        self._offers_due: Deadlines[str] = Deadlines()
        """Of offers that have not closed."""
        self._transfers_due: Deadlines[str] = Deadlines()
        self._ended: list[EndedOffer] = []
        self._past_offers: OrderedDict[str, Reason] = OrderedDict()
        self._past_transfers: OrderedDict[str, TransferState] = OrderedDict()
        self.transfers_ended: Counter[TransferState] = Counter()
        """Transfers ended so far, by outcome; a refused begin counts as failed."""

    @property
    def num_open(self) -> int:
        """Offers whose blocks are still held."""
        return len(self._offers)

    @property
    def num_transfers(self) -> int:
        """Transfers that read now."""
        return len(self._transfers)

    def open(
        self,
        offer_id: str,
        *,
        request_id: str,
        digest: bytes,
        lease_s: float = OFFER_LEASE_S,
        release_on_commit: bool = False,
        seal_within_s: float = 600.0,
    ) -> None:
        """Start an offer. Until its lease starts, at the seal or later, it lives `seal_within_s`, the request's own deadline."""
        if self.knows(offer_id):
            raise ValueError(f"offer {offer_id} was opened before")
        offer = _Offer(
            offer_id=offer_id,
            request_id=request_id,
            digest=digest,
            lease_s=lease_s,
            release_on_commit=release_on_commit,
        )
        self._offers[offer_id] = offer
        self._hold_until(offer, self._clock() + seal_within_s)

    def seal(
        self, offer_id: str, groups: list[GroupBlocks], num_tokens: int, marks: KVMarks = NO_MARKS, is_told: bool = True
    ) -> bool:
        """Say that the blocks are complete. False when the offer has ended meanwhile: there is nothing more to do.

        `is_told`: whoever is to renew it learns of it now; else `tell` starts its lease later.
        """
        self.expire()
        offer = self._offers.get(offer_id)
        if offer is None or offer.state is not OfferState.OPEN:
            return False
        offer.on(OfferEvent.SEAL)
        offer.groups, offer.num_tokens = groups, num_tokens
        offer.marks = msgspec.structs.replace(marks, before_reset=marks.before_reset or offer.marks.before_reset)
        lease_until_s = self._clock() + offer.lease_s
        self._hold_until(offer, lease_until_s if is_told else max(offer.deadline_s, lease_until_s))
        return True

    def tell(self, offer_id: str) -> None:
        """Start the lease of an offer that was sealed for somebody who knows of it only from now on."""
        self.expire()
        offer = self._offers.get(offer_id)
        if offer is not None and offer.state is OfferState.SEALED:
            readers_until_s = max((self._transfers[each].deadline_s for each in offer.reading), default=0.0)
            self._hold_until(offer, max(self._clock() + offer.lease_s, readers_until_s))

    def begin(
        self,
        transfer_id: str,
        consumer_id: str,
        offer_id: str,
        digest: bytes,
        groups: list[GroupBlocks] | None = None,
        *,
        remaining_s: float = 600.0,
        written: bool = False,
        heeds_marks: bool = True,
    ) -> OfferView:
        """Let a consumer read an offer, or the blocks of it named in `groups`; repeating a begin changes nothing.

        `groups` may leave generations out. `written`: this owner's transport writes them into the consumer's pool, as they are
        computed, so that it may begin before the seal (what is there by then is not in the view); the blocks are held until
        `stopped` says that it does no more, whatever becomes of the transfer.

        Raises TransferFailed (unknown, not_sealed, released, expired, committed, marked, digest, stale, transfer_ended) or
        Forbidden (blocks that are not the offer's, another consumer's transfer).
        """
        self.expire()
        if (running := self._transfers.get(transfer_id)) is not None:
            if running.consumer_id != consumer_id or running.offer.offer_id != offer_id:
                raise Forbidden(f"{Reason.FOREIGN_TRANSFER}: transfer {transfer_id} is not {consumer_id}'s")
            return running.view
        if transfer_id in self._past_transfers:
            outcome = self._past_transfers[transfer_id].value
            raise TransferFailed(f"{Reason.TRANSFER_ENDED}: transfer {transfer_id} has ended already, {outcome}")
        try:
            offer = self._readable(offer_id, digest, early=written)
            if not heeds_marks:
                check_unmarked(offer_id, offer.marks)
            view = narrowed(offer.view, offer_id, groups)
        except (TransferFailed, Forbidden):
            self._remember_transfer(transfer_id, TRANSFER_TABLE[TransferState.OPEN, TransferEvent.REFUSE])
            raise
        now = self._clock()
        transfer = _Transfer(
            transfer_id=transfer_id,
            consumer_id=consumer_id,
            offer=offer,
            view=view,
            deadline_s=now,
            last_deadline_s=now + remaining_s,
        )
        transfer.on(TransferEvent.BEGIN)
        self._transfers[transfer_id] = transfer
        offer.reading.add(transfer_id)
        if written:
            offer.writing.add(transfer_id)
            self._writers[transfer_id] = offer
        self._extend(transfer)
        return view

    def note_reset(self) -> None:
        """What has been computed for offers by now is for their own requests only, not for who comes later."""
        for offer in self._offers.values():
            offer.marks = msgspec.structs.replace(offer.marks, before_reset=True)

    def knows(self, offer_id: str) -> bool:
        """Whether an offer of this name was opened."""
        return offer_id in self._offers or offer_id in self._past_offers

    def is_live(self, offer_id: str) -> bool:
        """Whether an offer is open or sealed, and neither released nor over its lease."""
        offer = self._offers.get(offer_id)
        return offer is not None and offer.state is not OfferState.CLOSING

    def renew(self, offer_id: str) -> bool:
        """Give an offer a fresh lease; False when it takes no new transfer any more."""
        self.expire()
        offer = self._offers.get(offer_id)
        if offer is None or offer.state is OfferState.CLOSING:
            return False
        if offer.state is OfferState.SEALED:
            self._hold_until(offer, max(offer.deadline_s, self._clock() + offer.lease_s))
        return True

    def renew_transfer(self, transfer_id: str) -> bool:
        """Give a transfer, and with it its offer, more time; False when it has ended."""
        self.expire()
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        self._extend(transfer)
        return True

    def end(self, transfer_id: str, committed: bool, reason: str = "") -> bool:
        """End a transfer as its consumer says; False when it is unknown or has ended already.

        The end of an unknown one may have overtaken its begin, which is refused then: its consumer waits for nothing.
        """
        self.expire()
        event = event_of_end(committed, reason)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            unheard = TRANSFER_TABLE.get((TransferState.OPEN, event))
            if unheard is not None and transfer_id not in self._past_transfers:
                _remember(self._past_transfers, transfer_id, unheard)
            return False
        self._end_transfer(transfer, event)
        return True

    def read_by(self, transfer_id: str) -> list[GroupBlocks]:
        """The blocks that a transfer reads now; none when it does not."""
        transfer = self._transfers.get(transfer_id)
        return [] if transfer is None else transfer.offer.groups

    def outcome_of(self, transfer_id: str) -> TransferState | None:
        """What became of a transfer; None when it is unknown or long ago."""
        if transfer_id in self._transfers:
            return TransferState.READING
        return self._past_transfers.get(transfer_id)

    def is_writing(self, transfer_id: str) -> bool:
        """Whether this owner's transport may still write for a transfer, which may have ended."""
        return transfer_id in self._writers

    def stopped(self, transfer_id: str) -> None:
        """This owner's transport writes no more for a transfer; unknown ones are ignored."""
        offer = self._writers.pop(transfer_id, None)
        if offer is None:
            return
        offer.writing.discard(transfer_id)
        if offer.state is OfferState.CLOSING and offer.is_idle:
            self._give_back(offer)

    def release(self, offer_id: str, *, unread: bool = False, digest: bytes = b"") -> bool:
        """End an offer as soon as nothing reads or writes from it; False when it was ending already or is unknown.

        `unread`, as its consumer says: only if one commit would end it. Others are a proxy's, who has them read elsewhere.
        With a `digest`: only if it was computed for that request.
        """
        self.expire()
        offer = self._offers.get(offer_id)
        if offer is None or offer.state is OfferState.CLOSING or (unread and not offer.release_on_commit):
            return False
        if digest and not hmac.compare_digest(offer.digest, digest):
            return False
        self._close(offer, Reason.RELEASED)
        return True

    def release_all(self) -> None:
        """Release every offer, as a draining owner does."""
        for offer_id in list(self._offers):
            self.release(offer_id)

    def expire(self) -> None:
        """End what is over its lease."""
        now = self._clock()
        for transfer_id in self._transfers_due.take_due(now):
            self._end_transfer(self._transfers[transfer_id], TransferEvent.EXPIRE)
        for offer_id in self._offers_due.take_due(now):
            self._close(self._offers[offer_id], Reason.EXPIRED)

    def next_deadline(self) -> float | None:
        """Clock time at which `expire` will next have something to do, None when nothing is open."""
        deadlines = (self._transfers_due.next_s(), self._offers_due.next_s())
        return min((each for each in deadlines if each is not None), default=None)

    def take_ended(self) -> list[EndedOffer]:
        """Return the offers that ended since the last call; each appears in exactly one answer."""
        ended, self._ended = self._ended, []
        return ended

    def _readable(self, offer_id: str, digest: bytes, *, early: bool) -> _Offer:
        offer = self._offers.get(offer_id)
        if offer is None:
            reason = self._past_offers.get(offer_id, Reason.UNKNOWN)
            raise TransferFailed(f"{reason}: offer {offer_id} is not held here")
        if offer.state is OfferState.CLOSING:
            raise TransferFailed(f"{offer.reason}: offer {offer_id} is ending")
        if offer.state is OfferState.OPEN and not early:
            raise TransferFailed(f"{Reason.NOT_SEALED}: offer {offer_id} is still being computed")
        if not hmac.compare_digest(offer.digest, digest):
            raise TransferFailed(f"{Reason.DIGEST}: offer {offer_id} was computed for another request")
        return offer

    def _extend(self, transfer: _Transfer) -> None:
        until = min(self._clock() + TRANSFER_LEASE_S, transfer.last_deadline_s)
        transfer.deadline_s = max(transfer.deadline_s, until)
        self._transfers_due.set(transfer.transfer_id, transfer.deadline_s)
        # An offer never ends by its own lease under a transfer that is within its.
        if transfer.offer.state is not OfferState.CLOSING:
            self._hold_until(transfer.offer, max(transfer.offer.deadline_s, transfer.deadline_s))

    def _hold_until(self, offer: _Offer, deadline_s: float) -> None:
        offer.deadline_s = deadline_s
        self._offers_due.set(offer.offer_id, deadline_s)

    def _end_transfer(self, transfer: _Transfer, event: TransferEvent) -> None:
        transfer.on(event)
        del self._transfers[transfer.transfer_id]
        self._transfers_due.drop(transfer.transfer_id)
        self._remember_transfer(transfer.transfer_id, transfer.state)
        offer = transfer.offer
        offer.reading.discard(transfer.transfer_id)
        if transfer.state is TransferState.COMMITTED and offer.release_on_commit and offer.state is OfferState.SEALED:
            self._close(offer, Reason.COMMITTED)
        elif offer.state is OfferState.CLOSING and offer.is_idle:
            self._give_back(offer)

    def _close(self, offer: _Offer, reason: Reason) -> None:
        offer.on(OfferEvent.CLOSE)
        self._offers_due.drop(offer.offer_id)
        offer.reason = reason
        if offer.is_idle:
            self._give_back(offer)

    def _give_back(self, offer: _Offer) -> None:
        offer.on(OfferEvent.IDLE)
        del self._offers[offer.offer_id]
        _remember(self._past_offers, offer.offer_id, offer.reason)
        self._ended.append(
            EndedOffer(offer_id=offer.offer_id, request_id=offer.request_id, reason=offer.reason, groups=offer.groups)
        )

    def _remember_transfer(self, transfer_id: str, state: TransferState) -> None:
        self.transfers_ended[state] += 1
        _remember(self._past_transfers, transfer_id, state)


def _remember(memory: "OrderedDict[str, ValueT]", key: str, value: ValueT) -> None:
    memory[key] = value
    while len(memory) > NUM_REMEMBERED:
        memory.popitem(last=False)
