"""Blocks and names of sequences: where several groups can go on, what windows need no block for, what a reset leaves unnamed,
and what events say of it."""

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_events import KVEventLog
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.plan import NO_BLOCK, NO_TOKEN, StepResult
from pdmesh.engine.request import Request, Sequence
from pdmesh.engine.scheduler import Scheduler
from pdmesh.protocol.messages import GroupBlocks, KVSource
from support.core_harness import make_add

NEXT = 5
BLOCK = 4


class Manager:
    """A KVManager with its pool and its names within reach."""

    def __init__(self, *windows: int, num_blocks: int = 100, with_events: bool = False) -> None:
        self.groups = [KVGroup(BLOCK, "sliding" if window else "full", window) for window in windows]
        self.events = KVEventLog(self.groups) if with_events else None
        self.pool = BlockPool(num_blocks, len(windows), events=self.events)
        self.hasher = BlockHasher("sha256", "", BLOCK)
        self.kv = KVManager(self.groups, self.pool, self.hasher, max_chunk_tokens=20, events=self.events)

    def sequence(self, num_tokens: int) -> Sequence:
        return Request(make_add(list(range(10, 10 + num_tokens))), 1, len(self.groups)).lead

    def name(self, sequence: Sequence, cached: list[list[bool]]) -> None:
        """Name a block in each group for each of the sequence's places that is `cached` there."""
        keys: list[bytes] = []
        self.hasher.extend(keys, sequence.tokens.view(0, sequence.num_tokens))
        for group, row in enumerate(cached):
            for place, is_cached in enumerate(row):
                if is_cached:
                    [block_id] = self.pool.allocate(1)
                    assert self.pool.register(group, block_id, keys[place])

    def scheduler(self, **limits: int) -> Scheduler:
        values = {"max_num_batched_tokens": 20, "max_num_seqs": 8, "max_model_len": 200} | limits
        return Scheduler(self.kv, Limits(vocab_size=1000, eos_token_ids=frozenset({1}), **values))


def step(scheduler: Scheduler) -> dict[str, int]:
    schedule = scheduler.schedule()
    if schedule.sequences:
        tokens = [NEXT if is_sampled else NO_TOKEN for is_sampled in schedule.plan.samples]
        scheduler.update(schedule, StepResult(token_ids=tokens))
    scheduler.state.check_integrity()
    ids = [sequence.request.request_id for sequence in schedule.sequences]
    return dict(zip(ids, schedule.plan.counts, strict=True))


# ---- hits ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 4, 6, 12]), min_size=1, max_size=3),
    st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=3, max_size=3),
)
# The full group ends the hit where the sliding one, asked before it, has a hole.
@example([6, 0], [[True, False, False, True, True, True, True, True], [True] * 3 + [False] * 5, []])
def test_a_hit_is_the_longest_behind_which_every_group_can_go_on(windows: list[int], cached: list[list[bool]]) -> None:
    manager = Manager(*windows)
    cached = cached[: len(windows)]
    # The ninth block's only token is the one that is always computed.
    sequence = manager.sequence(33)
    manager.name(sequence, cached)
    fitting = [
        end
        for end in range(9)
        if all(
            all(row[group.first_needed(end * BLOCK) : end]) for group, row in zip(manager.groups, cached, strict=True)
        )
    ]
    hit = manager.kv.lookup(sequence)
    assert hit.num_tokens == max(fitting) * BLOCK
    assert {len(table) for table in hit.blocks} == {max(fitting)}


def test_a_further_choice_begins_with_the_names_of_what_it_shares() -> None:
    scheduler = Manager(0).scheduler()
    scheduler.add(make_add(list(range(10, 20)), "a", n=2, max_tokens=4))
    step(scheduler)
    lead, taker = scheduler.state.requests["a"].sequences.values()
    assert (taker.keys, taker.num_registered) == (lead.keys[:2], 2)
    assert taker.blocks[0][:2] == lead.blocks[0][:2]


# ---- windows -------------------------------------------------------------------------------------


def test_fetched_kv_takes_no_block_that_no_query_behind_it_reads() -> None:
    scheduler = Manager(0, 6).scheduler()
    groups = [
        GroupBlocks(group=0, block_ids=[0, 1, 2, 3], generations=[1] * 4),
        GroupBlocks(group=1, block_ids=[6, 7], generations=[1] * 2, first_block=2),
    ]
    source = KVSource(transfer_id="t", peer_id="p@1", groups=groups, num_tokens=16)
    scheduler.add(make_add(list(range(10, 26)), "a", emitted=[[NEXT]], source=source))
    step(scheduler)
    [sequence] = scheduler.state.requests["a"].sequences.values()
    # The query at 16 reads from 11 on.
    assert [block_id == NO_BLOCK for block_id in sequence.blocks[1]] == [True, True, False, False]
    assert scheduler.state.kv.num_used == 6
    [pull] = scheduler.state.outbox.pulls
    assert pull.source_block_ids == [0, 1, 2, 3, 6, 7]
    assert pull.target_block_ids == sequence.blocks[0] + sequence.blocks[1][2:]


# ---- resets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_what_rests_on_forgotten_kv_is_never_found(is_taken_over: bool) -> None:
    """Not even when another has computed what it rests on anew, and named it; nor by way of a choice that started later."""
    scheduler = Manager(0).scheduler()
    prompt = list(range(10, 40))
    scheduler.add(make_add(prompt, "a", n=2, max_tokens=6))
    assert step(scheduler) == {"a": 20}
    scheduler.reset_prefix_cache()
    if is_taken_over:
        # The other choice goes on with the first twenty tokens.
        scheduler.abort("a", 0)
    for _ in range(8):
        step(scheduler)
    assert not scheduler.state.requests
    scheduler.add(make_add(prompt[:20], "b", max_tokens=1))
    assert step(scheduler) == {"b": 20}
    scheduler.add(make_add(prompt, "c", max_tokens=1))
    assert step(scheduler) == {"c": 10}


# ---- events --------------------------------------------------------------------------------------


def test_each_stored_event_names_the_block_before_it() -> None:
    manager = Manager(0, 6, with_events=True)
    scheduler = manager.scheduler(max_num_batched_tokens=8)
    prompt = list(range(10, 26))
    scheduler.add(make_add(prompt, "a", max_tokens=1))
    for _ in range(2):
        step(scheduler)
    assert manager.events is not None
    _, events, _ = msgspec.msgpack.decode(manager.events.take())
    keys: list[bytes] = []
    manager.hasher.extend(keys, Manager(0).sequence(16).tokens.view(0, 16))
    names = [int.from_bytes(key[-8:], "big") for key in keys]
    told = [(each["group_idx"], each["parent_block_hash"], each["block_hashes"], each["token_ids"]) for each in events]
    assert told == [
        (0, None, names[:2], prompt[:8]),
        (1, None, names[:2], prompt[:8]),
        (0, names[1], names[2:], prompt[8:]),
        (1, names[1], names[2:], prompt[8:]),
    ]
