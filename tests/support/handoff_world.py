"""A handoff as a world to search: one owner, two consumers, a proxy, and a network that loses, delays and repeats.

The owner is the real `OfferTable`, on a clock that the search moves; the consumers follow `TRANSFER_TABLE` and
`LANDING_TABLE`. One prompt, one block: what it holds is the prompt's KV until somebody else's is written over it. `Rules` has a
switch for each rule that the handoff rests on, so that a test can break one and see that the search notices.

Messages lie in a bag and arrive in any order. The owner's clock moves at any time by a whole lease, and who holds an offer or a
transfer then may or may not have renewed it. A fault is a crash, a message that is lost or comes twice, or a consumer that is
given up though it lives; there are as many as `Rules.faults` says.

Steps that only lead to the same again are left out: the block gets other content only while somebody might read it. Of states
from which the same can happen one stands for all (`handoff_canonical`), so that in a trace A may be called B from some step on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from support.handoff_canonical import canonical
from support.handoff_consumer import ConsumerSide
from support.handoff_owner import OwnerSide
from support.handoff_proxy import ProxySide
from support.handoff_state import (
    ENDS,
    NOTHING,
    RELIABLE,
    REPEATABLE,
    TO_OWNER,
    TO_PROXY,
    Consumer,
    Node,
    Proxy,
    Rules,
)
from support.search import Step


class HandoffWorld:
    """See the module. A `search.World`."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._owner = OwnerSide(rules)
        self._proxy = ProxySide(rules, self._owner)
        self._consumers = ConsumerSide(rules, self._owner)

    def initial(self) -> Node:
        idle = Consumer()
        return Node(self._owner.first(), 0, 0, NOTHING, True, Proxy(), idle, idle, (), self.rules.faults)

    def steps(self, state: Hashable) -> Iterator[Step]:
        assert isinstance(state, Node)
        for step in self.all_steps(state):
            assert isinstance(step.state, Node)
            yield Step(step.label, canonical(step.state, self.rules), step.is_fault)

    def broken(self, state: Hashable) -> str:
        assert isinstance(state, Node)
        return state.bad or self._owner.broken(state)

    def settled(self, state: Hashable) -> bool:
        assert isinstance(state, Node)
        return (
            state.proxy.at in ENDS
            and not state.bag
            and not state.a.attempt
            and not state.b.attempt
            and (state.owner is None or state.owner.offer is None)
        )

    def all_steps(self, node: Node) -> Iterator[Step]:
        """All that can happen next, to whichever state it leads."""
        if node.bad:
            return
        yield from self._deliveries(node)
        yield from self._owner.steps(node)
        yield from self._proxy.steps(node)
        for name in "AB":
            yield from self._consumers.steps(node, name)

    def _deliveries(self, node: Node) -> Iterator[Step]:
        for message in node.bag:
            kind = message[0]
            label = " ".join(map(str, message))
            rest = node.take(message)
            if (arrived := self._deliver(rest, message)) is not None:
                yield Step(f"{label} arrives", arrived)
                if node.faults and kind in REPEATABLE:
                    again = arrived.send(message)._replace(faults=node.faults - 1)
                    yield Step(f"{label} arrives, and will again", again, is_fault=True)
            if node.faults and kind not in RELIABLE:
                yield Step(f"{label} is lost", rest._replace(faults=node.faults - 1), is_fault=True)

    def _deliver(self, node: Node, message: tuple[Any, ...]) -> Node | None:
        """What a message does; None while it has to wait."""
        if message[0] == "Armed":
            return None
        if message[0] in TO_OWNER:
            return node if node.owner is None else self._owner.deliver(node, message)
        if message[0] in TO_PROXY:
            return self._proxy.deliver(node, message)
        return self._consumers.deliver(node, message)
