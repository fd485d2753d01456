"""The table of states and events, and what becomes of a request whose state is wrong: it ends, and the others do not notice."""

import itertools

import pytest

from pdmesh.engine.messages import StepOutput
from pdmesh.engine.states import FINISH_REASON, TRANSITIONS, Event, IllegalEvent, State, after
from support.core_harness import CoreHarness
from support.fake_backend import expected_tokens

PROMPTS = {"first": [7, 8, 9, 10, 11, 12], "wrong": [20, 21, 22, 23, 24, 25], "last": [30, 31, 32, 33, 34, 35]}
NUM_TOKENS = 12


@pytest.mark.parametrize(("state", "event"), [*itertools.product(State, Event)], ids=lambda each: each.name)
def test_only_what_the_table_has_can_happen(state: State, event: Event) -> None:
    following = TRANSITIONS.get((state, event))
    if following is not None:
        assert after(state, event) is following
        assert state not in FINISH_REASON, "an end is final"
    else:
        with pytest.raises(IllegalEvent, match=f"{event.name} .* {state.name}"):
            after(state, event)


def test_every_state_is_reached_and_every_live_one_is_left() -> None:
    reached = {State.HELD, State.WAITING, *TRANSITIONS.values()}
    assert reached == set(State)
    for state in set(State) - FINISH_REASON.keys():
        assert after(state, Event.ABORTED) is State.FINISHED_ABORTED
        assert after(state, Event.FAILED) is State.FINISHED_ERROR


@pytest.mark.parametrize("state", list(State), ids=lambda each: each.name)
@pytest.mark.parametrize("num_steps", [0, 1, 4], ids=["waiting", "prefilling", "decoding"])
@pytest.mark.parametrize("num_blocks", [10, 64], ids=["crowded", "roomy"])
def test_a_wrong_state_ends_one_request(state: State, num_steps: int, num_blocks: int) -> None:
    core = CoreHarness(num_blocks=num_blocks, max_model_len=40, max_num_seqs=3, is_async=False)
    for request_id, prompt in PROMPTS.items():
        core.add(prompt, request_id, max_tokens=NUM_TOKENS)
    _break_before(core, num_steps, state)
    core.run()
    for request_id in ("first", "last"):
        assert core.tokens(request_id) == expected_tokens(PROMPTS[request_id], NUM_TOKENS)
        assert core.finish_reason(request_id) == "length"
    ended = core.deltas_of("wrong")[-1]
    # A state from which it can go on as if nothing had been does no harm.
    assert (ended.finish_reason, ended.error_code) in (("error", "EngineFault"), ("length", ""))
    assert sum(bool(delta.finish_reason) for delta in core.deltas_of("wrong")) == 1
    assert core.num_used == 0
    core.scheduler.state.check_integrity()


def _break_before(core: CoreHarness, num_steps: int, state: State) -> None:
    """Give a request a state that it does not have, before a step is planned, and let the core find out."""
    schedule = core.scheduler.schedule
    count = itertools.count()

    def break_and_schedule() -> object:
        if next(count) == num_steps and "wrong" in core.scheduler.state.requests:
            core.scheduler.state.requests["wrong"].lead.state = state
        return schedule()

    core.scheduler.schedule = break_and_schedule  # type: ignore[assignment, method-assign]


def test_the_log_and_a_metric_tell_of_a_wrong_state(caplog: pytest.LogCaptureFixture) -> None:
    core = CoreHarness()
    core.add(PROMPTS["wrong"], "wrong", max_tokens=NUM_TOKENS)
    _break_before(core, 1, State.HELD)
    core.add(PROMPTS["wrong"], "later", max_tokens=2)
    core.run()
    assert core.finish_reason("later") == "length"
    stats = [output.stats for output in core.sent if isinstance(output, StepOutput) and output.stats is not None]
    assert stats[-1].illegal_events == 1
    assert "wrong" in caplog.text
