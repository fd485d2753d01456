"""Who gets tokens in a step: the order, the limits, and what happens when blocks run out."""

import pytest

from pdmesh.connector.base import PullResult
from pdmesh.engine.limits import Limits
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_manager import KVGroup, KVManager
from pdmesh.engine.progress import RowResult
from pdmesh.engine.scheduler import Schedule, Scheduler
from pdmesh.engine.states import FINISH_REASON, TRANSITIONS, Event, State, after
from pdmesh.protocol.messages import GroupBlocks, KVSource
from support.core_harness import make_add

NEXT = 5


def make_scheduler(num_blocks: int = 100, **limits: int) -> Scheduler:
    group = KVGroup(blocks=BlockPool(num_blocks), block_size=4, root=b"r" * 32)
    values = {"max_num_batched_tokens": 20, "max_num_seqs": 8, "max_model_len": num_blocks * 4} | limits
    return Scheduler(
        KVManager([group], enable_prefix_caching=True),
        Limits(vocab_size=1000, eos_token_ids=frozenset({1}), **values),
    )


def add(scheduler: Scheduler, request_id: str, length: int, **options: object) -> None:
    # Prompts that share nothing.
    first = 10 + 100 * (ord(request_id[-1]) % 9)
    scheduler.add(make_add([first + index % 90 for index in range(length)], request_id, **options))


def shares(schedule: Schedule) -> dict[str, int]:
    return {row.sequence.request.request_id: row.num_tokens for row in schedule.rows}


def step(scheduler: Scheduler) -> dict[str, int]:
    schedule = scheduler.schedule()
    given = shares(schedule)
    scheduler.update(schedule, [RowResult(token_id=NEXT) if row.needs_token else RowResult() for row in schedule.rows])
    scheduler.state.check_integrity()
    return given


def test_running_sequences_go_first_and_the_rest_of_the_budget_is_for_prompts() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 6)
    add(scheduler, "b", 30)
    assert step(scheduler) == {"a": 6, "b": 14}
    add(scheduler, "c", 5)
    assert step(scheduler) == {"a": 1, "b": 16, "c": 3}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 2}


def test_a_long_prompt_leaves_room_for_others_under_the_threshold() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8)
    add(scheduler, "a", 30)
    add(scheduler, "b", 30)
    assert step(scheduler) == {"a": 8, "b": 8}


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        add(scheduler, request_id, 3, max_tokens=2)
    assert step(scheduler) == {"a": 3, "b": 3}
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"c": 3}


def test_the_first_in_line_is_not_overtaken_when_it_lacks_room() -> None:
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 13)
    add(scheduler, "b", 8)
    add(scheduler, "c", 1, max_tokens=1)
    # One block is free: c would fit, but it is not its turn.
    assert step(scheduler) == {"a": 13}
    assert step(scheduler) == {"a": 1}
    scheduler.abort("b")
    assert step(scheduler) == {"a": 1, "c": 1}


def test_the_watermark_keeps_blocks_for_those_who_run() -> None:
    scheduler = make_scheduler(num_blocks=6, watermark_blocks=3)
    # Alone it may use all.
    add(scheduler, "a", 12)
    assert step(scheduler) == {"a": 12}
    add(scheduler, "b", 4)
    assert step(scheduler) == {"a": 1}
    scheduler.abort("a")
    assert step(scheduler) == {"b": 4}


def test_the_last_arrived_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=6)
    for request_id in ("a", "b", "c"):
        add(scheduler, request_id, 8, max_tokens=8)
    add(scheduler, "d", 4)
    assert step(scheduler) == {"a": 8, "b": 8, "c": 4}
    # a and b need a third block each: c gives its own away, and nobody is admitted in such a step.
    assert step(scheduler) == {"a": 1, "b": 1}
    [c, d] = list(scheduler.state.waiting)
    assert (c.request.request_id, c.state, c.num_computed) == ("c", State.PREEMPTED, 0)
    assert d.state is State.WAITING
    for _ in range(60):
        step(scheduler)
    assert not scheduler.state.requests


def test_fetched_kv_of_later_arrivals_makes_way_when_nothing_else_runs() -> None:
    scheduler = make_scheduler(num_blocks=8)
    for request_id in ("a", "b"):
        blocks = GroupBlocks(group=0, block_ids=[0, 1, 2, 3], generations=[1] * 4)
        source = KVSource(transfer_id=request_id, peer_id="p@1", groups=[blocks], num_tokens=16)
        add(scheduler, request_id, 16, emitted=[[NEXT]], max_tokens=9, source=source)
    assert not scheduler.schedule().rows
    for transfer_id in ("b", "a"):
        scheduler.end_pull(PullResult(transfer_id=transfer_id, reason="", num_bytes=1, duration_s=0.0), "shm")
    assert step(scheduler) == {"a": 1}
    for _ in range(60):
        step(scheduler)
    assert not scheduler.state.requests
    assert scheduler.state.kv.num_used == 0


def test_a_pull_that_finds_no_room_waits_for_it() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, "a", 16, max_tokens=2)
    assert step(scheduler) == {"a": 16}
    blocks = GroupBlocks(group=0, block_ids=[0, 1, 2], generations=[1] * 3)
    source = KVSource(transfer_id="t", peer_id="p@1", groups=[blocks], num_tokens=12)
    add(scheduler, "b", 12, emitted=[[NEXT]], source=source)
    scheduler.schedule()
    assert not scheduler.state.outbox.pulls
    scheduler.abort("a")
    scheduler.schedule()
    assert [pull.transfer_id for pull in scheduler.state.outbox.pulls] == ["t"]


def test_every_live_state_can_be_aborted_and_no_final_one_goes_on() -> None:
    for state in State:
        if state in FINISH_REASON:
            assert not [pair for pair in TRANSITIONS if pair[0] is state]
        else:
            assert after(state, Event.ABORTED) is State.FINISHED_ABORTED


def test_an_event_that_cannot_happen_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="PREEMPTED cannot happen to a sequence that is FINISHED_STOPPED"):
        after(State.FINISHED_STOPPED, Event.PREEMPTED)
