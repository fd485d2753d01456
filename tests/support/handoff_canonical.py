"""States of a handoff's world from which the same can happen, as one: what nothing asks for any more is left out of them.

Alike are states that differ only

- in messages that change nothing whenever they arrive: answers that nobody waits for, the end of what has ended, a begin or a
  release that comes too late. That one of them may be lost or come twice only wastes a fault, and nothing can happen with fewer
  faults that cannot with more;
- in what nothing depends on: how a transfer or an offer has ended (what comes later is refused all the same, in other words),
  that a transfer has which nothing names any more, what a block holds that nobody will read, words where nobody compares
  them, the content of a target in quarantine, and which life a consumer is in when nothing of an earlier one is under way
  and there is no fault left to end this one;
- in which of the two consumers is called A: nothing that anybody does depends on their names.

`test_protocol_model_reduction.py` compares, step for step, what can happen from a state and from the one that stands for it.
"""

from __future__ import annotations

from typing import Any

from pdmesh.protocol.states import LandingState, OfferState, Reason, TransferState
from support.handoff_state import ENDS, NOTHING, At, Consumer, Node, Owner, Rules

Message = tuple[Any, ...]

NO_WORD = (-1, -1)
RENAMED = {"A": "B", "B": "A"}
NAMES_NO_CONSUMER = frozenset({"Ticket", "Committed", "LegFailed", "Release", "AbortPrefill"})


def canonical(node: Node, rules: Rules) -> Node:
    """Return the state that stands for all that are like this one."""
    if node.bad:
        return node
    kept = tuple(message for message in node.bag if _matters(node, message, rules))
    node = node._replace(bag=kept, a=_consumer(node.a, rules), b=_consumer(node.b, rules))
    node = _block(node._replace(owner=_owner(node)), rules)
    if not node.faults:
        node = _in_first_life(_in_first_life(node, "A"), "B")
    return min(node, _renamed(node), key=_order)


def _matters(node: Node, message: Message, rules: Rules) -> bool:
    """Whether a message can still change something."""
    match message:
        case ("Ticket" | "Committed" | "LegFailed", *_):
            return _matters_to_proxy(node, message, rules)
        case ("Begin" | "End" | "Release" | "AbortPrefill" | "Written" | "WriteFailed", *_):
            return _matters_to_owner(node, message)
        case ("AbortLeg", name, leg):
            consumer = node.consumer(name)
            is_its = consumer.attempt == f"{name}{leg}" and consumer.landing is not LandingState.QUARANTINED
            return is_its or any(each[:3] == ("Leg", name, leg) for each in node.bag)
        case ("Begun" | "Refused" | "Ended" | "Pushed" | "Stopped" | "Notice", attempt, *_):
            consumer = node.consumer(attempt[0])
            return consumer.attempt == attempt and _is_awaited(consumer, message, rules)
    return True


def _matters_to_proxy(node: Node, message: Message, rules: Rules) -> bool:
    proxy = node.proxy
    if message[0] == "Ticket":
        # One that comes too late is given back, if there is still something to give back.
        can_release = proxy.at is not At.CRASHED and not rules.stock and _is_live(node, message[1])
        return proxy.at not in ENDS or can_release
    is_expected = proxy.at is At.PREFILL and not proxy.early
    return (proxy.at is At.DECODE or is_expected) and proxy.leg == message[1]


def _matters_to_owner(node: Node, message: Message) -> bool:
    owner, kind, name = node.owner, message[0], message[1]
    if kind in ("Written", "WriteFailed"):
        return owner is not None and node.epoch == 0
    if kind == "Release":
        return _is_live(node, name)
    if kind == "AbortPrefill":
        is_open = owner is not None and owner.offer is not None and owner.offer[0] is OfferState.OPEN
        return is_open and node.epoch == name
    if node.consumer(name[0]).attempt == name:
        # It waits for the answer.
        return True
    if owner is None:
        # The next start of the owner knows of nothing.
        return False
    is_reading = name in dict(owner.transfers)
    can_begin = _is_live(node, node.epoch) and not is_reading and name not in dict(owner.past_transfers)
    if kind == "Begin":
        return can_begin
    # An end may overtake its begin, which is refused then.
    return is_reading or (can_begin and any(each[0] == "Begin" and each[1] == name for each in node.bag))


def _is_awaited(consumer: Consumer, message: Message, rules: Rules) -> bool:
    """Whether an answer to its transfer can still change something at a consumer."""
    match message:
        case ("Begun" | "Refused", *_):
            return consumer.state is TransferState.OPEN
        case ("Notice", *_):
            is_ours = not (rules.other_prompt and rules.compares_prompts)
            return consumer.state is TransferState.OPEN and consumer.landing is None and is_ours
        case ("Ended", _, epoch, is_writing):
            # One that says that it still writes only has the consumer ask again.
            return not is_writing and (epoch == consumer.epoch or rules.any_answer_fences)
    return True


