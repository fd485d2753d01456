"""Offers and transfers: every transfer ends once, every block is given back once and never too early, nothing stays open."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdmesh.errors import Forbidden, TransferFailed
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OFFER_LEASE_S, TRANSFER_LEASE_S, OfferTable, Reason
from pdmesh.protocol.states import (
    LANDING_TABLE,
    OFFER_TABLE,
    TRANSFER_TABLE,
    LandingEvent,
    LandingState,
    OfferEvent,
    OfferState,
    TransferEvent,
    TransferState,
)

DIGEST = b"d" * 32
BLOCKS = [GroupBlocks(group=0, block_ids=[4, 7, 9], generations=[1, 2, 3])]
ENDS = {TransferState.COMMITTED, TransferState.FAILED, TransferState.EXPIRED, TransferState.ABORTED}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> OfferTable:
    return OfferTable(clock)


def opened(table: OfferTable, offer_id: str = "o", *, sealed: bool = True, release_on_commit: bool = False) -> str:
    table.open(offer_id, request_id=f"r-{offer_id}", digest=DIGEST, release_on_commit=release_on_commit)
    if sealed:
        assert table.seal(offer_id, BLOCKS, 40)
    return offer_id


def ended(table: OfferTable) -> list[tuple[str, Reason]]:
    return [(each.offer_id, each.reason) for each in table.take_ended()]


def refusal(table: OfferTable, **changes: object) -> str:
    arguments: dict[str, object] = {"transfer_id": "t2", "consumer_id": "c", "offer_id": "o", "digest": DIGEST}
    with pytest.raises((TransferFailed, Forbidden)) as caught:
        table.begin(**arguments | changes)  # type: ignore[arg-type]
    return caught.value.message.partition(":")[0]


def test_no_state_is_left_without_an_event_and_ends_are_final() -> None:
    assert {state for state, _ in TRANSFER_TABLE} == set(TransferState) - ENDS
    assert {state for state, _ in OFFER_TABLE} == set(OfferState) - {OfferState.ENDED}
    assert {event for _, event in TRANSFER_TABLE} == set(TransferEvent)
    assert {event for _, event in OFFER_TABLE} == set(OfferEvent)
    assert {state for state, _ in LANDING_TABLE} == {LandingState.EXPECTED, LandingState.QUARANTINED}
    assert {event for _, event in LANDING_TABLE} == set(LandingEvent)


def test_who_is_to_say_what_an_offer_was_computed_for_ends_only_that_one(table: OfferTable) -> None:
    """An offer's id stands in parameters that a router may mix up; its request does not."""
    opened(table, release_on_commit=True)
    assert not table.release("o", unread=True, digest=bytes(32))
    assert not table.release("o", unread=True, digest=DIGEST[:-1])
    assert ended(table) == []
    assert table.release("o", unread=True, digest=DIGEST)
    assert ended(table) == [("o", Reason.RELEASED)]
    # A proxy has its own read elsewhere, whoever knows the request.
    opened(table, "p")
    assert not table.release("p", unread=True, digest=DIGEST)


def test_a_transfer_sees_the_blocks_and_their_generations(table: OfferTable) -> None:
    opened(table)
    view = table.begin("t", "c", "o", DIGEST)
    assert (view.groups, view.num_tokens) == (BLOCKS, 40)
    wanted = [GroupBlocks(group=0, block_ids=[7, 9], generations=[])]
    assert table.begin("t2", "c", "o", DIGEST, wanted).groups == [
        GroupBlocks(group=0, block_ids=[7, 9], generations=[2, 3], first_block=1)
    ]


@pytest.mark.parametrize("block_ids", [[9, 4], [4, 9], [4, 4, 4], [4, 9, 7], [9, 9]])
def test_blocks_in_another_order_are_refused(table: OfferTable, block_ids: list[int]) -> None:
    """They would be taken for other tokens' KV, and served to everybody with that prefix."""
    opened(table)
    assert refusal(table, groups=[GroupBlocks(group=0, block_ids=block_ids, generations=[])]) == Reason.FOREIGN_BLOCKS


def test_beginning_twice_is_the_same_transfer(table: OfferTable) -> None:
    opened(table)
    assert table.begin("t", "c", "o", DIGEST) == table.begin("t", "c", "o", DIGEST)
    assert table.num_transfers == 1
    assert refusal(table, transfer_id="t", consumer_id="other") == Reason.FOREIGN_TRANSFER


