"""The owner's side of a handoff's world: the real `OfferTable`, called on values, and a block that others get after the offer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from pdmesh.errors import MeshError
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OFFER_LEASE_S, TRANSFER_LEASE_S, OfferTable, _Offer, _Transfer
from pdmesh.protocol.states import OfferState, TransferState
from pdmesh.protocol.transfers import OfferView
from support.handoff_state import (
    MINE,
    NOTHING,
    OFFER,
    OTHER,
    Bumps,
    Consumer,
    Node,
    Owner,
    Rules,
    write_of,
)
from support.search import Step

DIGEST, OTHER_DIGEST = b"d" * 32, b"o" * 32
GROUPS = [GroupBlocks(group=0, block_ids=[4], generations=[1])]
VIEW = OfferView(groups=GROUPS, num_tokens=20)
assert OFFER_LEASE_S == TRANSFER_LEASE_S, "the clock moves by leases"
FOREVER_S = float("inf")


class OwnerSide:
    """What the owner does, and what arrives there."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._now_s = 0.0
        self._known: dict[tuple[Owner, tuple[Any, ...]], tuple[Owner, Any, int]] = {}

    def first(self) -> Owner:
        """An owner that has opened an offer."""
        return self._ask(Owner(offer=None), ("open",))[0]

    def broken(self, node: Node) -> str:
        """Which rule is broken here; "" for none."""
        owner = node.owner
        if owner is None:
            return ""
        if owner.transfers and not node.held:
            return "the block is let go under a reader within its lease"
        if node.epoch == 0 and node.held != (owner.offer is not None):
            return "the block is kept without its offer, or the offer without its block"
        unattended, answer, _ = self._ask(owner, ("lease",))
        if answer is KeyError:
            return "a lease's end is against the table"
        if unattended.transfers or (unattended.offer is not None and not unattended.writers):
            return "left alone for a lease, the owner still holds something"
        return ""

    def steps(self, node: Node) -> Iterator[Step]:
        """What it may do by itself."""
        owner = node.owner
        if owner is None:
            if node.epoch == 0:
                fresh = Owner(offer=None)
                yield Step("owner starts anew", node._replace(owner=fresh, epoch=1, word=0, content=OTHER, held=False))
            return
        if owner.offer is not None and owner.offer[0] is OfferState.OPEN:
            sealed, is_sealed = self.tell(node, ("seal",))
            if is_sealed:
                computed = _written_now(sealed._replace(content=MINE))
                yield Step("owner seals", computed.send(("Ticket", node.epoch), *self._notices(node)))
        yield from self._lease(node)
        yield from self._reuse(node)
        for attempt in sorted(owner.writers):
            write = write_of(node, attempt)
            is_live = owner.offer is not None and owner.offer[0] is not OfferState.CLOSING
            if write and write[0] == "Armed" and not is_live:
                # What it was to write is not computed any more.
                stopped, _ = self.tell(node.take(write), ("stopped", attempt))
                ended, _ = self.tell(stopped, ("end", attempt, False, "released"))
                yield Step(f"owner gives {attempt} up", ended.send(("Stopped", attempt)))
            elif write and attempt not in dict(owner.transfers):
                stopped, _ = self.tell(node.take(write), ("stopped", attempt))
                yield Step(f"owner stops writing for {attempt}", stopped.send(("Stopped", attempt)))
        if node.faults and node.epoch == 0:
            left = tuple(each for each in node.bag if each[0] != "Armed")
            crashed = node._replace(owner=None, bag=left, faults=node.faults - 1)
            yield Step("owner crashes", crashed, is_fault=True)

    def _notices(self, node: Node) -> list[tuple[Any, ...]]:
        """What the owner's core tells those who listen by now."""
        listen = [each.attempt for each in (node.a, node.b) if each.attempt and each.epoch == node.epoch]
        return [("Notice", attempt, self.word(node)) for attempt in listen if self.rules.told_ahead]

    def deliver(self, node: Node, message: tuple[Any, ...]) -> Node | None:
        """What a message does to a running owner; None while it has to wait."""
        match message:
            case ("Begin", *_) if self.rules.told_ahead and self._is_computing(node):
                return None
            case ("Begin", attempt, life):
                begun, answer = self.tell(node, ("begin", attempt))
                if answer in ("new", "again"):
                    begun = begun.send(("Begun", attempt, self.word(node)))
                    if not self.rules.pushes or answer != "new":
                        return begun
                    is_computed = node.content == MINE or self.rules.writes_early
                    return begun.send(("Write" if is_computed else "Armed", attempt, life))
                return begun.send(("Refused", attempt))
            case ("End", attempt, committed, reason):
                ended, is_writing = self.tell(node, ("end", attempt, committed, reason))
                return (
                    ended.send(("Ended", attempt, node.epoch, is_writing))
                    if self.rules.pushes and not committed
                    else ended
                )
            case ("Release", epoch) if epoch == node.epoch:
                return self.tell(node, ("release",))[0]
            case ("AbortPrefill", epoch) if epoch == node.epoch:
                return self.tell(node, ("release",))[0] if self._is_computing(node) else node
            case ("Written", attempt, epoch) if epoch == node.epoch:
                return self.tell(node, ("stopped", attempt))[0].send(("Pushed", attempt))
            case ("WriteFailed", attempt, epoch) if epoch == node.epoch:
                stopped, _ = self.tell(node, ("stopped", attempt))
                return self.tell(stopped, ("end", attempt, False, "unreachable"))[0]
        return node

    def _is_computing(self, node: Node) -> bool:
        return node.owner is not None and node.owner.offer is not None and node.owner.offer[0] is OfferState.OPEN

    def word(self, node: Node) -> tuple[int, int]:
        """The block's generation word."""
        return (node.epoch if self.rules.words_are_random else 0, node.word)

    def tell(self, node: Node, call: tuple[Any, ...]) -> tuple[Node, Any]:
        """Call the owner's table, and let the block go when that ends the offer."""
        assert node.owner is not None
        owner, answer, num_ended = self._ask(node.owner, call)
        if num_ended > 1 or (num_ended and not node.held):
            return node._replace(bad="an offer's blocks were given back twice"), None
        if answer is KeyError:
            return node._replace(bad=f"{call[0]} is against the table"), None
        return node._replace(owner=owner, held=node.held and not num_ended), answer

    def _lease(self, node: Node) -> Iterator[Step]:
        """A lease's time passes. Everyone who can renews in time or does not."""
        renewers = [c.attempt for c in (node.a, node.b) if self._can_renew(node, c)]
        if node.proxy.live and not self.rules.stock and node.proxy.epoch == node.epoch:
            renewers.append(OFFER)
        for num in range(len(renewers) + 1):
            for renewed in combinations(renewers, num):
                passed, _ = self.tell(node, ("lease", *renewed))
                if passed.owner != node.owner:
                    names = " and ".join(renewed) or "nothing"
                    yield Step(f"a lease passes, {names} renewed", passed)

    def _can_renew(self, node: Node, consumer: Consumer) -> bool:
        return consumer.state is TransferState.READING and consumer.epoch == node.epoch and consumer.attempt != ""

    def _reuse(self, node: Node) -> Iterator[Step]:
        """Somebody else gets the block, once."""
        if node.held or node.epoch or node.content == NOTHING or not self._is_read(node):
            return
        bumps, is_bumped, is_written = self.rules.bumps, node.word == 1, node.content == OTHER
        if not is_bumped and (bumps is Bumps.BEFORE or (bumps is Bumps.AFTER and is_written)):
            yield Step("owner bumps the block's word", node._replace(word=1))
        if not is_written and (is_bumped or bumps is not Bumps.BEFORE):
            yield Step("owner writes other content", node._replace(content=OTHER))

    def _is_read(self, node: Node) -> bool:
        readers = any(each.attempt and (each.state is TransferState.READING or each.pulls) for each in (node.a, node.b))
        return readers or any(message[0] in ("Begun", "Notice", "Write") for message in node.bag)

    def _ask(self, owner: Owner, call: tuple[Any, ...]) -> tuple[Owner, Any, int]:
        known = self._known.get((owner, call))
        if known is None:
            table = self._thaw(owner)
            try:
                answer = self._call(table, call)
            except KeyError:
                answer = KeyError
            known = self._known[owner, call] = (self._freeze(table), answer, len(table.take_ended()))
        return known

    def _call(self, table: OfferTable, call: tuple[Any, ...]) -> Any:
        match call:
            case ("open",):
                table.open(
                    OFFER,
                    request_id="r",
                    digest=DIGEST,
                    release_on_commit=self.rules.stock,
                    seal_within_s=OFFER_LEASE_S,
                )
            case ("seal",):
                return table.seal(OFFER, GROUPS, 20)
            case ("begin", attempt):
                is_known = table.outcome_of(attempt) is TransferState.READING
                try:
                    digest = OTHER_DIGEST if self.rules.other_prompt else DIGEST
                    table.begin(attempt, attempt[0], OFFER, digest, remaining_s=FOREVER_S, written=self.rules.pushes)
                except MeshError:
                    return "refused"
                return "again" if is_known else "new"
            case ("end", attempt, committed, reason):
                table.end(attempt, committed, reason)
                return table.is_writing(attempt)
            case ("release",):
                return table.release(OFFER)
            case ("renew",):
                return table.renew(OFFER)
            case ("lease", *renewed):
                self._now_s = OFFER_LEASE_S / 2
                self._renew(table, renewed)
                self._now_s = OFFER_LEASE_S
                table.expire()
                # At once again, so that all that is left has a whole lease.
                self._renew(table, renewed)
            case ("stopped", attempt):
                table.stopped(attempt)
        return None

    def _renew(self, table: OfferTable, renewed: Sequence[str]) -> None:
        for each in renewed:
            if each == OFFER:
                table.renew(OFFER)
            else:
                table.renew_transfer(each)

    def _thaw(self, owner: Owner) -> OfferTable:
        """Make the table that `owner` is a picture of, at time 0."""
        self._now_s = 0.0
        table = self.rules.table(lambda: self._now_s)
        table._past_offers.update(owner.past_offers)
        table._past_transfers.update(owner.past_transfers)
        if owner.offer is None:
            # What is written out of an offer that is gone should not be; a broken table may have it.
            gone = _Offer(offer_id=OFFER, request_id="r", digest=DIGEST, lease_s=0.0, release_on_commit=False)
            table._writers.update(dict.fromkeys(owner.writers, gone))
            return table
        state, deadline_s, reason, reading = owner.offer
        offer = _Offer(
            offer_id=OFFER,
            request_id="r",
            digest=DIGEST,
            lease_s=OFFER_LEASE_S,
            release_on_commit=self.rules.stock,
            state=state,
            groups=GROUPS,
            num_tokens=20,
            reading=set(reading),
            writing=set(owner.writers),
            reason=reason,
            deadline_s=deadline_s,
        )
        table._offers[OFFER] = offer
        table._writers.update(dict.fromkeys(owner.writers, offer))
        if state is not OfferState.CLOSING:
            table._hold_until(offer, deadline_s)
        for transfer_id, until_s in owner.transfers:
            table._transfers[transfer_id] = _Transfer(
                transfer_id=transfer_id,
                consumer_id=transfer_id[0],
                offer=offer,
                view=VIEW,
                deadline_s=until_s,
                last_deadline_s=FOREVER_S,
                state=TransferState.READING,
            )
            table._transfers_due.set(transfer_id, until_s)
        return table

    def _freeze(self, table: OfferTable) -> Owner:
        now_s = self._now_s
        held = table._offers.get(OFFER)
        offer = None
        if held is not None:
            # A closing offer has no deadline of its own any more.
            left_s = 0.0 if held.state is OfferState.CLOSING else held.deadline_s - now_s
            offer = (held.state, left_s, held.reason, frozenset(held.reading))
        return Owner(
            offer=offer,
            writers=frozenset(table._writers),
            transfers=tuple(sorted((id, each.deadline_s - now_s) for id, each in table._transfers.items())),
            past_offers=tuple(table._past_offers.items()),
            past_transfers=tuple(sorted(table._past_transfers.items())),
        )


def _written_now(node: Node) -> Node:
    """The block is computed: what waited for that is written from now on."""
    for message in node.bag:
        if message[0] == "Armed":
            node = node.take(message).send(("Write", *message[1:]))
    return node
