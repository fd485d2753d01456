"""Who is admitted, who waits, and who is tried again: one test for each condition of the scheduler's two loops."""

import pytest

from pdmesh.connector.base import PullResult
from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.kv_manager import Hit, KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.plan import NO_TOKEN, StepResult
from pdmesh.engine.request import Sequence
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.scheduler import Scheduler
from pdmesh.engine.states import State
from pdmesh.protocol.messages import GroupBlocks, KVSource
from support.core_harness import make_add

NEXT = 5


def make_scheduler(num_blocks: int = 100, **limits: float) -> Scheduler:
    values = {"max_num_batched_tokens": 20, "max_num_seqs": 8, "max_model_len": num_blocks * 4} | limits
    hasher = BlockHasher("sha256", "", 4)
    kv = KVManager(
        [KVGroup(4)], BlockPool(num_blocks, 1), hasher, max_chunk_tokens=int(values["max_num_batched_tokens"])
    )
    return Scheduler(kv, Limits(vocab_size=1000, eos_token_ids=frozenset({1}), **values))


def prompt_of(name: str, length: int) -> list[int]:
    """Prompts of different names share nothing."""
    return [10 + 100 * (ord(name) % 9) + index % 90 for index in range(length)]


def add(scheduler: Scheduler, request_id: str, length: int, **options: object) -> None:
    scheduler.add(make_add(prompt_of(request_id, length), request_id, **options))


def fetch(scheduler: Scheduler, request_id: str, num_tokens: int, **options: object) -> None:
    """Add a request whose prompt a peer has computed."""
    num_blocks = -(-num_tokens // 4)
    blocks = GroupBlocks(group=0, block_ids=list(range(num_blocks)), generations=[1] * num_blocks)
    source = KVSource(transfer_id=request_id, peer_id="p@1", groups=[blocks], num_tokens=num_tokens)
    add(scheduler, request_id, num_tokens, emitted=[[NEXT]], source=source, **options)


def end_pull(scheduler: Scheduler, transfer_id: str) -> None:
    scheduler.end_pull(PullResult(transfer_id=transfer_id, reason="", num_bytes=1, duration_s=0.0), "shm")


def shares(schedule: Schedule) -> dict[str, int]:
    ids = [sequence.request.request_id for sequence in schedule.sequences]
    return dict(zip(ids, schedule.plan.counts, strict=True))


def update(scheduler: Scheduler, schedule: Schedule) -> None:
    tokens = [NEXT if is_sampled else NO_TOKEN for is_sampled in schedule.plan.samples]
    scheduler.update(schedule, StepResult(token_ids=tokens))


def step(scheduler: Scheduler) -> dict[str, int]:
    schedule = scheduler.schedule()
    if schedule.sequences:
        update(scheduler, schedule)
    scheduler.state.check_integrity()
    return shares(schedule)


def test_further_choices_start_beside_a_long_prompt_that_came_later() -> None:
    """They waited for all of it, although they come first: nothing of the budget was left for who holds KV and waits."""
    scheduler = make_scheduler()
    add(scheduler, "b", 8, n=3, temperature=1.0, prefill_only=True)
    add(scheduler, "a", 200)
    assert step(scheduler) == {"b": 8, "a": 12}
    assert step(scheduler) == {"a": 19, "b": 1}
    assert step(scheduler) == {"a": 19, "b": 1}
    assert step(scheduler) == {"a": 20}


def test_nothing_is_kept_for_who_could_not_run_anyhow() -> None:
    scheduler = make_scheduler(max_num_active_seqs=2)
    add(scheduler, "b", 8, n=2, temperature=1.0, max_tokens=50)
    add(scheduler, "a", 200)
    assert step(scheduler) == {"b": 8, "a": 12}
    assert scheduler.state.waiting.num_holding == 1
    assert step(scheduler) == {"b": 1, "a": 19}


# ---- admission -----------------------------------------------------------------------------------


def test_nobody_is_admitted_in_a_step_that_took_blocks_away() -> None:
    """Not even who comes before the preempted one and has room: the blocks are for those who run."""
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2, by_priority=True)
    for request_id in ("a", "b"):
        add(scheduler, request_id, 8, priority=1, max_tokens=8)
    assert step(scheduler) == {"a": 8, "b": 8}
    add(scheduler, "c", 3, priority=0, max_tokens=1)
    assert step(scheduler) == {"a": 1}
    assert scheduler.state.counters.num_preemptions == 1
    assert step(scheduler) == {"a": 1, "c": 3}


