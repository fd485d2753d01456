"""The scheduler's half of the connector: what is being loaded, and which blocks are kept for offers. A table, no I/O.

A load owns nothing while its consumer lives; when the consumer goes first, its blocks stay here (in quarantine) until the
worker's half says that nothing writes to them any more. `LANDING_TABLE` says what may follow what.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdmesh.connector.base import SchedulerConnector
from pdmesh.errors import TransferFailed
from pdmesh.protocol.messages import KVSource
from pdmesh.protocol.states import LANDING_TABLE, LandingEvent, LandingState

OwnerT = TypeVar("OwnerT")

BlockLists = list[list[int]]
"""Block ids of each KV group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullPlan:
    """The part of a source that is missing here."""

    source_block_ids: list[int]
    generations: list[int]
    checksums: list[int]
    """Of all groups, one after the other; no checksums where a group has none."""


@dataclass(slots=True)
class Load(Generic[OwnerT]):
    """A pull that has begun and not ended."""

    source: KVSource
    request_id: str
    owner: OwnerT | None
    """Who waits for it; None once that one has ended."""
    num_tokens: int
    """Tokens that need not be computed when it succeeds."""
    num_hit: int
    """Of those, how many were here before."""
    from_tier: bool
    unnamed: frozenset[tuple[int, int]] = frozenset()
    """(group, place) of blocks that will lack tokens which nobody waits for."""
    state: LandingState = LandingState.EXPECTED
    quarantined: BlockLists = field(default_factory=list)
    """References to the blocks, while they are."""

    def quarantine(self, blocks: BlockLists) -> None:
        """Take over the references of an owner that has gone before the load ended."""
        self.state = LANDING_TABLE[self.state, LandingEvent.UNWANTED]
        self.owner, self.quarantined = None, blocks

    def end(self, arrived: bool) -> None:
        """Nothing writes to the blocks any more; `arrived` says whether all of it is there."""
        self.state = LANDING_TABLE[self.state, LandingEvent.ARRIVED if arrived else LandingEvent.STOPPED]


class Ledger(SchedulerConnector[OwnerT, Load[OwnerT]]):
    """Loads by transfer id, and blocks held for offers by offer id."""

    def __init__(self) -> None:
        self._loads: dict[str, Load[OwnerT]] = {}
        self._offers: dict[str, BlockLists] = {}
        self._pushed: dict[str, BlockLists] = {}

    @property
    def num_loads(self) -> int:
        return len(self._loads)

    @property
    def num_owners(self) -> int:
        """Loads that someone still waits for."""
        return sum(load.owner is not None for load in self._loads.values())

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    @property
    def offer_ids(self) -> Collection[str]:
        """Offers whose blocks are held."""
        return self._offers.keys()

    def begin_load(self, load: Load[OwnerT]) -> None:
        self._loads[load.source.transfer_id] = load

    def find_load(self, owner: OwnerT) -> Load[OwnerT] | None:
        """Return the load that `owner` waits for; None when it waits for none."""
        return next((load for load in self._loads.values() if load.owner is owner), None)

    def end_load(self, transfer_id: str, *, arrived: bool) -> Load[OwnerT] | None:
        """Strike off a load that nothing writes for any more; None when it is not known."""
        load = self._loads.pop(transfer_id, None)
        if load is not None:
            load.end(arrived)
        return load

    def hold_offer(self, offer_id: str, blocks: BlockLists) -> None:
        """Take over the caller's references to `blocks`."""
        self._offers[offer_id] = blocks

    def release_offer(self, offer_id: str) -> BlockLists | None:
        """Hand the references back; None when the offer is not held."""
        return self._offers.pop(offer_id, None)

    def offered(self, offer_id: str) -> BlockLists | None:
        """Return the blocks of a sealed offer; they stay held."""
        return self._offers.get(offer_id)

    def keep_pushed(self, key: str, blocks: BlockLists) -> None:
        """Take over the caller's references to what a push, under this key, reads here or writes here; what is held under the
        key already is added to."""
        held = self._pushed.setdefault(key, [[] for _ in blocks])
        for table, more in zip(held, blocks, strict=True):
            table += more

    def drop_pushed(self, key: str) -> BlockLists:
        """Hand the references under a key back."""
        return self._pushed.pop(key, [])

    def holders(self) -> list[BlockLists]:
        """Return every block list that this table keeps referenced."""
        return [
            *self._offers.values(),
            *self._pushed.values(),
            *(load.quarantined for load in self._loads.values() if load.quarantined),
        ]


def plan_pull(source: KVSource, *, firsts: list[int], block_size: int) -> PullPlan | None:
    """Return what to pull when each group needs its blocks from `firsts[group]` on; None when nothing is missing.

    Raises TransferFailed, with the reason as its message, for a source that does not fit together or leaves a gap.
    """
    end = -(-source.num_tokens // block_size)
    if source.num_tokens < 1 or not 0 < source.deadline_s < math.inf or len(source.groups) != len(firsts):
        raise TransferFailed("mismatch")
    plan = PullPlan(source_block_ids=[], generations=[], checksums=[])
    is_checked = all(len(blocks.checksums) == len(blocks.block_ids) for blocks in source.groups)
    for index, (blocks, first) in enumerate(zip(source.groups, firsts, strict=True)):
        if blocks.group != index or not blocks.is_sound or len(blocks.block_ids) != end - blocks.first_block:
            raise TransferFailed("mismatch")
        if first >= end:
            continue
        if first < blocks.first_block:
            raise TransferFailed("gap")
        plan.source_block_ids.extend(blocks.block_ids[first - blocks.first_block :])
        plan.generations.extend(blocks.generations[first - blocks.first_block :])
        if is_checked:
            plan.checksums.extend(blocks.checksums[first - blocks.first_block :])
    return plan if plan.source_block_ids else None
