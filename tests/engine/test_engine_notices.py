"""Notices between cores: what an owner tells and with which sums, and the requests that run ahead on it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pdmesh.connector.notices import OfferNotice
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.shm import ShmConnector
from pdmesh.engine import notices as notices_module
from pdmesh.engine.links import Links
from pdmesh.engine.messages import (
    Abort,
    AddRequest,
    ConnectPeer,
    DropHeld,
    HoldRequest,
    OfferSealed,
    ReleaseOffer,
    StepOutput,
    ToCore,
)
from pdmesh.engine.notices import Notices
from pdmesh.protocol.messages import ChoiceDelta, GroupBlocks, KVMarks, KVSource
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks
from support.core_harness import CoreHarness, make_add
from support.fake_backend import VOCAB_SIZE, expected_tokens
from support.pool_node import listed, make_pool, write_block

SECRET = MeshSecret("x" * 32)
SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
BLOCK_SIZE = 16
PROMPT = [random.Random(7).randrange(2, VOCAB_SIZE) for _ in range(18)]
DIGEST = b"of the prompt"
RIGHT = expected_tokens(PROMPT, 8)
GRACE_S = 10.0


class RecordedLinks(Links):
    """Without connectors: everybody listens for everything, and peers tell what a test puts in."""

    def __init__(self) -> None:
        super().__init__({})
        self.is_anybody_there = True
        self.told: list[OfferNotice] = []
        self.awaited: list[tuple[str, str, str]] = []
        self.arrived: list[tuple[str, OfferNotice]] = []

    def is_awaited(self, offer_id: str) -> bool:
        return self.is_anybody_there

    def tell(self, notice: OfferNotice) -> None:
        self.told.append(notice)

    def await_offer(self, peer_id: str, connector: str, offer_id: str) -> None:
        self.awaited.append((peer_id, connector, offer_id))

    def take_notices(self) -> list[tuple[str, OfferNotice]]:
        arrived, self.arrived = self.arrived, []
        return arrived


@pytest.fixture
def links() -> Iterator[RecordedLinks]:
    made = RecordedLinks()
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = make_pool(SHAPE, filled=True)
    yield made
    made.close()


@pytest.fixture
def notices(links: RecordedLinks, pool: KVPool) -> Notices:
    return Notices(links, pool, BLOCK_SIZE)


# ---- giving -------------------------------------------------------------------------------------


def sealed_of(pool: KVPool, block_ids: list[int], num_tokens: int, **changes: Any) -> OfferSealed:
    groups = [listed(pool, block_ids)]
    made = OfferSealed(offer_id="offer", request_id="r", groups=groups, num_tokens=num_tokens)
    return msgspec.structs.replace(made, **changes)


def summed(pool: KVPool, block_ids: list[int]) -> list[int]:
    return [int(each) for each in sum_blocks(pool.blocks, block_ids)]


FIRST = ChoiceDelta(request_id="r", token_ids=[5])


def give(notices: Notices, sealed: OfferSealed, *deltas: ChoiceDelta) -> OfferSealed:
    [given] = notices.give([sealed], list(deltas) or [FIRST])
    return given


def test_what_was_just_computed_is_told_with_its_sums(notices: Notices, links: RecordedLinks, pool: KVPool) -> None:
    marks = KVMarks(num_exact_tokens=16, before_reset=True)
    sealed = sealed_of(pool, [5, 0, 3], 40, marks=marks)
    # Of others, of the ends of choices, and of what brought no token, nothing is told.
    others = [ChoiceDelta(request_id="other", token_ids=[6]), ChoiceDelta(request_id="r", choice=1)]
    given = give(notices, sealed, others[0], FIRST, others[1])
    right = summed(pool, [5, 0, 3])
    assert given == msgspec.structs.replace(sealed, checksums=[right])
    groups = [msgspec.structs.replace(sealed.groups[0], checksums=right)]
    assert links.told == [OfferNotice(offer_id="offer", groups=groups, num_tokens=40, first_tokens=[5], marks=marks)]


def test_every_group_has_sums_of_its_own(notices: Notices, links: RecordedLinks, pool: KVPool) -> None:
    groups = [listed(pool, [1, 2, 3]), listed(pool, [4, 5], group=1, first_block=1)]
    given = give(notices, sealed_of(pool, [], 40, groups=groups))
    assert given.checksums == [summed(pool, [1, 2, 3]), summed(pool, [4, 5])]
    assert [group.checksums for group in links.told[0].groups] == given.checksums
    # The window's second is not full, nor is the other group's third.
    again = give(notices, sealed_of(pool, [], 40, groups=groups, num_reused=40))
    assert again.checksums == given.checksums
    pool.blocks[[1, 2, 4, 3, 5], 77] ^= 1
    changed = give(notices, sealed_of(pool, [], 40, groups=groups, num_reused=40)).checksums
    assert [changed[0][:2], changed[1][:1]] == [given.checksums[0][:2], given.checksums[1][:1]]
    assert [changed[0][2], changed[1][1]] == summed(pool, [3, 5])


def test_what_was_reused_has_the_sums_that_it_had_when_it_was_computed(
    notices: Notices, links: RecordedLinks, pool: KVPool
) -> None:
    """It may be damaged by now, and a sum of the damage would vouch for it."""
    before = give(notices, sealed_of(pool, [1, 2], 32)).checksums[0]
    pool.blocks[[1, 2], 77] ^= 1
    after = give(notices, sealed_of(pool, [1, 2, 3], 48, num_reused=32)).checksums[0]
    assert after == [*before, *summed(pool, [3])]
    assert after[0] != summed(pool, [1])[0]
    assert len(links.told) == 2
    # Computed anew, it is summed anew.
    write_block(pool, 1)
    assert give(notices, sealed_of(pool, [1, 2], 32, num_reused=0)).checksums[0] == summed(pool, [1, 2])


@pytest.mark.parametrize("num_reused", [16, 31, 32])
def test_without_the_sum_of_a_reused_block_there_is_no_notice(
    notices: Notices, links: RecordedLinks, pool: KVPool, num_reused: int
) -> None:
    give(notices, sealed_of(pool, [2], 16))
    links.told.clear()
    sealed = sealed_of(pool, [1, 2], 32, num_reused=num_reused)
    assert give(notices, sealed) == sealed
    # Its place has been another content's since.
    write_block(pool, 2)
    other = sealed_of(pool, [2], 16, num_reused=16)
    assert give(notices, other) == other
    assert links.told == []


def test_what_is_not_a_whole_reused_block_was_computed(notices: Notices, links: RecordedLinks, pool: KVPool) -> None:
    assert give(notices, sealed_of(pool, [1], 16, num_reused=15)).checksums[0] == summed(pool, [1])
    assert len(links.told) == 1


def test_a_block_that_is_not_full_is_never_remembered(notices: Notices, links: RecordedLinks, pool: KVPool) -> None:
    give(notices, sealed_of(pool, [1, 2], 20))
    # Others go on in it, under the same generation.
    pool.blocks[2, 3000:] = 9
    grown = sealed_of(pool, [1, 2], 32, num_reused=32)
    assert give(notices, grown) == grown
    assert give(notices, sealed_of(pool, [1, 2], 32, num_reused=20)).checksums[0] == summed(pool, [1, 2])
    # Nor when it was known while it was full.
    give(notices, sealed_of(pool, [1, 2], 20, num_reused=16))
    assert give(notices, grown) == grown
    assert [len(each.groups[0].block_ids) for each in links.told] == [2, 2, 2]


SILENT: dict[str, tuple[dict[str, Any], list[ChoiceDelta]]] = {
    "nothing told": ({}, []),
    "no token": ({}, [ChoiceDelta(request_id="r")]),
    "another's token": ({}, [ChoiceDelta(request_id="q", token_ids=[5])]),
    "ended": ({}, [ChoiceDelta(request_id="r", token_ids=[5], finish_reason="stop")]),
    "two choices": ({}, [FIRST, ChoiceDelta(request_id="r", choice=1, token_ids=[6])]),
    "grows": ({"grows": True}, [FIRST]),
}


@pytest.mark.parametrize("with_sums", [False, True])
@pytest.mark.parametrize(("changes", "deltas"), SILENT.values(), ids=SILENT)
def test_of_an_offer_from_which_one_choice_does_not_go_on_nothing_is_told(
    links: RecordedLinks, pool: KVPool, changes: dict[str, Any], deltas: list[ChoiceDelta], *, with_sums: bool
) -> None:
    sealed = sealed_of(pool, [1, 2], 32, **changes)
    assert Notices(links, pool if with_sums else None, BLOCK_SIZE).give([sealed], deltas) == [sealed]
    assert links.told == []


def test_more_than_can_be_summed_at_once_is_not_told(
    links: RecordedLinks, pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices_module, "MAX_SUMMED_BYTES", 3 * SHAPE.block_bytes - 1)
    notices = Notices(links, pool, BLOCK_SIZE)
    for groups in ([listed(pool, [1, 2, 3])], [listed(pool, [1, 2]), listed(pool, [3], group=1)]):
        sealed = sealed_of(pool, [], 48, groups=groups)
        assert give(notices, sealed) == sealed
    assert links.told == []
    assert give(notices, sealed_of(pool, [1, 2], 32)).checksums == [summed(pool, [1, 2])]
    # Nothing has to be summed.
    give(Notices(links, None, BLOCK_SIZE), sealed_of(pool, [1, 2, 3], 48))
    assert len(links.told) == 2


def test_an_engine_that_sums_nothing_tells_no_sums(links: RecordedLinks, pool: KVPool) -> None:
    sealed = sealed_of(pool, [1, 2], 32, num_reused=16)
    assert give(Notices(links, None, BLOCK_SIZE), sealed) == sealed
    assert links.told[0].groups == sealed.groups


def test_what_nobody_listens_for_costs_nothing(
    notices: Notices, links: RecordedLinks, pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    links.is_anybody_there = False
    monkeypatch.setattr(notices_module, "sum_blocks", None)
    sealed = sealed_of(pool, [1, 2], 32)
    assert give(notices, sealed) == sealed
    assert links.told == []


# ---- taking -------------------------------------------------------------------------------------


def held_add(request_id: str = "r", **changes: object) -> AddRequest:
    source = KVSource(
        transfer_id=f"t-{request_id}", peer_id="p@1", groups=[], num_tokens=0, offer_id="offer", connector="shm"
    )
    return make_add(PROMPT, request_id, digest=DIGEST, source=msgspec.structs.replace(source, **changes))


def notice_of(**changes: object) -> OfferNotice:
    groups = [GroupBlocks(group=0, block_ids=[1, 2], generations=[3, 4], checksums=[5, 6])]
    made = OfferNotice(offer_id="offer", groups=groups, num_tokens=len(PROMPT), digest=DIGEST, first_tokens=[9])
    return msgspec.structs.replace(made, **changes)


def test_a_notice_completes_the_request_that_awaits_it(notices: Notices, links: RecordedLinks) -> None:
    add, notice = held_add(deadline_s=3.0, num_resets=2), notice_of(marks=KVMarks(num_exact_tokens=16))
    notices.hold(add)
    assert links.awaited == [("p@1", "shm", "offer")]
    assert notices.take() == []
    links.arrived.append(("p@1", notice))
    [going] = notices.take()
    assert add.source is not None
    assert going == msgspec.structs.replace(
        add,
        request=msgspec.structs.replace(add.request, emitted=[[9]]),
        source=msgspec.structs.replace(add.source, groups=notice.groups, num_tokens=len(PROMPT), marks=notice.marks),
    )
    assert notices.num_ahead == 1
    # Once.
    links.arrived.append(("p@1", notice))
    assert notices.take() == []
    assert [notices.settle("r"), notices.settle("r")] == [True, False]


def test_who_does_not_check_takes_no_sums(links: RecordedLinks) -> None:
    notices = Notices(links, None, BLOCK_SIZE)
    notices.hold(held_add())
    links.arrived.append(("p@1", notice_of()))
    [going] = notices.take()
    assert going.source is not None
    assert going.source.groups == [GroupBlocks(group=0, block_ids=[1, 2], generations=[3, 4])]


@pytest.mark.parametrize(
    "arrived",
    [
        ("p@2", notice_of()),
        ("p@1", notice_of(offer_id="another")),
        ("p@1", notice_of(num_tokens=len(PROMPT) - 1)),
        ("p@1", notice_of(num_tokens=len(PROMPT) + 1)),
        ("p@1", notice_of(digest=b"another")),
    ],
    ids=["owner", "offer", "fewer tokens", "more tokens", "prompt"],
)
def test_a_notice_of_something_else_changes_nothing(
    notices: Notices, links: RecordedLinks, arrived: tuple[str, OfferNotice]
) -> None:
    notices.hold(held_add())
    links.arrived.append(arrived)
    assert notices.take() == []
    assert notices.num_ahead == 0
    assert not notices.settle("r")


def test_after_the_servers_word_a_notice_comes_too_late(notices: Notices, links: RecordedLinks) -> None:
    assert not notices.settle("unknown")
    for request_id in ("r", "q"):
        notices.hold(held_add(request_id))
    assert not notices.settle("r")
    links.arrived.append(("p@1", notice_of()))
    assert [going.request.request_id for going in notices.take()] == ["q"]
    assert not notices.settle("r")
    assert notices.settle("q")


# ---- two cores ----------------------------------------------------------------------------------


def make_core(peer_id: str, **options: Any) -> CoreHarness:
    return CoreHarness(connectors={"shm": ShmConnector(peer_id, SECRET)}, **{"with_sums": True} | options)


def pair_of(**options: Any) -> tuple[CoreHarness, CoreHarness]:
    prefill, decode = make_core("p@1"), make_core("d@1", **options)
    shape = prefill.pool.shape
    order = ConnectPeer(
        peer_id="p@1",
        connector="shm",
        metadata=prefill.metadata["shm"],
        num_blocks=shape.num_blocks,
        block_bytes=shape.block_bytes,
    )
    assert decode.connect(order).error == ""
    return prefill, decode


@pytest.fixture
def pair() -> tuple[CoreHarness, CoreHarness]:
    return pair_of()


def hold(prefill: CoreHarness, decode: CoreHarness, request_id: str = "r") -> None:
    """Have a request wait for the offer, until its owner knows."""
    num_steps, num_deltas = len(decode.backend.steps), len(decode.deltas)
    decode.run(HoldRequest(add=held_add(request_id)))
    end_s = time.monotonic() + GRACE_S
    while not prefill.links.is_awaited("offer"):
        assert time.monotonic() < end_s, "the owner does not hear who listens"
        time.sleep(0.001)
    assert (len(decode.backend.steps), len(decode.deltas)) == (num_steps, num_deltas)


def prefill_prompt(core: CoreHarness) -> OfferSealed:
    """Compute the offer that is waited for."""
    core.add(PROMPT, "offer", prefill_only=True, offer_id="offer", digest=DIGEST)
    [sealed] = [each for output in core.run() if isinstance(output, StepOutput) for each in output.sealed]
    return sealed


def word_of(prefill: CoreHarness, sealed: OfferSealed) -> AddRequest:
    """The request, as the server says it when the owner has agreed."""
    add = held_add(groups=sealed.groups, num_tokens=sealed.num_tokens)
    return msgspec.structs.replace(add, request=msgspec.structs.replace(add.request, emitted=[prefill.tokens("offer")]))


def is_at_rest(core: CoreHarness) -> bool:
    core.scheduler.state.check_integrity()
    kv = core.scheduler.state.kv
    return kv.num_used == 0 and kv.num_free == core.pool.shape.num_blocks and not core.scheduler.state.requests


def at_step(core: CoreHarness, number: int, *messages: ToCore) -> None:
    """Send while the core computes that step."""
    forward = core.backend.forward

    def sending(batch: Any) -> Any:
        if len(core.backend.steps) == number:
            core.send(*messages)
        return forward(batch)

    core.backend.forward = sending


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("with_sums", [False, True])
def test_a_request_runs_on_the_notice_alone(*, with_sums: bool, is_async: bool) -> None:
    prefill, decode = pair_of(with_sums=with_sums, is_async=is_async)
    hold(prefill, decode)
    sealed = prefill_prompt(prefill)
    assert sealed.checksums == [summed(prefill.pool, sealed.groups[0].block_ids)]
    decode.run()
    assert prefill.tokens("offer") + decode.tokens() == RIGHT
    assert decode.finish_reason() == "length"
    first = decode.deltas_of()[0]
    assert (first.cached_tokens, first.kv_source) == (len(PROMPT), "shm")
    # Nothing of the prompt was computed here.
    assert decode.backend.steps[0].context_len.tolist() == [len(PROMPT)]
    assert [each.committed for output in decode.outputs for each in output.transfers] == [True]
    # The word of the servers adds nothing, whenever it comes.
    num_steps, num_deltas = len(decode.backend.steps), len(decode.deltas)
    decode.run(word_of(prefill, sealed))
    assert (len(decode.backend.steps), len(decode.deltas)) == (num_steps, num_deltas)
    assert decode.outputs[-1].stats.told_ahead == 1
    assert is_at_rest(decode)
    prefill.run(ReleaseOffer(offer_id="offer"))
    assert is_at_rest(prefill)


def test_the_servers_word_adds_nothing_to_what_runs(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    at_step(decode, 2, word_of(prefill, prefill_prompt(prefill)))
    decode.run()
    assert prefill.tokens("offer") + decode.tokens() == RIGHT
    assert len(decode.backend.steps) == len(RIGHT) - 1
    assert is_at_rest(decode)


def test_the_same_id_may_come_again_when_it_is_settled(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    word = word_of(prefill, prefill_prompt(prefill))
    decode.run()
    decode.run(word)
    decode.run(word)
    assert (prefill.tokens("offer") + decode.tokens()) == [*RIGHT, *RIGHT[1:]]
    assert is_at_rest(decode)


def drop_in_a_step(decode: CoreHarness) -> None:
    at_step(decode, 2, DropHeld(request_id="r"))


def drop_in_the_pull(decode: CoreHarness) -> None:
    start = decode.links.start

    def sending(pull: Any, **options: bool) -> None:
        start(pull, **options)
        decode.send(DropHeld(request_id="r"))

    decode.links.start = sending


@pytest.mark.parametrize("drop", [drop_in_a_step, drop_in_the_pull])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_runs_ahead_and_is_dropped_leaves_nothing(drop: Callable[[CoreHarness], None], *, is_async: bool) -> None:
    prefill, decode = pair_of(is_async=is_async)
    hold(prefill, decode)
    sealed = prefill_prompt(prefill)
    drop(decode)
    decode.run()
    assert decode.finish_reason() == "abort"
    assert len(decode.tokens()) < len(RIGHT) - 1
    assert len([each for output in decode.outputs for each in output.transfers]) == 1
    assert is_at_rest(decode)
    # The server gives it another id, and it is a request like any other.
    word = word_of(prefill, sealed)
    renamed = msgspec.structs.replace(
        word,
        request=msgspec.structs.replace(word.request, request_id="r2"),
        source=msgspec.structs.replace(word.source, transfer_id="t2"),
    )
    decode.run(renamed)
    assert prefill.tokens("offer") + decode.tokens("r2") == RIGHT
    assert is_at_rest(decode)


def test_what_has_ended_may_be_dropped(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    prefill_prompt(prefill)
    decode.run()
    num_deltas = len(decode.deltas)
    decode.run(DropHeld(request_id="r"), DropHeld(request_id="unknown"))
    assert len(decode.deltas) == num_deltas
    assert is_at_rest(decode)


def test_what_waits_and_is_dropped_does_not_run(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    decode.run(DropHeld(request_id="r"))
    prefill_prompt(prefill)
    decode.run()
    assert decode.deltas == []
    assert decode.backend.steps == []
    assert is_at_rest(decode)


@pytest.mark.parametrize("is_notice_late", [False, True])
def test_without_a_notice_in_time_the_servers_word_serves(
    pair: tuple[CoreHarness, CoreHarness], *, is_notice_late: bool
) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    if is_notice_late:
        # Both are there, and messages are looked at first.
        decode.run(word_of(prefill, prefill_prompt(prefill)))
    else:
        prefill.links.retract("offer")
        decode.run(word_of(prefill, prefill_prompt(prefill)))
    assert prefill.tokens("offer") + decode.tokens() == RIGHT
    assert len(decode.backend.steps) == len(RIGHT) - 1
    assert decode.outputs[-1].stats.told_ahead == 0
    assert len([each for output in decode.outputs for each in output.transfers]) == 1
    assert is_at_rest(decode)


def test_who_is_aborted_while_it_runs_ahead_needs_its_end_all_the_same(pair: tuple[CoreHarness, CoreHarness]) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    word = word_of(prefill, prefill_prompt(prefill))
    at_step(decode, 2, Abort(request_id="r"))
    decode.run()
    assert decode.finish_reason() == "abort"
    num_deltas = len(decode.deltas)
    # What crossed the abort on its way.
    decode.run(word)
    assert len(decode.deltas) == num_deltas
    assert is_at_rest(decode)


def test_of_an_offer_that_is_let_go_before_it_is_there_nothing_is_told(
    pair: tuple[CoreHarness, CoreHarness],
) -> None:
    prefill, decode = pair
    hold(prefill, decode)
    prefill.run(ReleaseOffer(offer_id="offer"))
    assert not prefill.links.is_awaited("offer")
    prefill_prompt(prefill)
    decode.run()
    assert decode.deltas == []


def test_damage_since_the_sums_that_are_told_is_found(pair: tuple[CoreHarness, CoreHarness]) -> None:
    """The prompt's first blocks are from before and damaged since; they are told with the sums that they had."""
    prefill, decode = pair
    hold(prefill, decode, "before")
    first = prefill_prompt(prefill)
    decode.run()
    decode.run(DropHeld(request_id="before"))
    prefill.run(ReleaseOffer(offer_id="offer"))
    decode.scheduler.reset_prefix_cache()
    prefill.pool.blocks[first.groups[0].block_ids[0], 0] ^= 1
    hold(prefill, decode)
    again = prefill_prompt(prefill)
    assert again.num_reused == 16
    assert again.checksums[0][:4] == first.checksums[0][:4]
    decode.run()
    [transfer] = [each for output in decode.outputs for each in output.transfers if each.transfer_id == "t-r"]
    assert (transfer.committed, transfer.reason) == (False, "corrupt")
    assert is_at_rest(decode)


def test_kv_of_another_prompt_is_not_read_however_its_offer_was_named(pair: tuple[CoreHarness, CoreHarness]) -> None:
    """Pulled ahead of its owner's refusal, it was found afterwards under the names of the prompt that it was taken for."""
    prefill, decode = pair
    hold(prefill, decode)
    others = [PROMPT[0] ^ 1, *PROMPT[1:]]
    prefill.add(others, "offer", prefill_only=True, offer_id="offer", digest=b"of others")
    prefill.run()
    decode.run()
    # The owner's server has compared the digests.
    decode.run(DropHeld(request_id="r"))
    decode.add(PROMPT, "next")
    decode.run()
    assert decode.tokens("next") == RIGHT
    assert decode.transfers == []
    assert is_at_rest(decode)
