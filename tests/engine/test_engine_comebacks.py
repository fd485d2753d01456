"""Preempted sequences come back by each of their ways with the tokens that they would have had, over the real shm connector."""

from __future__ import annotations

import select
from dataclasses import dataclass, field

import pytest

from pdmesh.connector.shm import ShmConnector
from pdmesh.engine.messages import (
    Abort,
    BlocksComputed,
    NeedsSource,
    OfferSealed,
    SetSource,
    TransferEnded,
)
from pdmesh.protocol.messages import GroupBlocks, KVSource
from pdmesh.security import MeshSecret
from support.core_harness import CoreHarness, make_add
from support.fake_backend import expected_tokens

SECRET = MeshSecret("x" * 32)
A, B = [2 + index % 50 for index in range(30)], [3 + (7 * index) % 50 for index in range(30)]
NUM_TOKENS = 24
# Two such requests do not fit at once: 54 tokens of each are 14 blocks.
NUM_BLOCKS = 20


def make_core(peer_id: str, **options: object) -> CoreHarness:
    values: dict[str, object] = {"num_blocks": NUM_BLOCKS, "max_model_len": 80, "refetch_min_tokens": 6}
    return CoreHarness(connectors={"shm": ShmConnector(peer_id, SECRET)}, **(values | options))  # type: ignore[arg-type]


@dataclass
class Server:
    """Answers a core's questions from what an owner's core holds."""

    decode: CoreHarness
    owner: CoreHarness
    answers: list[str]
    """Kinds, in order; "none" when there are no more."""
    sealed: OfferSealed | None = None
    asked: list[NeedsSource] = field(default_factory=list)
    stale: bool = False

    def serve(self) -> None:
        """Let decode run to its end."""
        num_seen = 0
        for _ in range(200):
            self.decode.run()
            needs = [need for output in self.decode.outputs for need in output.needs]
            for need in needs[num_seen:]:
                self.asked.append(need)
                kind = self.answers.pop(0) if self.answers else "none"
                source = None if kind == "none" else self.source(f"t-{len(self.asked)}")
                told = kind if source is not None else ""
                self.decode.send(SetSource(request_id=need.request_id, choice=need.choice, source=source, kind=told))
            if len(needs) == num_seen and not self.decode.scheduler.state.requests:
                return
            num_seen = len(needs)
            select.select(self.decode.links.descriptors, [], [], 0.02)
        raise AssertionError("the requests did not end")

    def source(self, transfer_id: str) -> KVSource:
        assert self.sealed is not None
        groups = self.sealed.groups
        if self.stale:
            groups = [GroupBlocks(**{**_fields(each), "generations": [0 for _ in each.generations]}) for each in groups]
        return KVSource(
            transfer_id=transfer_id, peer_id="p@1", groups=groups, num_tokens=self.sealed.num_tokens, fail_policy="fail"
        )


def _fields(blocks: GroupBlocks) -> dict[str, object]:
    return {name: getattr(blocks, name) for name in GroupBlocks.__struct_fields__}


def pair(answers: list[str], *, prompt: list[int] = B, emitted: int = 0, **options: object) -> Server:
    """A decode, and an owner that has computed `prompt` and the first `emitted` tokens after it for an offer."""
    decode, owner = make_core("d@1", **options), make_core("p@1", num_blocks=64)
    decode.reach(owner, "p@1")
    before = [expected_tokens(prompt, emitted)] if emitted else []
    owner.add(prompt, prefill_only=True, offer_id="offer", emitted=before, max_tokens=NUM_TOKENS)
    owner.run()
    [sealed] = owner.sealed
    return Server(decode, owner, answers, sealed)


def crowd(server: Server) -> None:
    """Two requests of which one must give way, with the prefix cache too small to keep what it loses."""
    for request_id, prompt in (("a", A), ("b", B)):
        server.decode.add(prompt, request_id, max_tokens=NUM_TOKENS, may_refetch=True, store_to_tier=True)


def sources(server: Server, request_id: str = "b") -> list[str]:
    return [each.kv_source for each in server.decode.deltas_of(request_id) if each.kv_source.startswith("preempted:")]


def check(server: Server) -> None:
    for request_id, prompt in (("a", A), ("b", B)):
        assert server.decode.tokens(request_id) == expected_tokens(prompt, NUM_TOKENS)
    assert server.decode.num_used == 0
    assert server.decode.scheduler.state.counters.num_preemptions > 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("answers", "way"), [(["offer"], "offer"), (["tier"], "tier"), ([], "recompute"), (["none", "none"], "recompute")]
)
def test_it_comes_back_by_what_the_server_finds(answers: list[str], way: str, is_async: bool) -> None:
    # What was fetched may be taken back before it runs: then it is looked for again.
    server = pair(answers * 10, is_async=is_async)
    crowd(server)
    server.serve()
    check(server)
    assert sources(server)[0] == f"preempted:{way}"
    assert server.asked[0].request_id == "b"
    counters = server.decode.scheduler.state.counters
    assert counters.external_hits == counters.external_queries
    assert (counters.external_hits > 0) == (way != "recompute")


def test_a_source_that_fails_leaves_the_next_and_then_computing() -> None:
    """Under the policy `fail` too, since nothing is lost that cannot be computed."""
    server = pair(["tier", "offer"])
    server.stale = True
    crowd(server)
    server.serve()
    check(server)
    assert [each.after for each in server.asked[:3]] == ["", "tier", "offer"]
    assert sources(server)[0] == "preempted:recompute"
    ended = server.decode.transfers
    assert [(each.committed, each.reason) for each in ended] == [(False, "stale")] * 2


def test_what_is_still_here_is_used_without_a_question() -> None:
    server = pair([], num_blocks=26)
    crowd(server)
    server.serve()
    check(server)
    assert server.asked == []
    assert sources(server) == ["preempted:local"]


