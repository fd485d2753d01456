"""What an offer and a transfer go through: two tables of (state, event) -> state; what is not in a table cannot happen.

An *offer* holds blocks for whoever has its ticket; a *transfer* is one consumer's attempt to read them.

    offer      OPEN ──seal──► SEALED ──release / lease──► CLOSING ──last transfer ends──► ENDED
    transfer   OPEN ──begin──► READING ──► COMMITTED | FAILED | EXPIRED | ABORTED
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
    """No transfer reads from it."""


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
    (TransferState.READING, TransferEvent.COMMIT): TransferState.COMMITTED,
    (TransferState.READING, TransferEvent.FAIL): TransferState.FAILED,
    (TransferState.READING, TransferEvent.EXPIRE): TransferState.EXPIRED,
    (TransferState.READING, TransferEvent.ABORT): TransferState.ABORTED,
}


class Reason(StrEnum):
    """Why a begin is refused or an offer ended; the first word of the error's message."""

    UNKNOWN = "unknown"
    NOT_SEALED = "not_sealed"
    RELEASED = "released"
    EXPIRED = "expired"
    COMMITTED = "committed"
    """The offer was for one consumer, and that one has it."""
    DIGEST = "digest"
    STALE = "stale"
    FOREIGN_BLOCKS = "foreign_blocks"
    FOREIGN_TRANSFER = "foreign_transfer"
    TRANSFER_ENDED = "transfer_ended"
