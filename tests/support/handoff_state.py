"""What a handoff's world is made of: the rules that hold in it, and the state of its parties and of the network, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pdmesh.protocol.offers import OfferTable
from pdmesh.protocol.states import (
    LANDING_TABLE,
    LandingEvent,
    LandingState,
    OfferState,
    Reason,
    TransferState,
)

OFFER = "o"

NOTHING, MINE, OTHER = "", "mine", "other's"
"""What the block, or a consumer's copy of it, holds."""


class At(StrEnum):
    """Where the proxy is with its request."""

    PREFILL = "prefill"
    HOLDING = "holding"
    """It has the ticket and no decode leg runs."""
    DECODE = "decode"
    DONE = "done"
    GONE = "gone"
    """The client left, or the request's time is up."""
    CRASHED = "crashed"


class Bumps(StrEnum):
    """When a block gets a new generation word."""

    BEFORE = "before its new content"
    AFTER = "after its new content"
    NEVER = "never"


@dataclass(frozen=True)
class Rules:
    """What is searched, and which rules hold in it; all as they should be unless said otherwise."""

    pushes: bool = False
    """The owner writes into the consumer's block, rather than the consumer reading the owner's."""
    early: bool = False
    """A decode is told to expect the push while prefill computes, and begins on the open offer."""
    writes_early: bool = False
    """The owner writes at the begin, whether the block is computed or not."""
    told_ahead: bool = False
    """A decode asks while prefill computes, and may pull on the word of the owner's core before the owner has answered."""
    other_prompt: bool = False
    """The decode leg is of another prompt than the offer: nothing of that is for it."""
    stock: bool = False
    """A stock router: it neither renews nor releases, and the first commit ends the offer."""
    faults: int = 1
    legs: int = 2
    """Decode legs that the proxy tries at most."""
    table: type[OfferTable] = OfferTable
    landing: Mapping[tuple[LandingState, LandingEvent], LandingState] = field(default_factory=lambda: LANDING_TABLE)
    compares_prompts: bool = True
    """Who is told ahead looks whether its own prompt is meant."""
    lets_out_early: bool = False
    """It commits before the owner has answered."""
    compares: bool = True
    """The consumer compares generation words."""
    compares_after: bool = True
    """It reads them after the data, not before."""
    bumps: Bumps = Bumps.BEFORE
    checks_epoch: bool = True
    """Only the process that made the promise is read."""
    words_are_random: bool = True
    """Each start of the owner begins with generation words of its own."""
    gives_up: bool = True
    """A consumer waits for an answer only so long."""
    refusal_fences: bool = False
    """A refused begin is taken for the word that nothing is written."""
    any_answer_fences: bool = False
    """So is what another start of the owner says."""
    time_fences: bool = False
    """So is time that passes."""


class Owner(NamedTuple):
    """An `OfferTable` as a value; times are relative to now."""

    offer: tuple[OfferState, float, Reason, frozenset[str]] | None
    """State, deadline, reason, transfers that read."""
    writers: frozenset[str] = frozenset()
    """Transfers that may still be written."""
    transfers: tuple[tuple[str, float], ...] = ()
    past_offers: tuple[tuple[str, Reason], ...] = ()
    past_transfers: tuple[tuple[str, TransferState], ...] = ()


class Proxy(NamedTuple):
    at: At = At.PREFILL
    leg: int = 0
    on: str = ""
    live: bool = False
    """It holds the offer and has not heard that it is over."""
    epoch: int = 0
    early: str = ""
    """What has become of the leg before the ticket came: committed or failed."""


class Consumer(NamedTuple):
    life: int = 0
    """Grows with every crash."""
    attempt: str = ""
    """Id of its transfer; empty when it has none and no block waits for a writer."""
    state: TransferState = TransferState.OPEN
    epoch: int = 0
    """Start of the owner that it deals with."""
    word: tuple[int, int] = (-1, -1)
    """Generation that it was promised."""
    landing: LandingState | None = None
    data: str = NOTHING
    checked: bool = False
    """It has compared words before it reads data, as it should not."""
    pulled: str | None = None
    """How its pull has ended before the owner has answered: the reason, empty when well; None: it has not."""

    @property
    def pulls(self) -> bool:
        """Whether its transport may read, and write here."""
        return self.landing in (LandingState.EXPECTED, LandingState.QUARANTINED)


class Node(NamedTuple):
    owner: Owner | None
    """None: not running."""
    epoch: int
    word: int
    content: str
    held: bool
    """The block is kept for the offer."""
    proxy: Proxy
    a: Consumer
    b: Consumer
    bag: tuple[tuple[Any, ...], ...]
    faults: int
    bad: str = ""

    def send(self, *messages: tuple[Any, ...]) -> Node:
        return self._replace(bag=tuple(sorted({*self.bag, *messages})))

    def take(self, message: tuple[Any, ...]) -> Node:
        return self._replace(bag=tuple(each for each in self.bag if each != message))

    def consumer(self, name: str) -> Consumer:
        return self.a if name == "A" else self.b

    def with_consumer(self, name: str, consumer: Consumer) -> Node:
        return self._replace(a=consumer) if name == "A" else self._replace(b=consumer)


TO_OWNER = frozenset({"Begin", "End", "Release", "AbortPrefill", "Written", "WriteFailed"})
TO_PROXY = frozenset({"Ticket", "Committed", "LegFailed"})
RELIABLE = frozenset({"Armed", "Write", "Written", "WriteFailed"})
"""A transport's own doings: it knows what became of them."""
REPEATABLE = frozenset({"Begin", "End"})
ENDS = frozenset({At.DONE, At.GONE, At.CRASHED})


def write_of(node: Node, attempt: str) -> tuple[Any, ...]:
    """The write under way for a transfer, or the one that waits for the block to be computed; empty when there is none."""
    return next((each for each in node.bag if each[0] in ("Write", "Armed") and each[1] == attempt), ())


def leg_of(attempt: str) -> int:
    return int(attempt[1:])