def test_each_refusal_says_why(table: OfferTable, clock: Clock) -> None:
    assert refusal(table) == Reason.UNKNOWN
    opened(table, sealed=False)
    assert refusal(table, transfer_id="t3") == Reason.NOT_SEALED
    table.seal("o", BLOCKS, 40)
    assert refusal(table, transfer_id="t4", digest=b"x" * 32) == Reason.DIGEST
    foreign = [GroupBlocks(group=0, block_ids=[5], generations=[])]
    assert refusal(table, transfer_id="t5", groups=foreign) == Reason.FOREIGN_BLOCKS
    stale = [GroupBlocks(group=0, block_ids=[4], generations=[9])]
    assert refusal(table, transfer_id="t6", groups=stale) == Reason.STALE
    assert refusal(table, transfer_id="t6") == Reason.TRANSFER_ENDED
    table.release("o")
    assert refusal(table, transfer_id="t7") == Reason.RELEASED
    opened(table, "p")
    clock.now += OFFER_LEASE_S
    assert refusal(table, transfer_id="t8", offer_id="p") == Reason.EXPIRED
    assert ended(table) == [("o", Reason.RELEASED), ("p", Reason.EXPIRED)]


def test_released_blocks_stay_until_the_last_reader_is_done(table: OfferTable) -> None:
    opened(table)
    for transfer_id in ("t1", "t2"):
        table.begin(transfer_id, "c", "o", DIGEST)
    table.release("o")
    assert refusal(table, transfer_id="t3") == Reason.RELEASED
    assert table.end("t1", True)
    assert ended(table) == []
    assert table.end("t2", False, "stale")
    assert ended(table) == [("o", Reason.RELEASED)]
    assert table.num_open == table.num_transfers == 0
    assert not table.end("t2", True)
    assert table.transfers_ended[TransferState.COMMITTED] == 1


def test_a_dead_readers_lease_gives_the_blocks_back(table: OfferTable, clock: Clock) -> None:
    opened(table)
    table.begin("t", "c", "o", DIGEST)
    table.release("o")
    clock.now += TRANSFER_LEASE_S - 0.1
    table.expire()
    assert ended(table) == []
    clock.now += 0.1
    assert table.next_deadline() == clock.now
    table.expire()
    assert ended(table) == [("o", Reason.RELEASED)]
    assert not table.renew_transfer("t")
    assert table.transfers_ended[TransferState.EXPIRED] == 1


def test_renewed_transfers_keep_their_offer(table: OfferTable, clock: Clock) -> None:
    opened(table)
    table.begin("t", "c", "o", DIGEST)
    for _ in range(20):
        clock.now += 2.0
        assert table.renew_transfer("t")
    table.begin("t2", "d", "o", DIGEST)
    assert table.num_open == 1


def test_renewal_ends_with_the_request(table: OfferTable, clock: Clock) -> None:
    opened(table)
    table.begin("t", "c", "o", DIGEST, remaining_s=15.0)
    clock.now += 8
    assert table.renew_transfer("t")
    clock.now += 7
    assert not table.renew_transfer("t")


def test_a_commit_ends_an_offer_made_for_one(table: OfferTable) -> None:
    opened(table, release_on_commit=True)
    table.begin("t", "c", "o", DIGEST)
    table.begin("t2", "c", "o", DIGEST)
    table.end("t", False, "timeout")
    assert ended(table) == []
    table.end("t2", True)
    assert ended(table) == [("o", Reason.COMMITTED)]


def test_the_lease_starts_at_the_seal(table: OfferTable, clock: Clock) -> None:
    """A prompt may wait and compute for longer than a lease before there is anything to fetch."""
    opened(table, sealed=False)
    clock.now += 5 * OFFER_LEASE_S
    assert table.renew("o")
    assert table.seal("o", BLOCKS, 40)
    clock.now += OFFER_LEASE_S - 0.1
    assert table.renew("o")
    clock.now += OFFER_LEASE_S
    assert not table.renew("o")


def test_the_lease_of_what_nobody_was_told_of_starts_when_somebody_is(table: OfferTable, clock: Clock) -> None:
    """Of several choices the last may have its first token, and the ticket with it, long after the seal."""
    table.open("o", request_id="r", digest=DIGEST, seal_within_s=10 * OFFER_LEASE_S)
    assert table.seal("o", BLOCKS, 40, is_told=False)
    clock.now += 5 * OFFER_LEASE_S
    table.expire()
    assert table.is_live("o")
    table.tell("o")
    clock.now += OFFER_LEASE_S - 0.1
    assert table.renew("o")
    clock.now += OFFER_LEASE_S
    assert not table.renew("o")


