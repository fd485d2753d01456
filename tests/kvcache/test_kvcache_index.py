"""The tier's book: every slot in exactly one place, pinned blocks stay, ends of chains go first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdmesh_kvcache.index import Reservation, SlotIndex
from support.tier import block_key, chain


def make(num_slots: int) -> SlotIndex:
    return SlotIndex(num_slots, on_reuse=lambda slot: None, on_evict=lambda: None)


def hold(index: SlotIndex, keys: list[bytes]) -> list[Reservation]:
    reserved = index.reserve(keys)
    index.commit(reserved)
    return reserved


def test_block_is_seen_only_when_it_is_committed() -> None:
    index = make(4)
    keys = chain("a", 2)
    reserved = index.reserve(keys)
    assert index.num_leading(keys) == 0
    assert index.is_known(keys[0])
    assert index.reserve(keys) == []
    index.commit(reserved[:1])
    assert index.num_leading(keys) == 1
    index.abort(reserved[1:])
    assert not index.is_known(keys[1])
    index.check_integrity()


def test_hits_are_a_leading_run() -> None:
    index = make(4)
    keys = chain("a", 3)
    hold(index, [keys[0], keys[2]])
    assert index.num_leading(keys) == 1
    assert index.num_leading(keys[1:]) == 0


def test_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    index = make(3)
    first, second = chain("a", 3), chain("b", 1)
    hold(index, first)
    hold(index, second)
    assert index.num_leading(first) == 2


def test_touched_and_unpinned_blocks_are_evicted_last() -> None:
    index = make(3)
    old, pinned, used = (block_key(name) for name in ("old", "pinned", "used"))
    hold(index, [pinned])
    hold(index, [used])
    hold(index, [old])
    index.touch([used])
    index.pin("reader", [pinned])
    index.unpin("reader")
    hold(index, [block_key("new")])
    assert [index.slot_of(key) is not None for key in (old, pinned, used)] == [False, True, True]


def test_pinned_blocks_make_room_for_nobody() -> None:
    index = make(2)
    keys = chain("a", 2)
    hold(index, keys)
    index.pin("one", keys)
    index.pin("two", keys[:1])
    assert index.reserve(chain("b", 1)) == []
    index.unpin("one")
    assert [each.key for each in hold(index, chain("b", 2))] == chain("b", 1)
    assert index.slot_of(keys[0]) is not None
    assert index.unpin("two")
    assert not index.unpin("two")
    index.check_integrity()


def test_who_waits_for_a_block_is_told_once_when_it_is_visible_or_given_up() -> None:
    index, told = make(4), []
    keys = chain("a", 2)
    reserved = index.reserve(keys)
    for key in keys:
        index.watch(key, lambda key=key: told.append((key, index.slot_of(key) is not None)))
    index.commit(reserved[:1])
    assert told == [(keys[0], True)]
    index.abort(reserved[1:])
    assert told[1:] == [(keys[1], False)]
    index.check_integrity()


def test_condemned_block_is_invisible_at_once_and_its_slot_free_when_nobody_reads_it() -> None:
    index = make(2)
    keys = chain("c", 2)
    hold(index, keys)
    index.pin("reader", keys[:1])
    index.condemn([*keys, block_key("unknown")])
    assert [index.slot_of(key) for key in keys] == [None, None]
    assert index.num_leading(keys) == 0
    assert index.pinned_by("reader") == []
    # Not again before its reader has gone.
    assert [each.key for each in index.reserve(keys)] == keys[1:]
    assert index.unpin("reader")
    assert [each.key for each in index.reserve(keys)] == keys[:1]
    index.check_integrity()


class IndexMachine(RuleBasedStateMachine):
    """Random use of an index, against what it must never forget."""

    keys = st.lists(st.integers(0, 14).map(block_key), max_size=8, unique=True)

    @initialize(num_slots=st.integers(1, 10))
    def start(self, num_slots: int) -> None:
        self.evicted = 0
        self.reused: list[int] = []
        self.index = SlotIndex(num_slots, on_reuse=self.reused.append, on_evict=self.evict)
        self.filling: list[Reservation] = []
        self.awaited: list[bytes] = []
        self.pins: dict[str, dict[bytes, int]] = {}
        self.condemned: set[bytes] = set()

    def evict(self) -> None:
        self.evicted += 1

    @rule(keys=keys)
    def reserve(self, keys: list[bytes]) -> None:
        num_used, evicted_before = self.index.num_used, self.evicted
        self.reused.clear()
        reserved = self.index.reserve(keys)
        assert self.reused == [each.slot for each in reserved]
        assert num_used - self.index.num_used == self.evicted - evicted_before
        self.filling += reserved

    @rule(data=st.data())
    def end_filling(self, data: st.DataObject) -> None:
        num = data.draw(st.integers(0, len(self.filling)))
        ended, self.filling = self.filling[:num], self.filling[num:]
        if data.draw(st.booleans()):
            self.index.commit(ended)
            assert all(self.index.slot_of(each.key) == each.slot for each in ended)
        else:
            self.index.abort(ended)

    @rule(key=st.integers(0, 14).map(block_key))
    def watch(self, key: bytes) -> None:
        if self.index.is_filling(key):
            self.awaited.append(key)
            self.index.watch(key, lambda: self.awaited.remove(key))

    @rule(pin_id=st.sampled_from("abc"), keys=keys)
    def pin(self, pin_id: str, keys: list[bytes]) -> None:
        held = keys[: self.index.num_leading(keys)]
        slots = self.index.pin(pin_id, held)
        for key, slot in zip(held, slots, strict=True):
            assert self.pins.setdefault(pin_id, {}).setdefault(key, slot) == slot

    @rule(pin_id=st.sampled_from("abc"))
    def unpin(self, pin_id: str) -> None:
        assert self.index.unpin(pin_id) == bool(self.pins.pop(pin_id, None))

    @rule(keys=keys)
    def condemn(self, keys: list[bytes]) -> None:
        self.index.condemn(keys)
        assert all(self.index.slot_of(key) is None for key in keys)
        self.condemned |= {key for key in keys if any(key in held for held in self.pins.values())}

    @rule(keys=keys)
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)

    @invariant()
    def book_is_right(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        assert self.index.num_filling == len(self.filling)
        assert set(self.awaited) <= {each.key for each in self.filling}
        assert self.index.num_used + self.index.num_filling <= self.index.num_slots
        pinned = {key: slot for held in self.pins.values() for key, slot in held.items()}
        self.condemned &= pinned.keys()
        assert self.index.num_pinned == len(pinned)
        visible = {key: slot for key, slot in pinned.items() if key not in self.condemned}
        assert {key: self.index.slot_of(key) for key in visible} == visible
        assert all(self.index.slot_of(key) is None for key in self.condemned)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
