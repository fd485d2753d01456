"""KV that others must not take for their own: what was rounded between engines, and what is from before a reset, however far it
goes."""

from __future__ import annotations

import msgspec
import pytest

from pdmesh.connector.shm import ShmConnector
from pdmesh.engine.messages import OfferSealed, ReleaseOffer
from pdmesh.engine.push_messages import BeginPush
from pdmesh.engine.pushing import RESET, ROUNDED
from pdmesh.protocol.messages import NO_MARKS, KVMarks, KVSource
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness
from support.fake_backend import expected_tokens
from support.prompts import random_prompt

SECRET = MeshSecret("x" * 32)
BLOCK = 4


def chain(*peer_ids: str) -> list[CoreHarness]:
    """Engines of which each may pull from the one before."""
    cores = [
        CoreHarness(connectors={"shm": ShmConnector(each, SECRET)}, num_blocks=128, spill_usage=0.0)
        for each in peer_ids
    ]
    for owner_id, owner, consumer in zip(peer_ids, cores, cores[1:], strict=False):
        consumer.reach(owner, owner_id)
    return cores


def offered(core: CoreHarness, prompt: list[int], name: str = "offer", **options: object) -> OfferSealed:
    core.add(prompt, name, prefill_only=True, offer_id=name, **options)
    core.run()
    return next(each for each in core.sealed if each.offer_id == name)


def source(sealed: OfferSealed, owner_id: str, **changes: object) -> KVSource:
    made = KVSource(
        transfer_id=f"{sealed.offer_id}-{owner_id}",
        peer_id=owner_id,
        groups=sealed.groups,
        num_tokens=sealed.num_tokens,
        marks=sealed.marks,
    )
    return msgspec.structs.replace(made, **changes)


def resume(core: CoreHarness, prompt: list[int], first: list[int], from_: KVSource, name: str = "r") -> None:
    """Have what was offered pulled and gone on with, to the right tokens."""
    core.add(prompt, name, emitted=[first], source=from_, store_to_tier=True)
    core.run()
    assert first + core.tokens(name) == expected_tokens(prompt, 8)


def told(core: CoreHarness) -> int:
    """Blocks that the tier may have."""
    return sum(len(each.keys) for each in core.computed)


def is_cached(core: CoreHarness, prompt: list[int]) -> bool:
    name = f"look{len(core.outputs)}"
    core.add([*prompt, 3], name, max_tokens=1)
    core.run()
    return core.deltas_of(name)[0].cached_tokens > 0


def test_rounded_kv_keeps_its_mark_from_engine_to_engine() -> None:
    a, b, c = chain("a@1", "b@1", "c@1")
    prompt = random_prompt(30)
    sealed = offered(a, prompt)
    assert sealed.marks == NO_MARKS
    first = a.tokens("offer")
    # Its first two blocks b computes by itself; what comes from a is rounded on its way.
    b.add(prompt[: 2 * BLOCK], "warm", max_tokens=1)
    b.run()
    resume(b, prompt, first, source(sealed, "a@1", marks=KVMarks(num_exact_tokens=0)))
    # Found in its prefix cache, by another prompt that it goes on from.
    longer = prompt + random_prompt(17)
    again = offered(b, longer, "again")
    assert b.deltas_of("again")[0].cached_tokens > 2 * BLOCK
    assert again.marks == KVMarks(num_exact_tokens=2 * BLOCK)
    resume(c, longer, b.tokens("again"), source(again, "b@1"))
    onward = offered(c, longer + random_prompt(9), "onward")
    assert onward.marks == KVMarks(num_exact_tokens=2 * BLOCK)
    # Neither has told the tier of anything but b's own beginning, which c had exact from there.
    assert told(b) == told(c) == 2
    # What nobody has rounded is offered without a mark, in the same blocks perhaps.
    for length in range(40, 120, 8):
        other = random_prompt(length)
        assert offered(b, other, f"o{length}").marks == NO_MARKS
        b.send(ReleaseOffer(offer_id=f"o{length}"))


@pytest.mark.parametrize("is_sealed", [False, True])
def test_rounded_kv_is_not_pushed(is_sealed: bool) -> None:
    a, b = chain("a@1", "b@1")
    prompt = random_prompt(30)
    sealed = offered(a, prompt)
    resume(b, prompt, a.tokens("offer"), source(sealed, "a@1", marks=KVMarks(num_exact_tokens=0)))
    longer = prompt + random_prompt(90)
    b.add(longer, "again", prefill_only=True, offer_id="again")
    order = BeginPush(
        transfer_id="t", offer_id="again", peer_id="c@1", first_block=2, targets=[list(range(len(longer) // BLOCK - 2))]
    )
    if is_sealed:
        b.run()
    b.send(order)
    b.run()
    reports = [each for output in b.outputs for each in output.pushes]
    assert [(each.ended, each.reason, each.num_blocks) for each in reports] == [(True, ROUNDED, 0)]


def test_an_offer_from_before_a_reset_is_not_pushed_after_it() -> None:
    """Only prompts that were still computed were looked at."""
    [a] = chain("a@1")
    prompt = random_prompt(30)
    offered(a, prompt)
    a.scheduler.reset_prefix_cache()
    order = BeginPush(transfer_id="t", offer_id="offer", peer_id="b@1", first_block=0, targets=[[0, 1, 2]])
    a.run(order)
    [report] = [each for output in a.outputs for each in output.pushes]
    assert (report.ended, report.reason) == (True, RESET)
    assert not [each for output in a.outputs for each in output.pushes if each.num_bytes]
    # What is computed from then on may go out again.
    a.send(ReleaseOffer(offer_id="offer"))
    offered(a, prompt, "later")
    a.run(msgspec.structs.replace(order, transfer_id="u", offer_id="later"))
    report = [each for output in a.outputs for each in output.pushes][-1]
    assert (report.transfer_id, report.reason) == ("u", "peer_lost")
    a.send(ReleaseOffer(offer_id="later"))
    a.run()
    assert not a.scheduler.remote.pushing._past


@pytest.mark.parametrize("who", ["owner", "consumer", "nobody"])
def test_what_is_from_before_a_reset_is_of_use_to_its_request_only(who: str) -> None:
    """The offer outlives the reset, and its consumer's prefix cache served it to whoever came next."""
    a, b, c = chain("a@1", "b@1", "c@1")
    prompt = random_prompt(30)
    sealed = offered(a, prompt)
    from_ = source(sealed, "a@1", num_resets=0)
    if who == "owner":
        # As the offer table says once the owner's cache is emptied.
        from_ = msgspec.structs.replace(from_, marks=KVMarks(before_reset=True))
    elif who == "consumer":
        # After the owner's answer, and before it has come to the core.
        b.scheduler.reset_prefix_cache()
    resume(b, prompt, a.tokens("offer"), from_)
    assert is_cached(b, prompt) == (who == "nobody")
    assert bool(told(b)) == (who == "nobody")
    if who == "owner":
        # A leg of the same request that is handed on from here keeps it in mind.
        onward = offered(b, prompt, "onward", source=msgspec.structs.replace(from_, transfer_id="more"))
        a_again = source(onward, "b@1")
        assert onward.marks.before_reset
        resume(c, prompt, b.tokens("onward"), a_again)
        assert not is_cached(c, prompt)