def test_an_offer_that_nobody_is_ever_told_of_ends_with_its_request(table: OfferTable, clock: Clock) -> None:
    table.open("o", request_id="r", digest=DIGEST, seal_within_s=2 * OFFER_LEASE_S)
    assert table.seal("o", BLOCKS, 40, is_told=False)
    clock.now += 2 * OFFER_LEASE_S
    assert not table.renew("o")


def test_a_lease_that_starts_under_a_reader_does_not_end_before_it(table: OfferTable, clock: Clock) -> None:
    table.open("o", request_id="r", digest=DIGEST, lease_s=1.0, seal_within_s=60.0)
    assert table.seal("o", BLOCKS, 40, is_told=False)
    table.begin("t", "c", "o", DIGEST)
    table.tell("o")
    clock.now += TRANSFER_LEASE_S - 0.1
    assert table.renew_transfer("t")
    assert table.is_live("o")


def test_sealing_what_has_ended_says_so(table: OfferTable) -> None:
    opened(table, sealed=False)
    table.release("o")
    assert not table.seal("o", BLOCKS, 40)
    assert not table.seal("never opened", BLOCKS, 40)
    assert table.num_open == 0
    assert table.take_ended()[0].groups == []


def test_a_long_lease_in_front_hides_no_short_one_behind(table: OfferTable, clock: Clock) -> None:
    table.open("long", request_id="r", digest=DIGEST, lease_s=1000.0)
    table.seal("long", BLOCKS, 40)
    opened(table, "short")
    clock.now += OFFER_LEASE_S
    table.expire()
    assert ended(table) == [("short", Reason.EXPIRED)]


def test_an_end_that_overtakes_its_begin_is_heeded(table: OfferTable) -> None:
    """Once, the begin then pinned the blocks for a lease; with an owner that writes it would have written into blocks that
    its consumer had given to somebody else."""
    opened(table)
    assert not table.end("t", False, "cancelled")
    assert table.outcome_of("t") is TransferState.ABORTED
    assert refusal(table, transfer_id="t") == Reason.TRANSFER_ENDED
    assert not table.end("t2", False, "stale")
    assert table.outcome_of("t2") is TransferState.FAILED
    # Nothing can have been read of what was never begun: the word is an earlier owner's.
    assert not table.end("t3", True)
    assert table.outcome_of("t3") is None
    table.begin("t3", "c", "o", DIGEST)
    assert table.outcome_of("t3") is TransferState.READING
    assert table.num_transfers == 1


def test_what_is_written_holds_its_blocks_until_the_writer_stops(table: OfferTable, clock: Clock) -> None:
    opened(table)
    for transfer_id in ("t1", "t2", "t3"):
        table.begin(transfer_id, "c", "o", DIGEST, written=True)
    assert table.end("t1", False, "cancelled")
    table.stopped("t2")
    clock.now += OFFER_LEASE_S + TRANSFER_LEASE_S
    table.expire()
    assert table.num_transfers == 0
    assert (table.is_writing("t1"), table.is_writing("t2"), table.is_writing("t3")) == (True, False, True)
    assert (table.num_open, ended(table)) == (1, [])
    assert refusal(table, transfer_id="t4") == Reason.EXPIRED
    table.stopped("t1")
    table.stopped("t1")
    assert ended(table) == []
    table.stopped("t3")
    table.stopped("never begun")
    assert (table.num_open, ended(table)) == (0, [("o", Reason.EXPIRED)])
    assert table.next_deadline() is None


def test_a_writer_that_stops_early_does_not_end_its_transfer(table: OfferTable) -> None:
    opened(table)
    table.begin("t", "c", "o", DIGEST, written=True)
    table.release("o")
    table.stopped("t")
    assert ended(table) == []
    assert table.end("t", True)
    assert ended(table) == [("o", Reason.RELEASED)]


def test_an_offer_id_is_used_once(table: OfferTable) -> None:
    opened(table)
    table.release("o")
    with pytest.raises(ValueError, match="opened before"):
        opened(table)


@dataclass
class Reader:
    """What the model knows of a transfer."""

    offer_id: str
    lease_end_s: float


@dataclass
class Holder:
    """What the model knows of an offer."""

    sealed: bool = False
    closed: bool = False
    given_back: int = 0
    readers: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)


