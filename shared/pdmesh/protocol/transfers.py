"""What owner and consumer say to each other of a transfer, and how the wire has it; pure functions, like those of `wire.py`."""

from dataclasses import dataclass, field

from pdmesh.errors import MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.messages import NO_MARKS, GroupBlocks, KVMarks
from pdmesh.protocol.states import Reason, TransferState
from pdmesh.protocol.wire import blocks_from_pb, blocks_to_pb, error_from_pb, error_to_pb, to_ms

# A later release may have others: these mean nothing here.
_OUTCOMES = frozenset(state.value for state in TransferState)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferView:
    """What a consumer may read."""

    groups: list[GroupBlocks]
    num_tokens: int
    marks: KVMarks = NO_MARKS


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedOffer:
    """An offer whose blocks the owner must let go now."""

    offer_id: str
    request_id: str
    reason: Reason
    """released, expired or committed."""
    groups: list[GroupBlocks]
    """Empty when it ended before its seal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A consumer asks to read an offer."""

    transfer_id: str
    """Minted by the consumer, one per attempt."""
    consumer_id: str
    """`engine_id@epoch` of who asks."""
    offer_id: str
    digest: bytes
    """`request_digest` of the request it is for."""
    groups: list[GroupBlocks] = field(default_factory=list)
    """Which blocks; empty: all of the offer's."""
    remaining_s: float
    """How long the consumer's own request may still want it."""
    connector: str = ""
    """Over which it will be read; empty: one that reads where the blocks lie."""
    heeds_marks: bool = True
    """Whether the consumer keeps the view's marks; one of an earlier release does not know of them."""
    awaits: bool = False
    """The offer may still be open: answer when its request has its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an owner said to a begin."""

    peer_id: str
    """Of who answered; empty when an owner of an earlier release did not say."""
    view: OfferView | None = None
    """What may be read; None with no error: there is nothing to read."""
    first_tokens: list[int] = field(default_factory=list)
    """To a begin that awaits: those of the one choice that goes on."""
    error: MeshError | None = None
    """Why it refused (TransferFailed, Forbidden)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A consumer's word on how its transfer ended."""

    transfer_id: str
    committed: bool
    reason: str = ""
    peer_id: str = ""
    """Of the owner that it is for; empty from a consumer of an earlier release."""
    release_offer: str = ""
    """An offer of vLLM's flow that nobody will read any more."""
    release_digest: bytes = b""
    """Of the request that the offer must have been computed for to be ended; empty: for whichever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What an owner said to an end."""

    known: bool
    """Whether the transfer ran until now."""
    outcome: TransferState | None = None
    """How it has ended at the owner, now or before; None when the owner does not know."""
    writing: bool = False
    """Whether the owner's transport may still write into the consumer's blocks; saying the end again tells when not."""
    stopping: bool = False
    """Beside `writing`: it is at work on what it had begun, and saying the end again will tell when not. Without it that may be
    for ever: from an owner of an earlier release, and where bytes have left that the owner cannot see arrive."""
    peer_id: str = ""
    """Of who answered, where it said so: another start of the owner knows nothing of what the one before still writes."""


def begin_to_pb(begin: Begin) -> pb.BeginTransferRequest:
    """Encode a begin."""
    return pb.BeginTransferRequest(
        transfer_id=begin.transfer_id,
        consumer_id=begin.consumer_id,
        offer_id=begin.offer_id,
        digest=begin.digest,
        groups=[blocks_to_pb(group) for group in begin.groups],
        remaining_ms=to_ms(begin.remaining_s),
        connector=begin.connector,
        heeds_marks=begin.heeds_marks,
        awaits=begin.awaits,
    )


def begin_from_pb(message: pb.BeginTransferRequest) -> Begin:
    """Decode a begin."""
    return Begin(
        transfer_id=message.transfer_id,
        consumer_id=message.consumer_id,
        offer_id=message.offer_id,
        digest=message.digest,
        groups=[blocks_from_pb(group) for group in message.groups],
        remaining_s=message.remaining_ms / 1000,
        connector=message.connector,
        heeds_marks=message.heeds_marks,
        awaits=message.awaits,
    )


def begun_to_pb(begun: Begun) -> pb.BeginTransferReply:
    """Encode the answer to a begin."""
    if begun.error is not None:
        return pb.BeginTransferReply(error=error_to_pb(begun.error), peer_id=begun.peer_id)
    view = begun.view or OfferView(groups=[], num_tokens=0)
    return pb.BeginTransferReply(
        groups=[blocks_to_pb(group) for group in view.groups],
        num_tokens=view.num_tokens,
        peer_id=begun.peer_id,
        num_exact_tokens=view.marks.num_exact_tokens,
        before_reset=view.marks.before_reset,
        first_tokens=begun.first_tokens,
    )


def begun_from_pb(message: pb.BeginTransferReply) -> Begun:
    """Decode the answer to a begin: a view or an error."""
    if message.HasField("error"):
        return Begun(peer_id=message.peer_id, error=error_from_pb(message.error))
    marks = KVMarks(
        num_exact_tokens=message.num_exact_tokens if message.HasField("num_exact_tokens") else None,
        before_reset=message.before_reset,
    )
    groups = [blocks_from_pb(group) for group in message.groups]
    view = OfferView(groups=groups, num_tokens=message.num_tokens, marks=marks)
    return Begun(peer_id=message.peer_id, view=view, first_tokens=list(message.first_tokens))


def end_to_pb(end: End) -> pb.EndTransferRequest:
    """Encode an end."""
    return pb.EndTransferRequest(
        transfer_id=end.transfer_id,
        committed=end.committed,
        reason=end.reason,
        peer_id=end.peer_id,
        # An owner of an earlier release, which would compare nothing, does not see it.
        release_offer="" if end.release_digest else end.release_offer,
        release_offer_of=end.release_offer if end.release_digest else "",
        release_digest=end.release_digest,
    )


def end_from_pb(message: pb.EndTransferRequest) -> End:
    """Decode an end."""
    return End(
        transfer_id=message.transfer_id,
        committed=message.committed,
        reason=message.reason,
        peer_id=message.peer_id,
        release_offer=message.release_offer or message.release_offer_of,
        release_digest=message.release_digest,
    )


def ended_to_pb(ended: Ended) -> pb.EndTransferReply:
    """Encode the answer to an end."""
    outcome = "" if ended.outcome is None else ended.outcome.value
    return pb.EndTransferReply(
        known=ended.known, outcome=outcome, writing=ended.writing, peer_id=ended.peer_id, stopping=ended.stopping
    )


def ended_from_pb(message: pb.EndTransferReply) -> Ended:
    """Decode the answer to an end."""
    outcome = TransferState(message.outcome) if message.outcome in _OUTCOMES else None
    return Ended(
        known=message.known,
        outcome=outcome,
        writing=message.writing,
        peer_id=message.peer_id,
        stopping=message.stopping,
    )
