"""Connectors that damage what comes over them: given up for a peer when it repeats, and tried again."""

from __future__ import annotations

from pdmesh.connector.damages import FIRST_PAUSE_S, LAST_PAUSE_S, MAX_KNOWN, Damages


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_one_that_damages_twice_in_a_row_is_given_up_for_that_peer_for_a_while() -> None:
    clock = Clock()
    known = Damages(clock)
    assert not known.came_whole("p", "grpc", after=["nixl"])
    assert not known.is_given_up("p", "nixl")
    # A pull that came whole over it in between: that was chance.
    assert not known.came_whole("p", "nixl")
    assert not known.came_whole("p", "grpc", after=["nixl"])
    assert known.came_whole("p", "grpc", after=["nixl"])
    assert known.is_given_up("p", "nixl")
    assert not known.is_given_up("p", "grpc")
    assert not known.is_given_up("q", "nixl")
    clock.now_s += FIRST_PAUSE_S
    assert not known.is_given_up("p", "nixl")


def test_it_is_tried_ever_more_rarely_while_it_damages_and_is_as_good_as_any_when_it_does_not() -> None:
    clock = Clock()
    known = Damages(clock)
    known.came_whole("p", "grpc", after=["nixl"])
    pauses = []
    for _ in range(10):
        known.came_whole("p", "grpc", after=["nixl"])
        # Pulls that were under way by then say nothing new.
        known.came_whole("p", "grpc", after=["nixl"])
        given_up_s = clock.now_s
        while known.is_given_up("p", "nixl"):
            clock.now_s += 1.0
        pauses.append(clock.now_s - given_up_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LAST_PAUSE_S
    known.came_whole("p", "nixl")
    assert len(known) == 0


def test_peers_that_went_are_forgotten() -> None:
    known = Damages()
    for number in range(MAX_KNOWN + 10):
        known.came_whole(str(number), "grpc", after=["nixl"])
    assert len(known) == MAX_KNOWN