def _is_live(node: Node, epoch: int) -> bool:
    """Whether the owner's offer can still be released, or begun to be read."""
    offer = None if node.owner is None else node.owner.offer
    return offer is not None and offer[0] is not OfferState.CLOSING and epoch == node.epoch


def _consumer(consumer: Consumer, rules: Rules) -> Consumer:
    if not consumer.attempt or not rules.pushes:
        return consumer
    if consumer.landing is LandingState.QUARANTINED:
        return consumer._replace(state=TransferState.FAILED, data=NOTHING, word=NO_WORD)
    return consumer._replace(word=NO_WORD)


def _owner(node: Node) -> Owner | None:
    owner = node.owner
    if owner is None:
        return None
    named = {message[1] for message in node.bag if message[0] in ("Begin", "End")} | {node.a.attempt, node.b.attempt}
    past = tuple((attempt, TransferState.FAILED) for attempt, _ in owner.past_transfers if attempt in named)
    offer = owner.offer and (owner.offer[0], owner.offer[1], Reason.RELEASED, owner.offer[3])
    return owner._replace(offer=offer, past_offers=(), past_transfers=past)


def _block(node: Node, rules: Rules) -> Node:
    """A block of no offer that nobody reads or will begin to read may hold anything."""
    is_offered = node.owner is not None and node.owner.offer is not None
    is_moved = any(message[0] in ("Begun", "Notice", "Write", "Armed") for message in node.bag)
    is_pulled = not rules.pushes and any(each.state is TransferState.READING or each.pulls for each in (node.a, node.b))
    return node if is_offered or is_moved or is_pulled else node._replace(content=NOTHING, word=0)


def _in_first_life(node: Node, name: str) -> Node:
    """Take a consumer for one that never crashed, if nothing of an earlier life is under way."""
    consumer = node.consumer(name)
    lives = {each[2] for each in node.bag if _names_life_of(each, name)}
    if not consumer.life or lives - {consumer.life}:
        return node
    bag = tuple(sorted((*each[:2], 0) if _names_life_of(each, name) else each for each in node.bag))
    return node.with_consumer(name, consumer._replace(life=0))._replace(bag=bag)


def _names_life_of(message: Message, name: str) -> bool:
    return message[0] in ("Begin", "Armed", "Write") and message[1][0] == name


def _renamed(node: Node) -> Node:
    """The same with A called B, and B A."""
    owner = node.owner
    if owner is not None:
        offer = owner.offer and (*owner.offer[:3], frozenset(map(_other, owner.offer[3])))
        owner = owner._replace(
            offer=offer,
            writers=frozenset(map(_other, owner.writers)),
            transfers=tuple(sorted((_other(attempt), left_s) for attempt, left_s in owner.transfers)),
            past_transfers=tuple(
                sorted(((_other(attempt), state) for attempt, state in owner.past_transfers), key=_name)
            ),
        )
    return node._replace(
        owner=owner,
        proxy=node.proxy._replace(on=_other(node.proxy.on)),
        a=node.b._replace(attempt=_other(node.b.attempt)),
        b=node.a._replace(attempt=_other(node.a.attempt)),
        bag=tuple(sorted(_renamed_message(message) for message in node.bag)),
    )


def _renamed_message(message: Message) -> Message:
    return message if message[0] in NAMES_NO_CONSUMER else (message[0], _other(message[1]), *message[2:])


def _other(name: str) -> str:
    """The other consumer's name, or its transfer of the same leg."""
    return name and RENAMED[name[0]] + name[1:]


def _name(entry: tuple[str, Any]) -> str:
    return entry[0]


def _order(node: Node) -> tuple[Any, ...]:
    """Which of two names for a state is taken: equal only where both are the same state."""
    owner = node.owner
    tables: tuple[Any, ...] = ()
    if owner is not None:
        tables = (sorted(owner.writers), owner.transfers, [attempt for attempt, _ in owner.past_transfers])
    return (_consumer_order(node.a), _consumer_order(node.b), node.proxy.on, node.bag, tables)


def _consumer_order(consumer: Consumer) -> tuple[Any, ...]:
    landing = "" if consumer.landing is None else consumer.landing.value
    state, epoch, word = consumer.state.value, consumer.epoch, consumer.word
    pulled = "" if consumer.pulled is None else f"ended {consumer.pulled}"
    return (consumer.attempt, consumer.life, state, epoch, word, landing, consumer.data, consumer.checked, pulled)
