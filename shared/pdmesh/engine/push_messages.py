"""What server and core say of pushes, part of `messages.py`: orders to write and to make room, and what has become of them."""

import msgspec

from pdmesh.protocol.messages import GroupBlocks

PUSH_SOURCE = "push"
"""`kv_source` of what found KV that was pushed here."""
INVALID = "invalid"
"""Reason of a push whose KV, what was written of it included, is not to be trusted."""
ALL_CACHED = "cached"
"""Reason of a push that there is no need for."""
PRESSURE = "pressure"
"""Reason of a push whose room somebody else needs."""


class BeginPush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the full blocks of an offer's prompt into a connected peer's pool as they are computed; answered by PushReports, the
    last of which has `ended`."""

    transfer_id: str
    offer_id: str
    peer_id: str
    first_block: int
    targets: list[list[int]]
    """Block ids of each group, from `first_block` on."""


class StopPush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody wants it any more; a last PushReport says when nothing is written."""

    transfer_id: str


class ExpectPush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make room for a prompt that another engine will push; answered by PushExpected."""

    transfer_id: str
    token_ids: list[int]
    cache_salt: str


class PushArrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many of the first blocks that PushExpected named hold their content."""

    transfer_id: str
    num_blocks: int


class EndPush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What became of an expected push; both may be said, in either order, and then it is over."""

    transfer_id: str
    is_stopped: bool = False
    """The writer has said, or has been made sure of, that it writes no more."""
    is_unwanted: bool = False
    """Nobody will come for it."""
    is_broken: bool = False
    """What arrived is not to be trusted."""


class ShutOutWriters(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make sure that no peer writes into the pool any more over a connector; answered by WritersShutOut."""

    connector: str


class PushReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a push from here is."""

    transfer_id: str
    num_blocks: int
    """So many of the first targets of each group are written."""
    num_bytes: int = 0
    """Written since the last report."""
    sources: list[GroupBlocks] = []
    """The own blocks that these were written from."""
    ended: bool = False
    """Nothing is written any more."""
    reason: str = ""
    """Why it ended before all was written."""
    may_write: bool = False
    """Bytes of it may still come to the consumer's memory: only the consumer can make sure that none do."""


class LandingReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody here needs an expected push any more."""

    transfer_id: str
    num_tokens: int = 0
    """That the request it was for found by it."""
    reason: str = ""
    """Why it is given up, when no request has come for it."""


class PushExpected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    transfer_id: str
    first_block: int = 0
    blocks: list[list[int]] = []
    """Block ids of each group, from `first_block` on: where the prompt's missing full blocks are to be written."""
    reason: str = ""
    """Why nothing is expected after all."""


class WritersShutOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    connector: str
