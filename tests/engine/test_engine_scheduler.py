"""Who gets tokens in a step: the order, the limits, and what happens when blocks run out."""

import pytest

from pdmesh.connector.base import PullResult
from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.plan import NO_BLOCK, NO_TOKEN, StepResult
from pdmesh.engine.schedule import Schedule
from pdmesh.engine.scheduler import Scheduler
from pdmesh.engine.states import FINISH_REASON, TRANSITIONS, Event, IllegalEvent, State, after
from pdmesh.errors import EngineFault
from pdmesh.protocol.messages import GroupBlocks, KVSource, RepetitionDetection, TokenLogprobs
from support.core_harness import make_add

NEXT = 5
EOS = 1


def make_scheduler(num_blocks: int = 100, *, windows: tuple[int, ...] = (0,), **limits: float) -> Scheduler:
    groups = [KVGroup(4, "sliding" if window else "full", window) for window in windows]
    values = {"max_num_batched_tokens": 20, "max_num_seqs": 8, "max_model_len": num_blocks * 4} | limits
    kv = KVManager(
        groups,
        BlockPool(num_blocks, len(groups)),
        BlockHasher("sha256", "", 4),
        max_chunk_tokens=values["max_num_batched_tokens"],
    )
    return Scheduler(kv, Limits(vocab_size=1000, eos_token_ids=frozenset({EOS}), **values))


def add(scheduler: Scheduler, request_id: str, length: int, **options: object) -> None:
    # Prompts that share nothing.
    first = 10 + 100 * (ord(request_id[-1]) % 9)
    scheduler.add(make_add([first + index % 90 for index in range(length)], request_id, **options))


def shares(schedule: Schedule) -> dict[str, int]:
    ids = [sequence.request.request_id for sequence in schedule.sequences]
    return dict(zip(ids, schedule.plan.counts, strict=True))


def result_of(schedule: Schedule, token_id: int = NEXT) -> StepResult:
    return StepResult(token_ids=[token_id if is_sampled else NO_TOKEN for is_sampled in schedule.plan.samples])


def step(scheduler: Scheduler) -> dict[str, int]:
    schedule = scheduler.schedule()
    if schedule.sequences:
        scheduler.update(schedule, result_of(schedule))
    scheduler.state.check_integrity()
    return shares(schedule)


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
    assert not scheduler.schedule().sequences
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
    with pytest.raises(IllegalEvent, match="PREEMPTED cannot happen to a sequence that is FINISHED_STOPPED"):
        after(State.FINISHED_STOPPED, Event.PREEMPTED)


@pytest.mark.parametrize("wrong", list(State))
@pytest.mark.parametrize("when", ["waiting", "running", "under way"])
def test_a_bug_in_the_states_ends_one_request_and_the_others_go_on(wrong: State, when: str) -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4, n=2, max_tokens=4)
    add(scheduler, "b", 4, max_tokens=4)
    schedule = scheduler.schedule() if when != "waiting" else None
    if schedule is not None and when == "running":
        scheduler.update(schedule, result_of(schedule))
    # As if a defect had moved it without anybody noticing.
    for sequence in scheduler.state.requests["a"].sequences.values():
        sequence.state = wrong
    if schedule is not None and when == "under way":
        scheduler.update(schedule, result_of(schedule))
    for _ in range(12):
        planned = scheduler.schedule()
        if planned.sequences:
            scheduler.update(planned, result_of(planned))
    ends = {delta.request_id: delta.finish_reason for delta in scheduler.state.outbox.deltas if delta.finish_reason}
    assert ends["b"] == "length"
    if "a" not in ends or ends["a"] == "error":
        scheduler.abort("b")
        scheduler.fail_request("a", EngineFault("the test is over"))
    assert not scheduler.state.requests
    assert scheduler.state.kv.num_used == 0
    scheduler.state.check_integrity()


def test_a_step_is_planned_before_the_tokens_of_the_one_under_way_are_known() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 6, max_tokens=3)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert (second.plan.starts, second.plan.counts, second.plan.samples) == ([6], [1], [True])
    third = scheduler.schedule()
    assert third.plan.starts == [7]
    # The third token is the last: nothing is computed behind it.
    assert not scheduler.schedule().sequences
    for schedule in (first, second, third):
        scheduler.update(schedule, result_of(schedule))
    assert [delta.token_ids for delta in scheduler.state.outbox.deltas] == [[NEXT]] * 3
    assert scheduler.state.outbox.deltas[-1].finish_reason == "length"
    assert scheduler.state.kv.num_used == 0


def test_what_was_planned_behind_an_unforeseen_end_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_add([10, 11, 12], "a", max_tokens=9, ignore_eos=False))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, result_of(first, EOS))
    assert scheduler.state.kv.num_used == 0
    scheduler.update(second, result_of(second))
    assert [delta.token_ids for delta in scheduler.state.outbox.deltas] == [[EOS]]
    scheduler.state.check_integrity()


