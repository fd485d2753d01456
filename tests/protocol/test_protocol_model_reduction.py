"""The search of the handoff may visit one state for many: from each of them the same can happen.

What can happen from a state of the world and from the one that stands for it (`handoff_canonical`) is compared step for step,
for states that random walks come through, and in the whole suite for every state of a small world. Nothing may be lost by
going on from the other: each step leads to what one of the other's leads to, or changes nothing, or only wastes faults. And
nothing may be added: each of the other's steps can be done here too, after messages have arrived that change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from pdmesh.protocol.offers import OfferTable
from support.handoff_canonical import canonical
from support.handoff_state import Node, Rules
from support.handoff_world import HandoffWorld

WALK_STEPS = 60
"""No order of events is longer than half of this where nothing is asked again and again."""


class Comparison:
    """Of states of one world with those that stand for them."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.world = rules, HandoffWorld(rules)

    def first_difference(self, nodes: Iterator[Node], num_nodes: int) -> str:
        """What differs at the first of so many states where anything does; "" for nothing."""
        seen: set[Node] = set()
        for node in nodes:
            if node not in seen:
                seen.add(node)
                if what := self.difference(node):
                    return f"{what}\n  {node}"
            if len(seen) == num_nodes:
                break
        return ""

    def walks(self, seed: int) -> Iterator[Node]:
        """States that random walks come through, for ever."""
        rng = random.Random(seed)
        while True:
            node = self.world.initial()
            for _ in range(WALK_STEPS):
                yield node
                ways = [state for _, state, _ in self._ways(node)]
                if not ways:
                    break
                node = rng.choice(ways)

    def all(self) -> Iterator[Node]:
        """Every state of the world, none left out."""
        todo = [self.world.initial()]
        seen = set(todo)
        while todo:
            node = todo.pop()
            yield node
            new = {state for _, state, _ in self._ways(node)} - seen
            seen |= new
            todo += new

    def difference(self, node: Node) -> str:
        """How a state and the one that stands for it differ; "" if they do not."""
        other = self._stands_for(node)
        alike = self._alike(node, other)
        if self.world.broken(node) != self.world.broken(other):
            return "one breaks a rule"
        if self.world.settled(other) != any(map(self.world.settled, alike)):
            return "one is settled"
        others = {self._stands_for(state) for _, state, _ in self._ways(other)}
        wasted = {self._stands_for(other._replace(faults=num)) for num in range(other.faults + 1)}
        for label, state, _ in self._ways(node):
            if self._stands_for(state) not in others | wasted:
                return f"lost: {label}"
        here = {self._stands_for(state) for each in alike for _, state, _ in self._ways(each)}
        return "" if others <= here | {other} else "something can happen that cannot"

    def _alike(self, node: Node, other: Node) -> list[Node]:
        """The state, and what becomes of it by steps that change nothing and are no faults."""
        alike = [node]
        for each in alike:
            for _, state, is_fault in self._ways(each):
                if not is_fault and state not in alike and self._stands_for(state) == other:
                    alike.append(state)
        return alike

    def _ways(self, node: Node) -> Iterator[tuple[str, Node, bool]]:
        for step in self.world.all_steps(node):
            assert isinstance(step.state, Node)
            yield step.label, step.state, step.is_fault

    def _stands_for(self, node: Node) -> Node:
        return canonical(node, self.rules)


WORLDS = [
    pytest.param({"faults": 2}, id="pull"),
    pytest.param({"stock": True, "faults": 2}, id="stock router"),
    pytest.param({"pushes": True, "faults": 2}, id="push"),
    pytest.param({"pushes": True, "early": True, "faults": 1}, id="early push"),
    pytest.param({"told_ahead": True, "faults": 2}, id="told ahead"),
    pytest.param({"told_ahead": True, "other_prompt": True, "faults": 1}, id="told ahead of another prompt"),
]


@pytest.mark.parametrize("rules", WORLDS)
def test_from_states_that_are_taken_for_one_the_same_can_happen(rules: dict[str, Any]) -> None:
    compared = Comparison(Rules(**rules))
    assert not compared.first_difference(compared.walks(seed=1), 800)


@pytest.mark.full
@pytest.mark.parametrize("rules", WORLDS)
def test_from_many_states_that_are_taken_for_one_the_same_can_happen(rules: dict[str, Any]) -> None:
    compared = Comparison(Rules(**rules))
    assert not compared.first_difference(compared.walks(seed=2), 3_000)


@pytest.mark.full
@pytest.mark.parametrize(
    "rules",
    [
        pytest.param({"faults": 1, "legs": 1}, id="pull"),
        pytest.param({"pushes": True, "faults": 0, "legs": 1}, id="push"),
    ],
)
def test_from_every_state_of_a_small_world_the_same_can_happen(rules: dict[str, Any]) -> None:
    compared = Comparison(Rules(**rules))
    assert not compared.first_difference(compared.all(), 1_000_000)


class ForgetsTheEnded(OfferTable):
    """Lets a transfer begin again that has ended."""

    def begin(self, *arguments: Any, **named: Any) -> Any:
        self._past_transfers.clear()
        return super().begin(*arguments, **named)


class MindsHowItEnded(OfferTable):
    """Ends an offer whose transfers have failed when it is renewed."""

    def renew(self, offer_id: str) -> bool:
        is_live = super().renew(offer_id)
        return is_live and "failed" not in {state.value for state in self._past_transfers.values()}


@pytest.mark.parametrize("table", [ForgetsTheEnded, MindsHowItEnded])
def test_a_table_for_which_they_are_not_alike_is_noticed(table: type[OfferTable]) -> None:
    compared = Comparison(Rules(faults=2, table=table))
    assert compared.first_difference(compared.walks(seed=1), 4_000)
