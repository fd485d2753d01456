"""What every scheduler's half of a connector must do: it owns no KV, and lets go of none that something may still write to."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isabstract

import pytest

from pdmesh.connector.base import SchedulerConnector
from pdmesh.connector.ledger import Ledger, Load
from pdmesh.protocol.messages import KVSource

Half = SchedulerConnector[str, Load[str]]


def load(transfer_id: str, owner: str | None) -> Load[str]:
    source = KVSource(transfer_id=transfer_id, peer_id="owner@1", groups=[], num_tokens=32)
    return Load(source=source, request_id="r", owner=owner, num_tokens=32, num_hit=0, from_tier=False)


@pytest.fixture(params=[Ledger])
def half(request: pytest.FixtureRequest) -> Half:
    make: Callable[[], Half] = request.param
    return make()


def test_the_interface_cannot_be_used_by_itself() -> None:
    assert isabstract(SchedulerConnector)


def test_a_load_is_found_by_its_owner_until_it_ends(half: Half) -> None:
    first, second = load("t1", "a"), load("t2", "b")
    half.begin_load(first)
    half.begin_load(second)
    assert (half.num_loads, half.num_owners) == (2, 2)
    assert half.find_load("b") is second
    assert half.find_load("c") is None
    assert half.end_load("t2", arrived=True) is second
    assert half.find_load("b") is None
    assert (half.num_loads, half.num_owners) == (1, 1)


def test_a_load_ends_once(half: Half) -> None:
    half.begin_load(load("t", "a"))
    assert half.end_load("t", arrived=False) is not None
    assert half.end_load("t", arrived=False) is None
    assert half.end_load("unknown", arrived=True) is None


def test_blocks_stay_referenced_while_something_may_write_to_them(half: Half) -> None:
    begun = load("t", "a")
    half.begin_load(begun)
    assert half.holders() == []
    begun.quarantine([[1, 2], [7]])
    assert (half.num_loads, half.num_owners) == (1, 0)
    assert half.find_load("a") is None
    assert half.holders() == [[[1, 2], [7]]]
    ended = half.end_load("t", arrived=True)
    assert ended is not None
    assert ended.quarantined == [[1, 2], [7]]
    assert half.holders() == []


def test_an_offers_blocks_are_handed_back_once(half: Half) -> None:
    half.hold_offer("o", [[3], [4, 5]])
    half.hold_offer("p", [[6]])
    assert half.num_offers == 2
    assert sorted(half.holders()) == [[[3], [4, 5]], [[6]]]
    assert half.release_offer("o") == [[3], [4, 5]]
    assert half.release_offer("o") is None
    assert half.holders() == [[[6]]]
    assert half.num_offers == 1