def test_a_token_that_was_under_way_at_its_preemption_is_kept() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    first = scheduler.schedule()
    [sequence] = first.sequences
    scheduler.state.preempt(sequence)
    # It must not start again while the step that holds its next token is under way.
    assert not scheduler.schedule().sequences
    scheduler.update(first, result_of(first))
    assert (sequence.num_tokens, sequence.num_computed, sequence.state) == (5, 0, State.PREEMPTED)
    assert step(scheduler) == {"a": 5}


def test_lower_priority_values_go_first_and_are_preempted_last() -> None:
    scheduler = make_scheduler(num_blocks=6, by_priority=True)
    add(scheduler, "a", 8, max_tokens=8, priority=1)
    assert step(scheduler) == {"a": 8}
    add(scheduler, "b", 4, max_tokens=8, priority=1)
    add(scheduler, "c", 4, max_tokens=8, priority=0)
    assert step(scheduler) == {"a": 1, "c": 4, "b": 4}
    preempted = []
    for _ in range(20):
        step(scheduler)
        preempted += [each.request.request_id for each in scheduler.state.waiting if each.state is State.PREEMPTED]
    assert preempted[0] == "b"
    assert "c" not in preempted


def test_waiting_outweighs_priority_with_aging(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pdmesh.engine.admission.time.monotonic", lambda: now)
    scheduler = make_scheduler(max_num_seqs=1, by_priority=True, priority_aging_s=10.0)
    add(scheduler, "a", 4, priority=2)
    now = 119.0
    add(scheduler, "b", 4, priority=0)
    now = 121.0
    add(scheduler, "c", 4, priority=0)
    order = [each.request.request_id for each in scheduler.state.waiting]
    assert order == ["b", "a", "c"]


def test_the_threshold_does_not_hold_back_a_request_that_is_alone() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8)
    add(scheduler, "a", 30)
    assert step(scheduler) == {"a": 20}


def test_the_adaptive_threshold_is_at_least_a_fair_share_of_the_budget() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=2, is_threshold_adaptive=True)
    add(scheduler, "a", 30)
    add(scheduler, "b", 30)
    assert step(scheduler) == {"a": 10, "b": 10}


def test_no_more_prompts_are_computed_in_part_than_allowed() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8, max_num_partial_prefills=1)
    add(scheduler, "a", 12)
    add(scheduler, "b", 12)
    assert step(scheduler) == {"a": 8}
    # a is complete now, so that another may be left incomplete.
    assert step(scheduler) == {"a": 4, "b": 8}


def test_fewer_sequences_may_be_active_than_there_are_rows() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_active_seqs=1)
    for request_id in ("a", "b"):
        add(scheduler, request_id, 3, max_tokens=1)
    assert step(scheduler) == {"a": 3}
    assert step(scheduler) == {"b": 3}


def test_a_prompt_starts_only_when_all_of_it_finds_room_beside_those_who_run() -> None:
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, "a", 12, max_tokens=3)
    add(scheduler, "b", 24, max_tokens=1)
    assert step(scheduler) == {"a": 12}, "b's first chunk would fit, its second would not"
    assert step(scheduler) == {"a": 1}
    assert step(scheduler) == {"a": 1}
    assert step(scheduler) == {"b": 20}


def test_queued_prompt_tokens_are_bounded_and_a_longer_prompt_is_served_alone() -> None:
    scheduler = make_scheduler(max_num_queued_tokens=10)
    add(scheduler, "a", 16)
    add(scheduler, "b", 1)
    assert [delta.error_code for delta in scheduler.state.outbox.deltas] == ["Overloaded"]
    step(scheduler)
    add(scheduler, "c", 10)
    assert set(scheduler.state.requests) == {"a", "c"}


def test_tokens_are_told_in_groups_but_the_first_and_the_last_at_once() -> None:
    scheduler = make_scheduler(stream_interval=3)
    add(scheduler, "a", 4, max_tokens=6)
    for _ in range(6):
        step(scheduler)
    assert [len(delta.token_ids) for delta in scheduler.state.outbox.deltas] == [1, 3, 2]


def test_a_request_that_waits_for_its_grammar_holds_nobody_up() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4, max_tokens=1)
    add(scheduler, "b", 4, max_tokens=1)
    scheduler.begin_grammar("a")
    assert step(scheduler) == {"b": 4}
    scheduler.end_grammar("a")
    assert step(scheduler) == {"a": 4}