class Interleavings(RuleBasedStateMachine):
    """Any order of calls from proxies, consumers and the clock, beside a model that only counts."""

    offers = Bundle("offers")
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = OfferTable(self.clock)
        self.holders: dict[str, Holder] = {}
        self.readers: dict[str, Reader] = {}
        self.num_begun = 0

    @rule(target=offers, lease_s=st.sampled_from([0.5, 10.0, 30.0]), release_on_commit=st.booleans())
    def open(self, lease_s: float, release_on_commit: bool) -> str:
        offer_id = f"o{len(self.holders)}"
        self.table.open(
            offer_id,
            request_id="r",
            digest=DIGEST,
            lease_s=lease_s,
            release_on_commit=release_on_commit,
            seal_within_s=60.0,
        )
        self.holders[offer_id] = Holder()
        return offer_id

    @rule(offer_id=offers)
    def seal(self, offer_id: str) -> None:
        if self.table.seal(offer_id, BLOCKS, 40):
            assert not self.holders[offer_id].sealed
            self.holders[offer_id].sealed = True

    @rule(target=transfers, offer_id=offers, right=st.booleans(), written=st.booleans())
    def begin(self, offer_id: str, right: bool, written: bool) -> object:
        transfer_id = f"t{self.num_begun}"
        self.num_begun += 1
        try:
            self.table.begin(transfer_id, "c", offer_id, DIGEST if right else b"", None, written=written)
        except TransferFailed:
            return multiple()
        holder = self.holders[offer_id]
        assert right
        assert holder.sealed or written, "only what the owner writes itself may begin while it is computed"
        assert not holder.given_back
        holder.readers.add(transfer_id)
        if written:
            holder.writers.add(transfer_id)
        self.readers[transfer_id] = Reader(offer_id, self.clock.now + TRANSFER_LEASE_S)
        return transfer_id

    @rule(transfer_id=transfers)
    def renew_transfer(self, transfer_id: str) -> None:
        reader = self.readers.get(transfer_id)
        alive = reader is not None and reader.lease_end_s > self.clock.now
        assert self.table.renew_transfer(transfer_id) == alive
        if reader is not None and alive:
            reader.lease_end_s = self.clock.now + TRANSFER_LEASE_S

    @rule(transfer_id=transfers, committed=st.booleans(), reason=st.sampled_from(["", "stale", "cancelled"]))
    def end(self, transfer_id: str, committed: bool, reason: str) -> None:
        reader = self.readers.pop(transfer_id, None)
        alive = reader is not None and reader.lease_end_s > self.clock.now
        assert self.table.end(transfer_id, committed, reason) == alive

    @rule(transfer_id=transfers)
    def stop_writing(self, transfer_id: str) -> None:
        self.table.stopped(transfer_id)
        for holder in self.holders.values():
            holder.writers.discard(transfer_id)

    @rule(offer_id=offers)
    def renew(self, offer_id: str) -> None:
        if self.table.renew(offer_id):
            assert not self.holders[offer_id].closed

    @rule(offer_id=consumes(offers))
    def release(self, offer_id: str) -> None:
        self.table.release(offer_id)
        self.holders[offer_id].closed = True

    @rule(seconds=st.sampled_from([0.4, 2.0, 9.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        self.table.expire()
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.clock.now

    @invariant()
    def blocks_are_given_back_once_and_never_under_a_reader(self) -> None:
        for each in self.table.take_ended():
            holder = self.holders[each.offer_id]
            holder.given_back += 1
            assert holder.given_back == 1
            assert (each.groups == BLOCKS) == holder.sealed
            reading = {id for id, reader in self.readers.items() if reader.offer_id == each.offer_id}
            assert all(self.readers[id].lease_end_s <= self.clock.now for id in reading)
            assert not holder.writers

    @invariant()
    def every_begun_transfer_has_ended_once_or_reads(self) -> None:
        assert self.table.transfers_ended.total() + self.table.num_transfers == self.num_begun

    def teardown(self) -> None:
        # The longest an unrenewed offer can live: its seal's deadline, then a lease.
        self.clock.now += 100.0
        self.table.expire()
        for holder in self.holders.values():
            for transfer_id in list(holder.writers):
                self.stop_writing(transfer_id)
        self.blocks_are_given_back_once_and_never_under_a_reader()
        assert self.table.num_open == self.table.num_transfers == 0
        assert self.table.next_deadline() is None
        assert all(holder.given_back == 1 for holder in self.holders.values())
        assert self.table.transfers_ended.total() == self.num_begun


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
