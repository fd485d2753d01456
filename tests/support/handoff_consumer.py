"""A consumer's side of a handoff's world: one transfer at a time, pulled by its own transport or written by the owner's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdmesh.protocol.states import (
    TRANSFER_TABLE,
    LandingEvent,
    LandingState,
    TransferEvent,
    TransferState,
    event_of_end,
)
from support.handoff_owner import OwnerSide
from support.handoff_state import MINE, OTHER, Consumer, Node, Rules, leg_of, write_of
from support.search import Step


class ConsumerSide:
    """What the consumers do, and what arrives there."""

    def __init__(self, rules: Rules, owner: OwnerSide) -> None:
        self.rules, self._owner = rules, owner

    def steps(self, node: Node, name: str) -> Iterator[Step]:
        """What one of them may do by itself."""
        consumer = node.consumer(name)
        if node.faults and consumer.life == 0 and (consumer.attempt or node.proxy.on == name):
            crashed = node.with_consumer(name, Consumer(life=1))._replace(faults=node.faults - 1)
            if node.proxy.on == name:
                crashed = crashed.send(("LegFailed", node.proxy.leg))
            yield Step(f"{name} crashes", crashed, is_fault=True)
        if not consumer.attempt:
            return
        may_give_up = self.rules.gives_up and consumer.landing is not LandingState.QUARANTINED
        waits = consumer.state is TransferState.OPEN or self.rules.pushes
        if may_give_up and waits:
            yield Step(f"{name} waits no longer", self._drop(node, name, reason="timeout"))
        if self.rules.pushes:
            yield from self._of_target(node, name)
        elif consumer.pulls:
            yield from self._of_pull(node, name)

    def deliver(self, node: Node, message: tuple[Any, ...]) -> Node | None:
        """What a message to one of them does; None while it has to wait."""
        match message:
            case ("Leg", name, leg, epoch):
                consumer = node.consumer(name)
                if consumer.attempt:
                    return None
                attempt = f"{name}{leg}"
                landing = LandingState.EXPECTED if self.rules.pushes else None
                begun = Consumer(life=consumer.life, attempt=attempt, epoch=epoch, landing=landing)
                return node.with_consumer(name, begun).send(("Begin", attempt, consumer.life))
            case ("AbortLeg", name, leg):
                consumer = node.consumer(name)
                if any(each[:3] == ("Leg", name, leg) for each in node.bag):
                    # It may overtake its leg, but then it is said again.
                    return None
                is_its = consumer.attempt == f"{name}{leg}" and consumer.landing is not LandingState.QUARANTINED
                return self._drop(node, name, reason="aborted", tells=False) if is_its else node
            case ("Write", attempt, life):
                return self._written(node, attempt, life)
        attempt = message[1]
        name = attempt[0]
        consumer = node.consumer(name)
        if consumer.attempt != attempt:
            return node
        is_open = consumer.state is TransferState.OPEN
        match message:
            case ("Notice", _, word) if is_open and consumer.landing is None:
                if self.rules.other_prompt and self.rules.compares_prompts:
                    return node
                return node.with_consumer(name, consumer._replace(word=word, landing=LandingState.EXPECTED))
            case ("Begun", _, _) if is_open and consumer.landing is not None and not self.rules.pushes:
                agreed = consumer._replace(state=TRANSFER_TABLE[consumer.state, TransferEvent.BEGIN])
                if consumer.pulled is None:
                    return node.with_consumer(name, agreed)
                return self._end(node, name, agreed, committed=not consumer.pulled, reason=consumer.pulled)
            case ("Begun", _, word) if is_open:
                state = TRANSFER_TABLE[consumer.state, TransferEvent.BEGIN]
                reading = consumer._replace(state=state, word=word, landing=LandingState.EXPECTED)
                return node.with_consumer(name, reading)
            case ("Refused", _) if is_open and self.rules.pushes and self.rules.refusal_fences:
                return self._target_ended(node, name, arrived=False)
            case ("Refused", _) if is_open:
                # A begin that came twice is refused although the first one's write may be under way.
                return self._drop(node, name, reason="refused")
            case ("Stopped", _):
                return self._target_ended(node, name, arrived=False)
            case ("Pushed", _):
                return self._target_ended(node, name, arrived=True)
            case ("Ended", _, epoch, False) if consumer.landing is LandingState.QUARANTINED:
                is_fence = epoch == consumer.epoch or self.rules.any_answer_fences
                return self._target_ended(node, name, arrived=False) if is_fence else node
        return node

    def _of_pull(self, node: Node, name: str) -> Iterator[Step]:
        consumer, rules = node.consumer(name), self.rules
        reaches = node.epoch == consumer.epoch or not rules.checks_epoch
        if consumer.landing is LandingState.QUARANTINED or not reaches:
            reason = "peer_lost" if not reaches else "cancelled"
            yield Step(f"{name}'s pull stops, {reason}", self._pull_ended(node, name, reason))
        if not reaches:
            return
        matches = not rules.compares or self._owner.word(node) == consumer.word
        if not rules.compares_after and not consumer.checked:
            if matches:
                yield Step(f"{name} compares words", node.with_consumer(name, consumer._replace(checked=True)))
            else:
                yield Step(f"{name} finds the block stale", self._pull_ended(node, name, "stale"))
        elif not consumer.data:
            yield Step(f"{name} copies the block", node.with_consumer(name, consumer._replace(data=node.content)))
        elif matches or not rules.compares_after:
            yield Step(f"{name} finds its copy good", self._pull_ended(node, name, ""))
        else:
            yield Step(f"{name} finds the block stale", self._pull_ended(node, name, "stale"))

    def _of_target(self, node: Node, name: str) -> Iterator[Step]:
        """What a consumer can do about a block that the owner writes."""
        consumer = node.consumer(name)
        attempt = consumer.attempt
        is_asking = any(each[0] in ("End", "Ended") and each[1] == attempt for each in node.bag)
        if consumer.landing is LandingState.QUARANTINED and not is_asking:
            yield Step(f"{name} asks about {attempt} again", node.send(("End", attempt, False, "aborted")))
        if self.rules.time_fences and consumer.landing is LandingState.QUARANTINED:
            yield Step(f"{name} has waited long enough", self._target_ended(node, name, arrived=False))
        if node.owner is None or node.epoch != consumer.epoch:
            write = write_of(node, attempt)
            yield Step(f"{name} shuts the dead owner out", self._target_ended(node.take(write), name, arrived=False))

    def _written(self, node: Node, attempt: str, life: int) -> Node:
        """A write of the owner's transport takes effect, with what its block holds now."""
        name = attempt[0]
        consumer = node.consumer(name)
        if consumer.life != life:
            return node.send(("WriteFailed", attempt, 0))
        if consumer.attempt != attempt:
            return node._replace(bad=f"a late write for {attempt} hit a block that {name} had given to somebody else")
        written = node.with_consumer(name, consumer._replace(data=node.content if node.epoch == 0 else OTHER))
        return written.send(("Written", attempt, 0))

    def _pull_ended(self, node: Node, name: str, reason: str) -> Node:
        """The connector says that a pull has ended, with this reason or well."""
        consumer = node.consumer(name)
        is_wanted = consumer.landing is LandingState.EXPECTED
        landed = self._land(consumer, LandingEvent.STOPPED if reason else LandingEvent.ARRIVED)
        if not is_wanted and consumer.state not in (TransferState.OPEN, TransferState.READING):
            # It was over when the owner refused it, or nobody wanted its answer any more.
            return node.with_consumer(name, Consumer(life=consumer.life))
        if not is_wanted:
            reason = "aborted"
        if not reason and (consumer.data != MINE or self.rules.other_prompt):
            # Whether it lets anything out or not: from here on others find it.
            return node._replace(bad=f"{name} committed content of somebody else")
        if consumer.state is TransferState.OPEN and not self.rules.lets_out_early:
            return node.with_consumer(name, landed._replace(pulled=reason))
        return self._end(node, name, landed, committed=not reason, reason=reason, tells=is_wanted)

    def _target_ended(self, node: Node, name: str, *, arrived: bool) -> Node:
        """The owner's writer has stopped."""
        consumer = node.consumer(name)
        is_wanted = consumer.landing is LandingState.EXPECTED
        landed = self._land(consumer, LandingEvent.ARRIVED if arrived else LandingEvent.STOPPED)
        if not is_wanted:
            return node.with_consumer(name, Consumer(life=consumer.life))
        if arrived and consumer.data != MINE:
            return node._replace(bad=f"{name} committed content of somebody else")
        if arrived and consumer.state is TransferState.OPEN:
            landed = landed._replace(state=TRANSFER_TABLE[consumer.state, TransferEvent.BEGIN])
        return self._end(node, name, landed, committed=arrived, reason="" if arrived else "stopped")

    def _drop(self, node: Node, name: str, *, reason: str, tells: bool = True) -> Node:
        """Nobody waits for a transfer any more."""
        consumer = node.consumer(name)
        if consumer.landing is None or consumer.pulled is not None:
            return self._end(node, name, consumer, committed=False, reason=reason, tells=tells)
        dropped = self._land(consumer, LandingEvent.UNWANTED)
        if not self.rules.pushes and consumer.state is not TransferState.OPEN:
            # The consumer's own transport writes: the transfer ends when that has stopped.
            return node.with_consumer(name, dropped)
        return self._end(node, name, dropped, committed=False, reason=reason, tells=tells)

    def _end(
        self, node: Node, name: str, consumer: Consumer, *, committed: bool, reason: str, tells: bool = True
    ) -> Node:
        """End a transfer here, tell the owner, and the proxy unless it has said itself that it is over."""
        if committed and consumer.state is TransferState.OPEN:
            return node._replace(bad=f"{name} let something out before the owner had agreed")
        try:
            ended = consumer._replace(state=TRANSFER_TABLE[consumer.state, event_of_end(committed, reason)])
        except KeyError:
            return node._replace(bad=f"{name}'s transfer ended twice")
        node = node.send(("End", consumer.attempt, committed, reason))
        if tells:
            node = node.send(("Committed" if committed else "LegFailed", leg_of(consumer.attempt)))
        is_over = consumer.landing is not LandingState.QUARANTINED
        return node.with_consumer(name, Consumer(life=consumer.life) if is_over else ended)

    def _land(self, consumer: Consumer, event: LandingEvent) -> Consumer:
        assert consumer.landing is not None
        return consumer._replace(landing=self.rules.landing[consumer.landing, event])