def test_blocks_behind_a_window_go_back_and_the_table_keeps_its_length() -> None:
    scheduler = make_scheduler(windows=(0, 6), max_model_len=100)
    add(scheduler, "a", 18, max_tokens=20)
    step(scheduler)
    step(scheduler)
    [sequence] = scheduler.state.running
    full, sliding = sequence.blocks
    assert len(full) == len(sliding) == 5
    # The query at 18 reads from 13 on.
    assert [block == NO_BLOCK for block in sliding] == [True, True, True, False, False]
    assert scheduler.state.kv.num_used == 7


def test_a_prefix_is_a_hit_where_every_group_can_go_on() -> None:
    scheduler = make_scheduler(windows=(0, 6), max_model_len=100)
    add(scheduler, "a", 16, max_tokens=1)
    step(scheduler)
    # The same 16 tokens, and more.
    scheduler.add(make_add([10 + index % 90 + 100 * (ord("a") % 9) for index in range(19)], "b"))
    assert step(scheduler) == {"b": 3}
    [sequence] = scheduler.state.running
    assert [block == NO_BLOCK for block in sequence.blocks[1]] == [True, True, False, False, False]


def test_a_reset_forgets_what_is_cached_and_what_is_being_computed() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 16, max_tokens=8)
    step(scheduler)
    scheduler.reset_prefix_cache()
    for _ in range(8):
        step(scheduler)
    scheduler.add(make_add([10 + index % 90 + 100 * (ord("a") % 9) for index in range(16)], "b"))
    assert step(scheduler) == {"b": 16}


def fetch(scheduler: Scheduler, request_id: str, num_tokens: int, **options: object) -> None:
    """Add a request whose prompt a peer has computed; its pull is under way afterwards."""
    num_blocks = -(-num_tokens // 4)
    blocks = GroupBlocks(group=0, block_ids=list(range(num_blocks)), generations=[1] * num_blocks)
    source = KVSource(transfer_id=request_id, peer_id="p@1", groups=[blocks], num_tokens=num_tokens)
    add(scheduler, request_id, num_tokens, emitted=[[NEXT]], source=source, **options)


def test_who_gives_way_to_fetched_kv_leaves_the_step_to_it() -> None:
    """Once, the step was left empty, and the engine slept with work to do."""
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1, max_model_len=16)
    fetch(scheduler, "a", 8, max_tokens=3)
    scheduler.schedule()
    add(scheduler, "b", 3, max_tokens=9)
    assert step(scheduler) == {"b": 3}
    scheduler.end_pull(PullResult(transfer_id="a", reason="", num_bytes=1, duration_s=0.0), "shm")
    for _ in range(5):
        assert step(scheduler) == {"b": 1}
    # a holds two blocks, b the other two, and needs a third.
    assert step(scheduler) == {"a": 1}


def test_what_does_not_fit_beside_an_offer_waits_for_its_end() -> None:
    """Once, it started, gave up, and started again, step after step."""
    scheduler = make_scheduler(num_blocks=4, max_model_len=16)
    add(scheduler, "a", 11, prefill_only=True, offer_id="o")
    assert step(scheduler) == {"a": 11}
    add(scheduler, "b", 3, max_tokens=3)
    assert step(scheduler) == {"b": 3}
    assert step(scheduler) == {"b": 1}
    assert [step(scheduler) for _ in range(3)] == [{}, {}, {}]
    scheduler.release_offer("o")
    # Its first block is still cached.
    assert step(scheduler) == {"b": 1}


def test_prompt_logprobs_survive_a_preemption_that_was_planned_before_they_were_known() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 2, prompt_logprobs=0, max_tokens=1)
    schedule = scheduler.schedule()
    scheduler.state.preempt(schedule.sequences[0])
    known = TokenLogprobs(token_ids=[3], logprobs=[-1.0], rank=1)
    scheduler.update(schedule, StepResult(token_ids=[NEXT], prompt_logprobs={0: [known]}))
    assert scheduler.state.outbox.deltas[0].prompt_logprobs == [None, known]


def test_a_long_prompt_leaves_a_token_for_each_of_those_behind_it() -> None:
    scheduler = make_scheduler(by_priority=True, max_num_batched_tokens=10)
    for request_id in ("b", "c"):
        add(scheduler, request_id, 4, priority=1)
    step(scheduler)
    add(scheduler, "a", 60, priority=0)
    assert step(scheduler) == {"a": 8, "b": 1, "c": 1}
    assert step(scheduler) == {"a": 8, "b": 1, "c": 1}


def test_no_more_fetch_than_could_run() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, "a", 4)
    step(scheduler)
    for request_id in ("b", "c", "d"):
        fetch(scheduler, request_id, 4)
    add(scheduler, "e", 4)
    assert step(scheduler) == {"a": 1}
    assert scheduler.state.ledger.num_owners == 2