def test_one_that_ends_while_the_server_looks_takes_its_source_along() -> None:
    server = pair([])
    crowd(server)
    while not (needs := [need for output in server.decode.outputs for need in output.needs]):
        server.decode.run()
        server.decode.step()
    server.decode.run(Abort(request_id="b"))
    assert server.decode.finish_reason("b") == "abort"
    [need] = needs
    server.decode.run(
        SetSource(request_id=need.request_id, choice=need.choice, source=server.source("late"), kind="offer")
    )
    ended = server.decode.transfers
    assert ended == [
        TransferEnded(transfer_id="late", peer_id="p@1", request_id="b", committed=False, reason="aborted")
    ]
    assert server.decode.tokens("a") == expected_tokens(A, NUM_TOKENS)


def test_computing_again_is_cut_so_that_others_do_not_stand_still() -> None:
    server = pair([], num_blocks=24, preempted_chunk_tokens=4, enable_prefix_caching=False)
    server.decode.add(A, "a", max_tokens=NUM_TOKENS)
    server.decode.add(A[:4], "c", max_tokens=60)
    server.decode.add(B, "b", max_tokens=NUM_TOKENS)
    state, longest = server.decode.scheduler.state, 0
    server.decode._inbox.messages, messages = [], server.decode._inbox.messages
    for message in messages:
        server.decode._core._handle(message)
    for _ in range(300):
        schedule = server.decode.scheduler.schedule()
        for need in state.take_outbox().needs:
            server.decode.scheduler.comebacks.answer(SetSource(request_id=need.request_id, choice=need.choice))
        if state.counters.num_preemptions and len(schedule.sequences) > 1:
            longest = max(longest, *schedule.plan.counts)
        if schedule.sequences:
            server.decode.scheduler.update(schedule, server.decode.runner.run(schedule.plan))
    assert not state.requests
    assert 1 < longest <= 4


@pytest.mark.parametrize("is_doubted", [True, False])
def test_one_whose_tokens_are_in_doubt_draws_them_again_itself(is_doubted: bool) -> None:
    """It could be handed back to the proxy, which knew of no doubt, and have others go on behind a wrong token."""
    core = make_core("d@1", max_num_batched_tokens=8)
    first = expected_tokens(B, 1)
    core.scheduler.add(make_add(B, emitted=[[first[0] ^ is_doubted]], may_refetch=True, max_tokens=NUM_TOKENS))
    state = core.scheduler.state
    lead = state.requests["r"].lead
    if is_doubted:
        # As when its pull has come back damaged.
        state.waiting.remove(lead)
        lead.doubt(len(B))
        state.waiting.push(lead)
    core.step()
    state.preempt(lead)
    core.run()
    assert len([need for output in core.outputs for need in output.needs]) == (not is_doubted)
    if is_doubted:
        [delta] = core.deltas_of()
        assert (delta.error_code, delta.token_ids) == ("DamagedKV", [])


def test_the_tier_is_told_of_computed_fetched_and_generated_blocks_while_they_are_held() -> None:
    """It knew prompts that were computed here, and nothing of what a decode engine holds."""
    server = pair([], spill_usage=0.0)
    decode = server.decode
    decode.add(
        B, "b", max_tokens=NUM_TOKENS, emitted=[expected_tokens(B, 1)], source=server.source("t"), store_to_tier=True
    )
    server.serve()
    told: list[BlocksComputed] = decode.computed
    keys = [key for each in told for key in each.keys]
    # 30 + 23 tokens have KV: 13 full blocks; those of the last lump may wait for a preemption.
    assert 8 <= len(keys) <= 13
    assert len(set(keys)) == len(keys)
    # What later ones rest on may be damaged by then: the names of those were told as if it could not.
    assert len(told) > 1
    before: list[int] = []
    for each in told:
        assert [block_id for group in each.reused for block_id in group.block_ids] == before
        before += each.blocks.block_ids


@pytest.mark.parametrize("num_steps", [1, 12])
def test_what_was_there_before_the_cache_was_emptied_is_not_for_the_tier(num_steps: int) -> None:
    """In the midst of the prompt, or of the output: what is behind the reset rests on what is before it."""
    decode = make_core("d@1", max_num_batched_tokens=8, spill_usage=0.0)
    decode.add(B, max_tokens=NUM_TOKENS, store_to_tier=True)
    for message in decode._inbox.drain():
        decode._core._handle(message)
    for _ in range(num_steps):
        decode.step()
    num_told = len(decode.scheduler.state.outbox.computed)
    assert bool(num_told) == (num_steps > 4)
    decode.scheduler.reset_prefix_cache()
    decode.run()
    assert decode.tokens() == expected_tokens(B, NUM_TOKENS)
    assert len(decode.computed) == num_told


@pytest.mark.parametrize("emitted", [1, 5, 10])
def test_an_offer_of_prompt_and_tokens_is_fetched_whole(emitted: int) -> None:
    server = pair([], emitted=emitted)
    assert server.sealed is not None
    assert server.sealed.num_tokens == len(B) + emitted
    before = expected_tokens(B, emitted + 1)
    assert server.owner.tokens() == before[-1:]
    server.decode.add(B, "b", max_tokens=NUM_TOKENS, emitted=[before], source=server.source("t"))
    server.serve()
    assert before + server.decode.tokens("b") == expected_tokens(B, NUM_TOKENS)
    first = server.decode.deltas_of("b")[0]
    assert (first.kv_source, first.cached_tokens) == ("shm", len(B))
    assert server.decode.outputs[-1].stats is not None
    # Only the token that prefill sampled had no KV there.
    assert server.decode.scheduler.state.counters.external_hits == len(B) + emitted