def test_a_fetch_begins_in_a_step_that_has_no_tokens_left() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 60)
    step(scheduler)
    fetch(scheduler, "b", 8)
    add(scheduler, "c", 8)
    assert step(scheduler) == {"a": 20}
    assert [pull.transfer_id for pull in scheduler.state.outbox.pulls] == ["b"]


def test_who_is_alone_may_take_the_blocks_that_the_watermark_keeps() -> None:
    scheduler = make_scheduler(num_blocks=6, watermark_blocks=3)
    add(scheduler, "a", 16)
    assert step(scheduler) == {"a": 16}


@pytest.mark.parametrize(("watermark_blocks", "num_shared"), [(2, 5), (3, 4)])
def test_the_watermark_holds_for_the_block_that_a_further_choice_copies(watermark_blocks: int, num_shared: int) -> None:
    scheduler = make_scheduler(num_blocks=5, watermark_blocks=watermark_blocks)
    add(scheduler, "a", 6, n=2, max_tokens=2)
    step(scheduler)
    # Three blocks are free. Without the copy the further choice begins behind its last full block.
    assert scheduler.state.requests["a"].sequences[1].num_computed == num_shared


def test_a_prompt_with_one_token_left_is_a_partial_one() -> None:
    """Once, it passed for one that generates."""
    scheduler = make_scheduler(long_prefill_token_threshold=8, max_num_partial_prefills=1)
    for request_id in ("a", "b", "c"):
        add(scheduler, request_id, 9)
    assert step(scheduler) == {"a": 8}
    assert step(scheduler) == {"a": 1, "b": 8}


# ---- the head that has no room -------------------------------------------------------------------


def test_a_head_without_room_is_looked_up_again_only_when_a_block_came_free(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_blocks=6)
    looked_up: list[str] = []
    lookup = scheduler.state.kv.lookup

    def counted(sequence: Sequence) -> Hit:
        looked_up.append(sequence.request.request_id)
        return lookup(sequence)

    monkeypatch.setattr(scheduler.state.kv, "lookup", counted)
    for request_id in ("a", "b"):
        add(scheduler, request_id, 5, max_tokens=9)
    add(scheduler, "c", 12, max_tokens=1)
    for _ in range(3):
        assert "c" not in step(scheduler)
    assert looked_up.count("c") == 1
    scheduler.abort("b")
    # a goes on beside it.
    assert step(scheduler) == {"a": 1, "c": 12}


def test_a_head_without_room_is_tried_again_when_nothing_runs_any_more() -> None:
    """No block came free, but who is alone is not bound by the watermark."""
    scheduler = make_scheduler(num_blocks=6, watermark_blocks=3)
    add(scheduler, "a", 12, prefill_only=True, offer_id="o")
    add(scheduler, "b", 4)
    assert step(scheduler) == {"a": 12}
    assert scheduler.state.kv.num_free == 3
    assert step(scheduler) == {"b": 4}


def test_fetched_kv_that_made_way_is_computed_and_says_so() -> None:
    scheduler = make_scheduler(num_blocks=8)
    for request_id in ("a", "b"):
        fetch(scheduler, request_id, 16, max_tokens=9)
    scheduler.schedule()
    for transfer_id in ("a", "b"):
        end_pull(scheduler, transfer_id)
    for _ in range(60):
        step(scheduler)
    sources = {delta.request_id: delta.kv_source for delta in reversed(scheduler.state.outbox.deltas)}
    assert sources == {"a": "shm", "b": "preempted:recompute"}


# ---- planning ahead ------------------------------------------------------------------------------


def test_nothing_is_planned_behind_the_last_token_though_its_block_has_room() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5, max_tokens=2)
    assert [shares(scheduler.schedule()) for _ in range(3)] == [{"a": 5}, {"a": 1}, {}]