def test_who_fetches_does_not_keep_others_from_computing() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    fetch(scheduler, "a", 4)
    add(scheduler, "b", 4)
    assert step(scheduler) == {"b": 4}


def test_copies_that_block_a_lone_request_are_a_step_of_their_own() -> None:
    """Once, their sources kept the blocks that it needed, and nothing was planned any more."""
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1, max_num_batched_tokens=3, max_model_len=16)
    add(scheduler, "a", 10, n=3, max_tokens=4, emitted=[[NEXT] * 3] * 3)
    schedule = scheduler.schedule()
    scheduler.update(schedule, result_of(schedule))
    scheduler.abort("a", 0)
    for _ in range(40):
        schedule = scheduler.schedule()
        if not schedule.is_empty:
            scheduler.update(schedule, result_of(schedule))
    assert not scheduler.state.requests
    assert scheduler.state.kv.num_used == 0


def test_what_is_shared_after_a_reset_is_not_named_either() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 30, n=2, max_tokens=1)
    step(scheduler)
    scheduler.reset_prefix_cache()
    for _ in range(3):
        step(scheduler)
    assert not scheduler.state.requests
    add(scheduler, "a", 30)
    assert step(scheduler) == {"a": 20}


def test_statistics_count_each_token_once() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 8, max_tokens=1)
    step(scheduler)
    fetch(scheduler, "a", 20)
    scheduler.schedule()
    scheduler.end_pull(PullResult(transfer_id="a", reason="", num_bytes=1, duration_s=0.0), "shm")
    counters = scheduler.state.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (8 + 21, 8)
    assert (counters.external_queries, counters.external_hits) == (12, 12)


def test_a_step_holds_prompt_logprobs_of_few_tokens() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_batched_tokens=1000)
    for request_id in ("a", "b"):
        add(scheduler, request_id, 200, prompt_logprobs=0, max_tokens=2)
    assert step(scheduler) == {"a": 200, "b": 56}
    assert step(scheduler) == {"a": 1, "b": 144}


def test_a_choice_whose_source_went_with_the_lead_says_that_it_computed() -> None:
    scheduler = make_scheduler()
    blocks = GroupBlocks(group=0, block_ids=[0, 1], generations=[1] * 2)
    source = KVSource(transfer_id="t", peer_id="p@1", groups=[blocks], num_tokens=8)
    add(scheduler, "a", 8, n=2, max_tokens=3, emitted=[[NEXT], [NEXT]], source=source)
    scheduler.schedule()
    scheduler.abort("a", 0)
    step(scheduler)
    [delta] = [delta for delta in scheduler.state.outbox.deltas if delta.choice == 1]
    assert delta.kv_source == "recompute:aborted"


def test_room_is_not_made_for_a_sequence_that_a_bug_has_ended_meanwhile() -> None:
    """Once, it got blocks after its end, which nobody gave back."""
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    add(scheduler, "a", 3, n=2, max_tokens=20)
    for _ in range(40):
        if len(scheduler.state.running) == 2 and scheduler.state.kv.num_free == 0:
            scheduler.state.running[-1].state = State.WAITING_FOR_GRAMMAR
        schedule = scheduler.schedule()
        if not schedule.is_empty:
            scheduler.update(schedule, result_of(schedule))
    assert scheduler.state.counters.illegal_events == 1
    assert not scheduler.state.requests
    assert scheduler.state.kv.num_used == 0


def test_fetching_leaves_a_block_for_each_that_runs() -> None:
    scheduler = make_scheduler(num_blocks=8, max_model_len=24)
    for request_id in ("a", "b"):
        add(scheduler, request_id, 7, max_tokens=4)
    assert step(scheduler) == {"a": 7, "b": 7}
    fetch(scheduler, "c", 12)
    step(scheduler)
    # Three of the four free blocks would do for it, but one more each is what a and b will need.
    assert not scheduler.state.outbox.pulls
    for _ in range(4):
        step(scheduler)
    assert scheduler.state.counters.num_preemptions == 0
    assert [pull.transfer_id for pull in scheduler.state.outbox.pulls] == ["c"]


def test_repetition_is_not_looked_for_before_min_tokens() -> None:
    scheduler = make_scheduler()
    detection = RepetitionDetection(max_pattern_size=1, min_count=3)
    add(scheduler, "a", 4, max_tokens=20, min_tokens=6, repetition_detection=detection)
    add(scheduler, "b", 4, max_tokens=20, repetition_detection=detection)
    for _ in range(8):
        step(scheduler)
    deltas = scheduler.state.outbox.deltas
    num_tokens = {each: sum(len(d.token_ids) for d in deltas if d.request_id == each) for each in ("a", "b")}
    assert num_tokens == {"a": 6, "b": 3}
    assert {d.finish_reason for d in deltas if d.finish_reason} == {"repetition"}
