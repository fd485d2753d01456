"""The circuit breaker: who is let in when, on a clock of the test's own, and that one probe at a time is all there is."""

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.breaker import BREAKER_TABLE, FIRST_BACKOFF_S, LAST_BACKOFF_S, Breaker, BreakerEvent, BreakerState


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def breaker(threshold: int = 1) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(threshold=threshold, clock=clock), clock


def test_only_failures_in_a_row_open_it() -> None:
    it, _ = breaker(threshold=3)
    for _ in range(5):
        it.failed()
        it.failed()
        it.succeeded()
    assert it.state is BreakerState.CLOSED
    for _ in range(3):
        assert it.admit()
        it.failed()
    assert not it.admit()


def test_the_first_caller_after_the_back_off_probes_and_the_others_are_refused() -> None:
    it, clock = breaker()
    it.failed()
    clock.now_s += FIRST_BACKOFF_S - 0.01
    assert not it.admit()
    clock.now_s += 0.02
    assert it.admits
    assert [it.admit() for _ in range(4)] == [True, False, False, False]
    clock.now_s += 1000
    assert not it.admits, "time ends no probe"
    it.succeeded()
    assert [it.admit() for _ in range(4)] == [True] * 4


def test_each_failed_probe_waits_twice_as_long_up_to_a_bound_and_a_success_begins_anew() -> None:
    it, clock = breaker()
    it.failed()
    waits = []
    for _ in range(8):
        waits.append(it.wait_s)
        # A late failure of somebody let in before moves nothing.
        it.failed()
        clock.now_s += it.wait_s
        assert it.admit()
        it.failed()
    assert [round(wait_s, 6) for wait_s in waits] == [
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
        LAST_BACKOFF_S,
        LAST_BACKOFF_S,
        LAST_BACKOFF_S,
    ]
    it.succeeded()
    it.failed()
    assert round(it.wait_s, 6) == FIRST_BACKOFF_S


def test_a_probe_that_learnt_nothing_leaves_its_turn_to_the_next() -> None:
    it, clock = breaker()
    it.failed()
    clock.now_s += FIRST_BACKOFF_S
    assert it.admit()
    it.gave_up()
    assert it.wait_s == 0
    assert it.admit()
    it.failed()
    assert round(it.wait_s, 6) == 2 * FIRST_BACKOFF_S


def test_every_state_can_be_left_and_only_success_closes() -> None:
    for state in BreakerState:
        assert any(left is state for left, _ in BREAKER_TABLE)
    closing = {event for (_, event), state in BREAKER_TABLE.items() if state is BreakerState.CLOSED}
    assert closing == {BreakerEvent.SUCCEED}


@given(st.lists(st.sampled_from(["admit", "succeed", "fail", "give up", "wait"]), max_size=60), st.integers(1, 3))
def test_nobody_is_locked_out_for_longer_than_the_bound(steps: list[str], threshold: int) -> None:
    it, clock = breaker(threshold)
    for step in steps:
        if step == "admit":
            expected = it.admits
            assert it.admit() == expected
        elif step == "wait":
            clock.now_s += 0.3
        else:
            {"succeed": it.succeeded, "fail": it.failed, "give up": it.gave_up}[step]()
        assert it.wait_s <= LAST_BACKOFF_S
        assert it.admits or it.state is BreakerState.HALF_OPEN or it.wait_s > 0
    if it.state is BreakerState.HALF_OPEN:
        it.gave_up()
    clock.now_s += LAST_BACKOFF_S
    assert it.admit()
