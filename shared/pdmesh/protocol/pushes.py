"""What proxy, decode and prefill say to each other of a push, and how the wire has it; pure functions, like those of `wire.py`.

A push is a transfer that its owner writes: while prefill computes a prompt, full blocks of it go into the prefix cache of the
decode that will go on with it. The proxy tells decode what to expect; decode names blocks of its own and begins the transfer.
"""

import secrets
from dataclasses import dataclass, field

from pdmesh.errors import MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.transfers import Begin, begin_from_pb, begin_to_pb
from pdmesh.protocol.wire import blocks_from_pb, blocks_to_pb, error_from_pb, error_to_pb, to_ms

OFFER_ID_CHARS = 32
"""Of an offer's id that a proxy mints: 16 random bytes in hexadecimal."""
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A prompt that another engine computes, and that this one will be asked to go on with."""

    offer_id: str
    owner_id: str
    """`engine_id@epoch` of who computes it."""
    owner_address: str
    """gRPC `host:port`."""
    token_ids: list[int]
    cache_salt: str
    remaining_s: float
    """Of the request's own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOrder:
    """A consumer asks an owner to write an offer into blocks of the consumer's."""

    begin: Begin
    targets: list[GroupBlocks]
    """One list per group, all from the same `first_block` on; generations are not told."""
    connector: str
    metadata: bytes
    """How the consumer's pool is reached over it."""
    num_blocks: int
    block_bytes: int
    """Of that pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushProgress:
    """How far an owner is."""

    peer_id: str
    num_blocks: int = 0
    """So many of the first targets of each group hold their content, and will not be written again."""
    checksums: list[list[int]] = field(default_factory=list)
    """Of each group: what those sum to that are new since the last word. 0 for a block, or no group: not checked."""
    ended: bool = False
    """Nothing is written any more, whatever happens."""
    error: MeshError | None = None
    """Why it ended before all was written."""


def new_offer_id() -> str:
    """Mint an offer's id."""
    return secrets.token_hex(OFFER_ID_CHARS // 2)


def is_offer_id(text: str) -> bool:
    """Whether a proxy may have minted this."""
    return len(text) == OFFER_ID_CHARS and _HEX.issuperset(text)


def expectation_to_pb(expectation: Expectation) -> pb.Expectation:
    """Encode an expectation."""
    return pb.Expectation(
        offer_id=expectation.offer_id,
        owner_id=expectation.owner_id,
        owner_address=expectation.owner_address,
        token_ids=expectation.token_ids,
        cache_salt=expectation.cache_salt,
        remaining_ms=to_ms(expectation.remaining_s),
    )


def expectation_from_pb(message: pb.Expectation) -> Expectation:
    """Decode an expectation."""
    return Expectation(
        offer_id=message.offer_id,
        owner_id=message.owner_id,
        owner_address=message.owner_address,
        token_ids=list(message.token_ids),
        cache_salt=message.cache_salt,
        remaining_s=message.remaining_ms / 1000,
    )


def order_to_pb(order: PushOrder) -> pb.PushRequest:
    """Encode the begin of a push."""
    return pb.PushRequest(
        begin=begin_to_pb(order.begin),
        targets=[blocks_to_pb(each) for each in order.targets],
        pool=pb.ConnectorMetadata(connector=order.connector, metadata=order.metadata),
        num_blocks=order.num_blocks,
        block_bytes=order.block_bytes,
    )


def order_from_pb(message: pb.PushRequest) -> PushOrder:
    """Decode the begin of a push."""
    return PushOrder(
        begin=begin_from_pb(message.begin),
        targets=[blocks_from_pb(each) for each in message.targets],
        connector=message.pool.connector,
        metadata=message.pool.metadata,
        num_blocks=message.num_blocks,
        block_bytes=message.block_bytes,
    )


def progress_to_pb(progress: PushProgress) -> pb.PushProgress:
    """Encode an owner's word."""
    message = pb.PushProgress(
        peer_id=progress.peer_id,
        num_blocks=progress.num_blocks,
        checked=[pb.BlockList(group=group, checksums=sums) for group, sums in enumerate(progress.checksums)],
        ended=progress.ended,
    )
    if progress.error is not None:
        message.error.CopyFrom(error_to_pb(progress.error))
    return message


def progress_from_pb(message: pb.PushProgress) -> PushProgress:
    """Decode an owner's word."""
    return PushProgress(
        peer_id=message.peer_id,
        num_blocks=message.num_blocks,
        checksums=[list(each.checksums) for each in message.checked],
        ended=message.ended,
        error=error_from_pb(message.error) if message.HasField("error") else None,
    )
