"""What an offer table says of KV that is not for everybody, and to whom it says nothing."""

from __future__ import annotations

import pytest

from pdmesh.errors import TransferFailed
from pdmesh.protocol.messages import NO_MARKS, GroupBlocks, KVMarks
from pdmesh.protocol.offers import OfferTable
from pdmesh.protocol.states import Reason

DIGEST = b"d" * 32
BLOCKS = [GroupBlocks(group=0, block_ids=[4, 7, 9], generations=[1, 2, 3])]
ROUNDED = KVMarks(num_exact_tokens=16)


def table_with(marks: KVMarks = NO_MARKS, *, resets: str = "") -> OfferTable:
    """`resets`: when the prefix cache is emptied, of opened, sealed and never."""
    table = OfferTable()
    table.open("o", request_id="r", digest=DIGEST)
    if resets == "opened":
        table.note_reset()
    assert table.seal("o", BLOCKS, 40, marks)
    if resets == "sealed":
        table.note_reset()
    return table


@pytest.mark.parametrize("resets", ["", "opened", "sealed"])
@pytest.mark.parametrize("marks", [NO_MARKS, ROUNDED, KVMarks(before_reset=True)], ids=str)
@pytest.mark.parametrize("wanted", [None, [GroupBlocks(group=0, block_ids=[7, 9], generations=[])]], ids=str)
def test_a_consumer_learns_all_marks_whatever_it_names(
    marks: KVMarks, resets: str, wanted: list[GroupBlocks] | None
) -> None:
    view = table_with(marks, resets=resets).begin("t", "c", "o", DIGEST, wanted)
    before_reset = marks.before_reset or bool(resets)
    assert view.marks == KVMarks(num_exact_tokens=marks.num_exact_tokens, before_reset=before_reset)


def test_an_offer_that_is_opened_after_a_reset_has_none() -> None:
    table = table_with(resets="sealed")
    table.open("p", request_id="r", digest=DIGEST)
    table.seal("p", BLOCKS, 40)
    assert table.begin("t", "c", "p", DIGEST).marks == NO_MARKS


@pytest.mark.parametrize(("marks", "resets"), [(ROUNDED, ""), (NO_MARKS, "opened")], ids=["rounded", "reset"])
def test_who_would_not_keep_marks_gets_nothing_that_has_any(marks: KVMarks, resets: str) -> None:
    # Made here, as its lease runs.
    table = table_with(marks, resets=resets)
    with pytest.raises(TransferFailed, match=f"^{Reason.MARKED}: offer o "):
        table.begin("t", "old", "o", DIGEST, heeds_marks=False)
    assert table.num_transfers == 0
    assert table.begin("t2", "new", "o", DIGEST).num_tokens == 40
    assert table_with().begin("t", "old", "o", DIGEST, heeds_marks=False).num_tokens == 40
