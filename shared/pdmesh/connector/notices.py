"""What an owner's core tells a consumer's core of an offer, without their servers between them.

It is the answer to a begin, less the owner's agreement: that comes by way of the servers, some milliseconds later, and until it
has come the consumer lets nothing out that rests on the offer. Meanwhile it copies, compares and computes: the blocks' words and
sums make sure of what it reads, whoever told it where. Nobody has to tell or to listen; without a notice the answer serves.
"""

from abc import abstractmethod

import msgspec

from pdmesh.connector.base import WorkerConnector
from pdmesh.protocol.messages import NO_MARKS, GroupBlocks, KVMarks

GIVING_NOTICE = ("shm",)
"""Connectors that are a `NoticeConnector`, for processes that have none of them."""
MAX_NOTICE_BYTES = 64 << 10
"""Of a notice as it is sent; a longer one would have to wait for room in a socket."""
MAX_AWAITED = 4096
"""Offers that consumers of one pool listen for at a time; the oldest are forgotten."""


class OfferNotice(msgspec.Struct, frozen=True, kw_only=True):
    """An offer is complete."""

    offer_id: str
    groups: list[GroupBlocks]
    """With their sums, where the owner has any."""
    num_tokens: int
    digest: bytes = b""
    """`request_digest` of the prompt that it was computed for."""
    first_tokens: list[int]
    """Of the one choice that goes on from it."""
    marks: KVMarks = NO_MARKS

    @property
    def is_sound(self) -> bool:
        """Whether it says something that can be worked with; which blocks there are, the pull finds out."""
        return self.num_tokens > 0 and bool(self.first_tokens) and all(group.is_sound for group in self.groups)


class NoticeConnector(WorkerConnector):
    """A worker's half over which cores may send each other notices. Called from the core's loop; nothing here blocks."""

    @abstractmethod
    def await_offer(self, peer_id: str, offer_id: str) -> None:
        """Listen for an offer of a connected peer's. Whether that tells anything is its business."""

    @abstractmethod
    def take_notices(self) -> list[tuple[str, OfferNotice]]:
        """Return what peers have told, by peer id, since the last call; `fileno` becomes readable when there is something."""

    @abstractmethod
    def is_awaited(self, offer_id: str) -> bool:
        """Whether anybody listens for an offer of this pool."""

    @abstractmethod
    def tell(self, notice: OfferNotice) -> None:
        """Tell those who listen for an offer, once."""
