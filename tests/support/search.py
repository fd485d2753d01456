"""Explicit-state search: every state that a world can reach, breadth first, so that a counterexample is a shortest one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Step:
    """One way on from a state."""

    label: str
    state: Hashable
    is_fault: bool = False
    """Something that may, but need not, happen: no progress may depend on it."""


class World(Protocol):
    """What is searched. States are values: two that are equal are one."""

    def initial(self) -> Hashable: ...

    def steps(self, state: Hashable) -> Iterable[Step]:
        """All that can happen next."""

    def broken(self, state: Hashable) -> str:
        """Which rule a state breaks; "" for none."""

    def settled(self, state: Hashable) -> bool:
        """Whether all that was begun has ended."""


@dataclass
class Search:
    """What was found."""

    num_states: int = 0
    num_steps: int = 0
    depth: int = 0
    is_complete: bool = True
    """False when `max_states` were not enough."""
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    """Labels of the steps from the beginning to the state that breaks a rule."""

    def __str__(self) -> str:
        head = f"{self.num_states} states, {self.num_steps} steps, depth {self.depth}"
        return head if not self.broken else "\n  ".join([f"{self.broken}, after:", *self.trace, f"({head})"])


STUCK = "from here not everything can end any more without a fault"


def search(world: World, *, max_states: int = 10_000_000) -> Search:
    """Search until a rule is broken or nothing new is found; then see that every state can still settle."""
    found = Search()
    first = world.initial()
    states: list[Hashable] = [first]
    index: dict[Hashable, int] = {first: 0}
    # Where a state was first reached from, and all states from which a step that is no fault leads to it.
    came_from: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]
    depths = [0]
    at = 0
    while at < len(states):
        state = states[at]
        if what := world.broken(state):
            return _ended(found, states, depths, what, _trace(came_from, at))
        for step in world.steps(state):
            found.num_steps += 1
            target = index.get(step.state)
            if target is None:
                if len(states) >= max_states:
                    found.is_complete = False
                    continue
                target = index[step.state] = len(states)
                states.append(step.state)
                came_from.append((at, step.label))
                before.append([])
                depths.append(depths[at] + 1)
            if not step.is_fault:
                before[target].append(at)
        at += 1
    if found.is_complete and (stuck := _first_stuck(world, states, before)) is not None:
        return _ended(found, states, depths, STUCK, _trace(came_from, stuck))
    return _ended(found, states, depths, "", [])


def _ended(found: Search, states: list[Hashable], depths: list[int], broken: str, trace: list[str]) -> Search:
    found.num_states, found.depth, found.broken, found.trace = len(states), depths[-1], broken, trace
    return found


def _first_stuck(world: World, states: list[Hashable], before: list[list[int]]) -> int | None:
    """The first state from which no settled one is reached by steps that are no faults."""
    can_settle = [world.settled(state) for state in states]
    todo = [at for at, can in enumerate(can_settle) if can]
    while todo:
        for at in before[todo.pop()]:
            if not can_settle[at]:
                can_settle[at] = True
                todo.append(at)
    return next((at for at, can in enumerate(can_settle) if not can), None)


def _trace(came_from: list[tuple[int, str]], at: int) -> list[str]:
    labels: list[str] = []
    while at > 0:
        at, label = came_from[at]
        labels.append(label)
    return labels[::-1]