def test_nothing_is_planned_behind_the_token_of_a_prompt_for_elsewhere() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 5, prefill_only=True, offer_id="o", max_tokens=9)
    assert [shares(scheduler.schedule()) for _ in range(2)] == [{"a": 5}, {}]


def test_freed_rows_are_told_once() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_tokens=1)
    first = scheduler.schedule()
    update(scheduler, first)
    add(scheduler, "b", 3, max_tokens=2)
    second = scheduler.schedule()
    assert (first.plan.freed, second.plan.freed) == ([], first.plan.rows)
    update(scheduler, second)
    assert scheduler.schedule().plan.freed == []


# ---- ends ----------------------------------------------------------------------------------------


def test_all_choices_end_at_once_and_none_takes_the_prompt_over_on_its_way_out() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 30, n=3)
    step(scheduler)
    scheduler.abort("a")
    deltas = scheduler.state.outbox.deltas
    assert {delta.choice: delta.cached_tokens for delta in deltas} == {0: 0, 1: 0, 2: 0}
    assert {delta.finish_reason for delta in deltas} == {"abort"}


def test_what_a_failed_request_computed_is_not_found_any_more() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 8)
    step(scheduler)
    scheduler.fail(scheduler.schedule(), "the device is on fire")
    scheduler.add(make_add([*prompt_of("a", 8), 7], "b"))
    assert step(scheduler) == {"b": 9}


def test_who_waits_for_a_copy_of_a_failed_step_computes_it() -> None:
    scheduler = make_scheduler(max_num_active_seqs=2)
    fetch(scheduler, "c", 8)
    add(scheduler, "a", 7, n=2, max_tokens=1)
    add(scheduler, "b", 60)
    assert step(scheduler) == {"a": 7, "b": 13}
    end_pull(scheduler, "c")
    failing = scheduler.schedule()
    # The copy for the second choice is made in a step that has no place for it.
    assert (shares(failing), len(failing.plan.copies)) == ({"b": 19, "c": 1}, 1)
    [waiting] = scheduler.state.waiting
    scheduler.fail(failing, "the device is on fire")
    assert (waiting.state, waiting.num_computed) == (State.PREEMPTED, 0)
    # The prompt's first block was full before.
    assert step(scheduler) == {"a": 3}
    assert scheduler.state.outbox.deltas[-1].finish_reason == "length"


def test_blocks_of_a_step_under_way_are_not_safe_when_the_result_before_it_could_not_be_taken_in() -> None:
    """Its rows were counted out twice, and their blocks given to pulls while the second step still wrote to them."""
    scheduler = make_scheduler()
    add(scheduler, "a", 4, max_tokens=50)
    add(scheduler, "b", 4, max_tokens=50)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert shares(first).keys() == shares(second).keys() == {"a", "b"}
    sequences = list(first.sequences)
    broken = StepResult(token_ids=[NEXT])
    with pytest.raises(IndexError):
        scheduler.update(first, broken)
    scheduler.state.take_strays()
    scheduler.fail(first, "the engine failed in a step")
    assert [each.num_in_flight for each in sequences] == [1, 1]
    assert scheduler.state.take_strays()
    update(scheduler, second)
    assert [each.num_in_flight for each in sequences] == [0, 0]
    scheduler.state.check_integrity()


def test_a_step_loses_the_rows_of_a_request_that_met_a_bug_behind_them() -> None:
    scheduler = make_scheduler(num_blocks=9, max_model_len=24)
    add(scheduler, "b", 3, max_tokens=20)
    add(scheduler, "a", 3, n=2, max_tokens=20)
    for _ in range(20):
        *before, last = scheduler.state.running or [None]
        is_full = scheduler.state.kv.num_free == 0
        if last is not None and is_full and last.num_planned == last.capacity:
            assert all(each.num_planned < each.capacity for each in before)
            break
        step(scheduler)
    # The last one asks for a block when the others have their tokens; as if a defect had moved it before.
    last.state = State.WAITING_FOR_GRAMMAR
    schedule = scheduler.schedule()
    assert shares(schedule) == {"b": 1}
    assert schedule.plan.rows == [scheduler.state.running[0].row]
    assert len(schedule.plan.starts) == len(schedule.plan.samples) == 1
    update(scheduler, schedule)
    scheduler.state.check_integrity()
