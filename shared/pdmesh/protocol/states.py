"""What an offer and a transfer go through: two tables of (state, event) -> state; what is not in a table cannot happen.

An *offer* holds blocks for whoever has its ticket; a *transfer* is one consumer's attempt to read them. Both ends keep a
transfer by the same table: the owner from the begin that it hears, the consumer from the begin that it sends. A third, small
table is about the blocks that a transfer writes into.

    offer      OPEN ──seal──► SEALED ──release / lease──► CLOSING ──last transfer ends──► ENDED
    transfer   OPEN ──begin──► READING ──► COMMITTED | FAILED | EXPIRED | ABORTED
    landing    EXPECTED ──arrived──► USABLE, or ──unwanted──► QUARANTINED ──writer stopped──► FENCED
"""

from enum import Enum, StrEnum


class OfferState(Enum):
    OPEN = "open"
    SEALED = "sealed"
    CLOSING = "closing"
    """Takes no new transfer; waits for those that read."""
    ENDED = "ended"


class OfferEvent(Enum):
    SEAL = "seal"
    CLOSE = "close"
    """Released, or its lease is over."""
    IDLE = "idle"
    """No transfer reads from it, and nothing is written out of it."""


class TransferState(Enum):
    OPEN = "open"
    READING = "reading"
    COMMITTED = "committed"
    FAILED = "failed"
    EXPIRED = "expired"
    ABORTED = "aborted"


class TransferEvent(Enum):
    BEGIN = "begin"
    REFUSE = "refuse"
    COMMIT = "commit"
    FAIL = "fail"
    EXPIRE = "expire"
    ABORT = "abort"


OFFER_TABLE: dict[tuple[OfferState, OfferEvent], OfferState] = {
    (OfferState.OPEN, OfferEvent.SEAL): OfferState.SEALED,
    (OfferState.OPEN, OfferEvent.CLOSE): OfferState.CLOSING,
    (OfferState.SEALED, OfferEvent.CLOSE): OfferState.CLOSING,
    (OfferState.CLOSING, OfferEvent.IDLE): OfferState.ENDED,
}
TRANSFER_TABLE: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.OPEN, TransferEvent.BEGIN): TransferState.READING,
    (TransferState.OPEN, TransferEvent.REFUSE): TransferState.FAILED,
    # The consumer gave up before it had its begin's answer.
    (TransferState.OPEN, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.OPEN, TransferEvent.ABORT): TransferState.ABORTED,
    (TransferState.READING, TransferEvent.COMMIT): TransferState.COMMITTED,
    (TransferState.READING, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.READING, TransferEvent.EXPIRE): TransferState.EXPIRED,
    (TransferState.READING, TransferEvent.ABORT): TransferState.ABORTED,
}


class LandingState(Enum):
    """Of the consumer's blocks that a transfer's bytes are written into."""

    EXPECTED = "expected"
    """Somebody waits for them; they may be written at any moment."""
    QUARANTINED = "quarantined"
    """Nobody wants them any more, and they may still be written: nobody else may have them."""
    USABLE = "usable"
    """All is there, and nothing writes any more."""
    FENCED = "fenced"
    """They hold garbage, and nothing writes any more."""


class LandingEvent(Enum):
    ARRIVED = "arrived"
    """The writer has written all, and has stopped."""
    STOPPED = "stopped"
    """The writer has stopped before all was written, or can write no more: that start of it has said so after it knew of the
    transfer's end, or has been shut out. A refused begin is no such word (an earlier one of the same transfer may be under
    way), nor is the word of another start."""
    UNWANTED = "unwanted"
    """Whoever waited has gone, or waits no longer."""


LANDING_TABLE: dict[tuple[LandingState, LandingEvent], LandingState] = {
    (LandingState.EXPECTED, LandingEvent.ARRIVED): LandingState.USABLE,
    (LandingState.EXPECTED, LandingEvent.STOPPED): LandingState.FENCED,
    (LandingState.EXPECTED, LandingEvent.UNWANTED): LandingState.QUARANTINED,
    # No lease and no deadline is among the events: time stops no writer.
    (LandingState.QUARANTINED, LandingEvent.ARRIVED): LandingState.FENCED,
    (LandingState.QUARANTINED, LandingEvent.STOPPED): LandingState.FENCED,
}


ABORT_REASONS = frozenset({"cancelled", "aborted"})
"""Reasons of a consumer that changed its mind, as opposed to one whose read failed."""


def event_of_end(committed: bool, reason: str) -> TransferEvent:
    """What a consumer's word on its transfer means, at either end."""
    if committed:
        return TransferEvent.COMMIT
    return TransferEvent.ABORT if reason in ABORT_REASONS else TransferEvent.FAIL


class Reason(StrEnum):
    """Why a begin is refused or an offer ended; the first word of the error's message."""

    UNKNOWN = "unknown"
    NOT_SEALED = "not_sealed"
    RELEASED = "released"
    EXPIRED = "expired"
    COMMITTED = "committed"
    """The offer was for one consumer, and that one has it."""
    MARKED = "marked"
    """It rests on converted KV or is from before a reset, and the consumer's release would not keep that in mind."""
    DIGEST = "digest"
    STALE = "stale"
    FOREIGN_BLOCKS = "foreign_blocks"
    FOREIGN_TRANSFER = "foreign_transfer"
    TRANSFER_ENDED = "transfer_ended"
