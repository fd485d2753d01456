"""The handoff, searched exhaustively: every order of messages, losses, crashes and leases keeps the promises; and each rule
that they rest on, broken, is noticed.

The promises, in `support.handoff_world`: what is committed is the content that was promised; a block is kept while a reader is
within its lease, or while the owner writes out of it; nothing is written into a block that has been given to somebody else;
nothing is let out on the word of the owner's core before the owner has agreed; nothing ends twice; left alone for a lease the
owner holds nothing; and from wherever faults have led, everything still ends.

Every search is whole: of states from which the same can happen it visits one (`support.handoff_canonical`). A push with two
legs and two faults, which takes two minutes and is not run here, was searched to its end on 2026-12-01: 328,343 states, 2,748,915
steps, no promise broken; `search(HandoffWorld(Rules(pushes=True, faults=2)))` does it again.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh.protocol.offers import EndedOffer, OfferTable, _Offer, _Transfer
from pdmesh.protocol.states import (
    LANDING_TABLE,
    TRANSFER_TABLE,
    LandingEvent,
    LandingState,
    OfferEvent,
    Reason,
    TransferEvent,
    TransferState,
)
from support.handoff_state import Bumps, Rules
from support.handoff_world import HandoffWorld
from support.search import STUCK, Search, search

OTHERS_CONTENT = "committed content of somebody else"
LATE_WRITE = "a late write"
TOO_EARLY = "before the owner had agreed"
LEFT_BEHIND = "left alone for a lease"
UNDER_A_READER = "under a reader"
TWICE = "twice"
AGAINST_THE_TABLE = "against the table"


def searched(**rules: Any) -> Search:
    return search(HandoffWorld(Rules(**rules)))


@pytest.mark.parametrize(
    ("rules", "least_states"),
    [
        pytest.param({"faults": 0}, 350, id="pull"),
        pytest.param({"faults": 1}, 5_000, id="pull, a fault"),
        pytest.param({"faults": 2, "legs": 1}, 1_700, id="pull, two faults, one leg"),
        pytest.param({"stock": True, "faults": 1}, 3_000, id="stock router, a fault"),
        pytest.param({"pushes": True, "faults": 0}, 5_500, id="push"),
        pytest.param({"pushes": True, "faults": 1, "legs": 1}, 1_700, id="push, a fault, one leg"),
        pytest.param({"pushes": True, "early": True, "faults": 1, "legs": 1}, 3_000, id="early push, a fault, one leg"),
        pytest.param({"told_ahead": True, "faults": 0}, 2_300, id="told ahead"),
        pytest.param({"told_ahead": True, "faults": 1, "legs": 1}, 4_200, id="told ahead, a fault, one leg"),
        pytest.param(
            {"told_ahead": True, "other_prompt": True, "faults": 1, "legs": 1},
            350,
            id="told ahead of another prompt, a fault, one leg",
        ),
        pytest.param({"told_ahead": True, "faults": 1}, 24_000, id="told ahead, a fault", marks=pytest.mark.full),
        pytest.param(
            {"told_ahead": True, "faults": 2, "legs": 1},
            13_000,
            id="told ahead, two faults, one leg",
            marks=pytest.mark.full,
        ),
        pytest.param({"stock": True, "faults": 2}, 16_000, id="stock router, two faults", marks=pytest.mark.full),
        # Every two of a loss, a repetition, a crash, and a consumer given up though it lives.
        pytest.param({"faults": 2}, 27_000, id="pull, two faults", marks=pytest.mark.full),
        pytest.param({"faults": 4, "legs": 1}, 5_500, id="pull, four faults, one leg", marks=pytest.mark.full),
        pytest.param(
            {"pushes": True, "faults": 2, "legs": 1}, 5_500, id="push, two faults, one leg", marks=pytest.mark.full
        ),
        pytest.param({"pushes": True, "faults": 1}, 65_000, id="push, a fault", marks=pytest.mark.full),
        pytest.param(
            {"pushes": True, "early": True, "faults": 1}, 65_000, id="early push, a fault", marks=pytest.mark.full
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_every_order_of_events_keeps_the_promises(rules: dict[str, Any], least_states: int) -> None:
    found = searched(**rules)
    assert found.is_complete
    assert not found.broken, str(found)
    assert found.num_states >= least_states, "the world has shrunk: does it still do all it did?"


class LetsGoUnderReaders(OfferTable):
    def _close(self, offer: _Offer, reason: Reason) -> None:
        offer.on(OfferEvent.CLOSE)
        self._offers_due.drop(offer.offer_id)
        offer.reason = reason
        self._give_back(offer)


class LetsGoUnderWriters(OfferTable):
    def _close(self, offer: _Offer, reason: Reason) -> None:
        offer.writing.clear()
        super()._close(offer, reason)


class ForgetsWriters(OfferTable):
    def begin(self, *arguments: Any, written: bool = False, **named: Any) -> Any:
        return super().begin(*arguments, **named)


class KeepsDeadReaders(OfferTable):
    def expire(self) -> None:
        for transfer_id in self._transfers:
            self._transfers_due.drop(transfer_id)
        super().expire()


class KeepsAbandonedOffers(OfferTable):
    def expire(self) -> None:
        for offer_id in self._offers:
            self._offers_due.drop(offer_id)
        super().expire()


class ForgetsClosingOffers(OfferTable):
    def _end_transfer(self, transfer: _Transfer, event: TransferEvent) -> None:
        offer = transfer.offer
        offer.reading.add("nobody")
        super()._end_transfer(transfer, event)
        offer.reading.discard("nobody")


class ForgetsEarlyEnds(OfferTable):
    def end(self, transfer_id: str, committed: bool, reason: str = "") -> bool:
        return transfer_id in self._transfers and super().end(transfer_id, committed, reason)


class GivesBackTwice(OfferTable):
    def take_ended(self) -> list[EndedOffer]:
        return super().take_ended() * 2


FREED_AT_ONCE = {**LANDING_TABLE, (LandingState.EXPECTED, LandingEvent.UNWANTED): LandingState.FENCED}
ONE_FAULT = {"faults": 1, "legs": 1}
PUSH = {"pushes": True, "faults": 1, "legs": 1}
EARLY = {"pushes": True, "early": True, "faults": 0, "legs": 1}
AHEAD = {"told_ahead": True, "faults": 0, "legs": 1}


@pytest.mark.parametrize(
    ("rules", "broken"),
    [
        pytest.param({**ONE_FAULT, "compares": False}, OTHERS_CONTENT, id="words are not compared"),
        pytest.param({**ONE_FAULT, "compares_after": False}, OTHERS_CONTENT, id="words are read before the data"),
        pytest.param({**ONE_FAULT, "bumps": Bumps.NEVER}, OTHERS_CONTENT, id="blocks are reused without a new word"),
        pytest.param({**ONE_FAULT, "bumps": Bumps.AFTER}, OTHERS_CONTENT, id="the word is new after the content is"),
        pytest.param(
            {**ONE_FAULT, "checks_epoch": False, "words_are_random": False},
            OTHERS_CONTENT,
            id="another start of the owner is read, whose words are the same",
        ),
        pytest.param(
            {"faults": 2, "legs": 1, "gives_up": False}, STUCK, id="a consumer waits forever for a lost answer"
        ),
        pytest.param(
            {**ONE_FAULT, "table": LetsGoUnderReaders}, UNDER_A_READER, id="release does not wait for readers"
        ),
        pytest.param({**ONE_FAULT, "table": KeepsDeadReaders}, LEFT_BEHIND, id="transfers have no lease"),
        pytest.param({**ONE_FAULT, "table": KeepsAbandonedOffers}, LEFT_BEHIND, id="offers have no lease"),
        pytest.param({**ONE_FAULT, "table": ForgetsClosingOffers}, LEFT_BEHIND, id="the last reader ends nothing"),
        pytest.param({**ONE_FAULT, "table": GivesBackTwice}, TWICE, id="blocks are given back twice"),
        pytest.param({**PUSH, "table": LetsGoUnderWriters}, OTHERS_CONTENT, id="blocks are reused while written from"),
        pytest.param({**PUSH, "table": ForgetsWriters}, LATE_WRITE, id="the owner forgets what it writes"),
        pytest.param({**PUSH, "table": ForgetsEarlyEnds}, LATE_WRITE, id="an end before its begin is forgotten"),
        pytest.param({**PUSH, "landing": FREED_AT_ONCE}, LATE_WRITE, id="blocks that nobody wants are free at once"),
        pytest.param({**EARLY, "writes_early": True}, OTHERS_CONTENT, id="blocks are written before they are computed"),
        pytest.param({**EARLY, "landing": FREED_AT_ONCE}, LATE_WRITE, id="an expectation's blocks are free at once"),
        pytest.param({**EARLY, "table": ForgetsWriters}, LATE_WRITE, id="the owner forgets what it began early"),
        pytest.param({**AHEAD, "lets_out_early": True}, TOO_EARLY, id="the owner's answer is not waited for"),
        pytest.param({**AHEAD, "compares": False}, OTHERS_CONTENT, id="words are not compared ahead of the answer"),
        pytest.param(
            {**AHEAD, "other_prompt": True, "compares_prompts": False},
            OTHERS_CONTENT,
            id="what is told of another prompt is read",
        ),
        pytest.param({**PUSH, "time_fences": True}, LATE_WRITE, id="quarantine ends by itself"),
        pytest.param({**PUSH, "refusal_fences": True}, LATE_WRITE, id="a refused begin ends quarantine"),
        pytest.param({**PUSH, "any_answer_fences": True}, LATE_WRITE, id="another start of the owner ends quarantine"),
    ],
)
def test_a_broken_rule_is_noticed(rules: dict[str, Any], broken: str) -> None:
    found = searched(**rules)
    assert broken in found.broken, str(found)


@pytest.mark.parametrize("event", [TransferEvent.EXPIRE, TransferEvent.ABORT, TransferEvent.COMMIT, TransferEvent.FAIL])
def test_an_end_that_the_table_lacks_is_noticed(event: TransferEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TRANSFER_TABLE, (TransferState.READING, event))
    found = searched(**ONE_FAULT)
    assert AGAINST_THE_TABLE in found.broken or TWICE in found.broken, str(found)


@pytest.mark.parametrize("broken", [{"checks_epoch": False}, {"words_are_random": False}])
def test_either_of_two_guards_against_a_restarted_owner_is_enough(broken: dict[str, Any]) -> None:
    assert not searched(**ONE_FAULT, **broken).broken
