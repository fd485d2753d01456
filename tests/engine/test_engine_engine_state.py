"""What the engine's state says of requests: how many queue, how long they waited, what they found, and every token's data."""

import pytest

from pdmesh.engine.block_hash import BlockHasher
from pdmesh.engine.block_pool import BlockPool
from pdmesh.engine.kv_groups import KVGroup
from pdmesh.engine.kv_manager import KVManager
from pdmesh.engine.limits import Limits
from pdmesh.engine.plan import NO_TOKEN, StepResult
from pdmesh.engine.scheduler import Scheduler
from pdmesh.protocol.messages import TokenLogprobs
from support.core_harness import make_add

NEXT = 5


def make_scheduler(num_blocks: int = 100, **limits: float) -> Scheduler:
    values = {"max_num_batched_tokens": 20, "max_num_seqs": 8, "max_model_len": num_blocks * 4} | limits
    hasher = BlockHasher("sha256", "", 4)
    kv = KVManager([KVGroup(4)], BlockPool(num_blocks, 1), hasher, max_chunk_tokens=20)
    return Scheduler(kv, Limits(vocab_size=1000, eos_token_ids=frozenset({1}), **values))


def step(scheduler: Scheduler, token_id: int = NEXT) -> None:
    """Run one step; each sampled token's log-probability says which it is."""
    schedule = scheduler.schedule()
    samples = schedule.plan.samples
    result = StepResult(
        token_ids=[token_id if is_sampled else NO_TOKEN for is_sampled in samples],
        logprobs={index: logprobs_of(token_id) for index, is_sampled in enumerate(samples) if is_sampled},
    )
    scheduler.update(schedule, result)
    scheduler.state.check_integrity()


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id], logprobs=[-float(token_id)], rank=1)


# ---- the queue -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_request_queues_while_its_grammar_is_compiled_and_until_it_has_a_turn(is_ready: bool) -> None:
    scheduler = make_scheduler(max_num_queued_reqs=1)
    scheduler.add(make_add([10, 11, 12], "a"))
    scheduler.begin_grammar("a")
    if is_ready:
        scheduler.end_grammar("a")
    assert scheduler.state.num_queued == 1
    scheduler.add(make_add([20, 21, 22], "b"))
    assert [(delta.request_id, delta.error_code) for delta in scheduler.state.outbox.deltas] == [("b", "Overloaded")]
    if is_ready:
        step(scheduler)
        assert scheduler.state.num_queued == 0
    scheduler.abort("a")
    assert scheduler.state.num_queued == 0


# ---- first deltas --------------------------------------------------------------------------------


def test_a_request_waited_until_the_first_of_its_choices_started(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pdmesh.engine.engine_state.time.monotonic", lambda: now)
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_add([10, 11, 12], "a", n=2, max_tokens=1))
    now = 103.0
    step(scheduler)
    now = 110.0
    step(scheduler)
    assert [(delta.choice, delta.queued_s) for delta in scheduler.state.outbox.deltas] == [(0, 3.0), (1, 3.0)]


def test_of_a_resumed_request_only_prompt_tokens_count_as_cached() -> None:
    scheduler = make_scheduler()
    for request_id in ("a", "b"):
        scheduler.add(make_add([10, 11, 12, 13, 14], request_id, emitted=[[NEXT] * 9], max_tokens=20))
        step(scheduler)
    cached = {delta.request_id: delta.cached_tokens for delta in scheduler.state.outbox.deltas if delta.cached_tokens}
    # Three blocks were found: twelve tokens.
    assert cached == {"b": 5}
    assert scheduler.state.counters.prefix_cache_hits == 12


# ---- tokens that are told in groups --------------------------------------------------------------


@pytest.mark.parametrize("stream_interval", [1, 2, 3, 10])
def test_each_token_is_told_once_with_its_logprobs(stream_interval: int) -> None:
    scheduler = make_scheduler(stream_interval=stream_interval)
    scheduler.add(make_add([10, 11, 12], "a", max_tokens=8, logprobs=1))
    told = list(range(20, 28))
    for token_id in told:
        step(scheduler, token_id)
    deltas = scheduler.state.outbox.deltas
    assert [token_id for delta in deltas for token_id in delta.token_ids] == told
    for delta in deltas:
        assert delta.logprobs == [logprobs_of(token_id) for token_id in delta.token_ids]
