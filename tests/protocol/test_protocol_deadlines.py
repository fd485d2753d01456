"""Deadlines: always the truth about the earliest, whatever was moved, and never more kept than is wanted."""

import time

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.protocol.deadlines import MAX_STALE, Deadlines
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OfferTable

steps = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("abcd"), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.sampled_from("abcd"), st.just(0)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(steps)
def test_it_agrees_with_a_dict(steps: list[tuple[str, str, int]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    model: dict[str, float] = {}
    for what, key, number in steps:
        if what == "set":
            deadlines.set(key, number)
            model[key] = number
        elif what == "drop":
            deadlines.drop(key)
            model.pop(key, None)
        else:
            taken = deadlines.take_due(number)
            assert [model[each] for each in taken] == sorted(at_s for at_s in model.values() if at_s <= number)
            model = {each: at_s for each, at_s in model.items() if at_s > number}
        assert deadlines.next_s() == min(model.values(), default=None)
        assert len(deadlines) == len(model)


def test_what_was_dropped_or_moved_is_not_kept() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.set("first", -1.0)
    for number in range(5000):
        deadlines.set(str(number), 1000.0 + number)
        deadlines.set(str(number), 10.0 + number)
        deadlines.drop(str(number))
    assert len(deadlines._heap) <= 2 + MAX_STALE + 1


def test_renewing_all_offers_does_not_cost_the_square_of_their_number() -> None:
    """Each renewal looked at every other offer: 8000 took eight seconds, every two seconds."""
    table = OfferTable()
    blocks = [GroupBlocks(group=0, block_ids=[1], generations=[1])]
    for number in range(8000):
        table.open(str(number), request_id="r", digest=b"")
        table.seal(str(number), blocks, 1)
    started_s = time.perf_counter()
    for number in range(8000):
        assert table.renew(str(number))
        assert table.next_deadline() is not None
    assert time.perf_counter() - started_s < 2.0
