"""The runner: plans in, tokens out, over a backend that gives away every wrong table; one row's failure is its own."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from pdmesh.engine.logits_processors import LogitsProcessor, RowView
from pdmesh.engine.plan import NO_TOKEN, StepPlan, StepResult
from pdmesh.errors import InvalidRequest
from pdmesh.protocol.messages import SamplingParams, ThinkingBudget
from support.fake_backend import EOS, VOCAB_SIZE, expected_tokens, logits_after
from support.runner_harness import RunnerHarness

PROMPT = [5, 6, 7, 8, 9, 10, 11]


APPLIED: dict[str, BaseException] = {
    "fail": RuntimeError("processor on fire"),
    "exit": SystemExit(1),
    "interrupt": KeyboardInterrupt(),
    "memory": MemoryError(),
    "own": InvalidRequest("not today", param="mark"),
    "odd": InvalidRequest(7),  # type: ignore[arg-type]
    "surrogate": RuntimeError("\ud800"),
}
ASKED: dict[str, BaseException] = {
    "asked-fail": TypeError("not a number"),
    "asked-exit": SystemExit(1),
    "asked-own": InvalidRequest("never", param="mark"),
}


class Marker(LogitsProcessor):
    """Adds to what the request's extra argument names; fails or excludes everything when told so."""

    def is_active(self, sampling: SamplingParams) -> bool:
        if sampling.extra_args.get("mark") in ASKED:
            raise ASKED[str(sampling.extra_args["mark"])]
        return "mark" in sampling.extra_args

    def apply(self, logits_V: torch.Tensor, row: RowView) -> torch.Tensor | None:  # type: ignore[override]
        mark = row.extra_args["mark"]
        if mark in APPLIED:
            raise APPLIED[str(mark)]
        if mark == "inf":
            logits_V[0] = torch.inf
        if mark == "largest":
            logits_V[9] = torch.finfo(torch.float32).max
        if mark == "copy":
            return logits_V * 2
        if mark == "same":
            return logits_V.mul_(2)
        if mark == "elsewhere":
            logits_V.data = logits_V.data.double()
        if mark == "none":
            logits_V.fill_(-torch.inf)
        if mark == "nan":
            logits_V[0] = torch.nan
        if mark == "echo":
            # Depends on prompt and output: whichever stands at the mirrored place.
            tokens = np.concatenate([row.prompt, row.output])
            logits_V[int(tokens[-1 - len(row.output) % len(tokens)])] += 100.0
        return None


@pytest.fixture
def harness() -> Iterator[RunnerHarness]:
    made = RunnerHarness(processors=[Marker(VOCAB_SIZE, torch.device("cpu"))])
    yield made
    made.close()


@pytest.fixture
def hybrid() -> Iterator[RunnerHarness]:
    made = RunnerHarness(windows=[0, 6])
    yield made
    made.close()


def test_greedy_tokens_are_those_of_the_ids_alone(harness: RunnerHarness) -> None:
    harness.add(3, PROMPT)
    harness.add(0, [1, 2])
    tokens = harness.generate([3, 0], 12)
    assert tokens == {3: expected_tokens(PROMPT, 12), 0: expected_tokens([1, 2], 12)}


@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
def test_chunks_change_nothing(harness: RunnerHarness, chunk: int) -> None:
    harness.add(1, PROMPT)
    results = []
    while harness.computed[1] < len(PROMPT):
        results.append(harness.step({1: min(chunk, len(PROMPT) - harness.computed[1])}))
    assert [result.token_ids for result in results[:-1]] == [[NO_TOKEN]] * (len(results) - 1)
    assert [*results[-1].token_ids, *harness.generate([1], 4)[1]] == expected_tokens(PROMPT, 5)


def test_a_sliding_group_reads_nothing_outside_its_window(hybrid: RunnerHarness) -> None:
    hybrid.add(0, PROMPT)
    hybrid.add(1, PROMPT[:3])
    outputs: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(20):
        for row, tokens in hybrid.generate([0, 1], 1).items():
            outputs[row] += tokens
            # Blocks that no window needs go to the other row, which writes over them.
            hybrid.slide(row)
    assert outputs == {
        0: expected_tokens(PROMPT, 20, windows=(0, 6)),
        1: expected_tokens(PROMPT[:3], 20, windows=(0, 6)),
    }
    assert outputs[0] != expected_tokens(PROMPT, 20)


def test_copies_come_before_the_step(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT[:4])
    harness.generate([0], 1)
    harness.add(1, PROMPT)
    harness.computed[1] = 4
    harness.plan.copies = [(harness.blocks[0][0][0], harness.blocks[1][0][0])]
    assert harness.step({1: 3}).token_ids == expected_tokens(PROMPT, 1)
    # Without a row the copy is made all the same.
    target = harness._free.pop()
    harness.plan.copies = [(harness.blocks[1][0][0], target)]
    assert harness.step({}) == StepResult(token_ids=[])
    assert (harness.pool.blocks[target] == harness.pool.blocks[harness.blocks[0][0][0]]).all()


def test_the_begin_is_told_once_with_the_input_ready_and_before_the_model_runs(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT)
    seen: list[tuple[int, int]] = []
    table = harness.runner._rows.tokens
    harness.step({0: 7}, lambda: seen.append((len(harness.backend.steps), int(table[0, 6]))))
    assert seen == [(0, PROMPT[6])]
    assert int(table[0, 7]) == expected_tokens(PROMPT, 1)[0]


def test_what_the_backend_raises_is_the_callers(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT)
    harness.backend.fail_next = 1
    with pytest.raises(RuntimeError, match="on fire"):
        harness.step({0: 7})


def test_nan_logits_fail_their_row_and_no_other(harness: RunnerHarness) -> None:
    harness.backend.nan_tokens = {33}
    harness.add(0, [2, 33], temperature=1.0, logprobs=1)
    harness.add(1, PROMPT)
    harness.add(2, [2, 33, 4], prompt_logprobs=1)
    result = harness.step({1: 7, 0: 2, 2: 3})
    assert result.token_ids == [expected_tokens(PROMPT, 1)[0], NO_TOKEN, NO_TOKEN]
    assert {index: (failure.code, failure.is_nan) for index, failure in result.failures.items()} == {
        1: ("EngineFault", True),
        2: ("EngineFault", True),
    }
    assert result.logprobs == {}
    assert result.prompt_logprobs == {}


def test_a_failed_row_runs_in_vain_where_it_was_planned_before(harness: RunnerHarness) -> None:
    harness.backend.nan_tokens = {33}
    harness.add(0, [2, 33])
    harness.add(1, PROMPT)
    assert set(harness.step({0: 2, 1: 7}).failures) == {0}
    later = harness.step({0: 1, 1: 1})
    assert later.token_ids == [NO_TOKEN, expected_tokens(PROMPT, 2)[1]]
    assert later.failures == {}
    # The row's next owner has nothing of it.
    harness.plan.freed = [0]
    harness.add(0, [4, 5])
    assert harness.generate([0], 3)[0] == expected_tokens([4, 5], 3)


def test_a_row_that_has_ended_by_length_runs_in_vain() -> None:
    made = RunnerHarness(max_model_len=8, num_rows=2)
    made.add(0, PROMPT)
    made.add(1, [3, 4])
    made.generate([0, 1], 1)
    for _ in range(2):
        # Row 0 has 8 tokens, all there may be; its next ones are nobody's.
        made.generate([0, 1], 1)
    assert made.runner._rows.tokens[1, :5].tolist() == [3, 4, *expected_tokens([3, 4], 3)]
    made.close()


@pytest.mark.parametrize(
    ("mark", "code", "message"),
    [
        ("fail", "InternalError", "processor on fire"),
        ("exit", "InternalError", "Marker failed: SystemExit: 1"),
        ("interrupt", "InternalError", "KeyboardInterrupt"),
        ("memory", "InternalError", "MemoryError"),
        ("own", "InvalidRequest", "not today"),
        ("odd", "InvalidRequest", "7"),
        ("surrogate", "InternalError", "?"),
        ("copy", "InternalError", "returned Tensor; it must change the logits in place"),
        ("elsewhere", "InternalError", "gave the logits other memory"),
        ("none", "InternalError", "Marker leaves no token"),
        ("nan", "InternalError", "Marker makes logits NaN"),
        ("inf", "InternalError", "Marker makes logits infinite"),
        ("asked-fail", "InternalError", "Marker failed: TypeError: not a number"),
        ("asked-exit", "InternalError", "SystemExit"),
        ("asked-own", "InvalidRequest", "never"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_processor_ends_its_row(
    harness: RunnerHarness, mark: str, code: str, message: str, temperature: float
) -> None:
    """What it wrote was blamed on the client; what `is_active` raised ended all rows of the step."""
    harness.add(0, [3, 4], extra_args={"mark": mark}, temperature=temperature)
    harness.add(1, PROMPT)
    result = harness.step({0: 2, 1: 7})
    assert result.token_ids == [NO_TOKEN, expected_tokens(PROMPT, 1)[0]]
    assert list(result.failures) == [0]
    assert result.failures[0].code == code
    assert message in result.failures[0].message
    assert result.failures[0].is_nan == (mark in ("nan", "inf"))
    # It can be sent: what cannot would end the engine, or leave the client without an answer.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
    # It is told once; where the row was planned before, it runs in vain.
    assert not harness.step({0: 1, 1: 1}).failures


def test_a_processor_that_fails_to_say_whether_it_is_active_is_told_before_the_prompt_is_computed(
    harness: RunnerHarness,
) -> None:
    harness.add(0, PROMPT, extra_args={"mark": "asked-fail"})
    assert list(harness.step({0: 3}).failures) == [0]
    harness.add(0, PROMPT, extra_args={"mark": "asked-fail"})
    # The row goes to somebody else before it was in a step.
    harness.plan.freed.append(0)
    harness.step({})
    harness.add(0, PROMPT)
    assert harness.generate([0], 2)[0] == expected_tokens(PROMPT, 2)


def test_a_processor_that_leaves_none_of_the_allowed_tokens_is_the_clients_affair(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT, extra_args={"mark": "none"}, allowed_token_ids=[9, 10])
    failure = harness.step({0: 7}).failures[0]
    assert (failure.code, failure.is_nan) == ("InvalidRequest", False)
    assert "Marker leaves none of the allowed_token_ids" in failure.message


@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 1.0])
def test_the_largest_logit_there_is_forces_its_token(harness: RunnerHarness, temperature: float) -> None:
    harness.add(0, PROMPT, extra_args={"mark": "largest"}, temperature=temperature)
    assert harness.generate([0], 2)[0] == [9, 9]


def test_a_processor_may_return_the_logits_that_it_changed(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT, extra_args={"mark": "same"})
    assert harness.generate([0], 3)[0] == expected_tokens(PROMPT, 3)


def test_a_plan_without_rows_is_applied_and_computes_nothing(harness: RunnerHarness) -> None:
    harness.add(0, [3, 4])
    harness.add(1, [3, 4])
    harness.step({0: 2, 1: 2})
    source, target = harness.blocks[0][0][0], 200
    harness.plan.copies, harness.plan.freed = [(source, target)], [1]
    assert harness.step({}) == StepResult(token_ids=[])
    assert np.array_equal(harness.pool.blocks[source], harness.pool.blocks[target])
    with pytest.raises(AssertionError, match="no sequence has"):
        harness.runner._rows.new_of(1)


def test_parameters_that_leave_no_token_end_their_row(harness: RunnerHarness) -> None:
    harness.add(0, [3, 4], allowed_token_ids=[9], bad_words_token_ids=[[9]])
    harness.add(1, [3, 4], logit_bias={VOCAB_SIZE: 1.0})
    harness.add(2, PROMPT)
    result = harness.step({0: 2, 1: 2, 2: 7})
    assert result.token_ids == [NO_TOKEN, NO_TOKEN, expected_tokens(PROMPT, 1)[0]]
    assert [result.failures[index].code for index in (0, 1)] == ["InvalidRequest", "EngineFault"]


STATEFUL = [
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {"min_tokens": 9, "ignore_eos": False, "logit_bias": {EOS: 100.0}},
    {
        "temperature": 1.0,
        "seed": 4,
        "bad_words_token_ids": [[7], [8, 9], [40, 41]],
        "allowed_token_ids": list(range(30)),
    },
    {"thinking": ThinkingBudget(budget=3, start_token_ids=[11], end_token_ids=[50, 51])},
    {"extra_args": {"mark": "echo"}},
]


@pytest.mark.parametrize("sampling", STATEFUL)
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_row_that_is_given_its_tokens_again_goes_on_exactly(
    harness: RunnerHarness, sampling: dict[str, object], cut: int
) -> None:
    harness.add(0, PROMPT, **sampling)
    whole = harness.generate([0], 12)[0]
    harness.add(4, PROMPT, whole[:cut], **sampling)
    assert harness.generate([4], 12 - cut)[4] == whole[cut:]


def test_a_row_that_is_taken_again_has_nothing_of_the_one_before(harness: RunnerHarness) -> None:
    sampling = {"frequency_penalty": 2.0, "temperature": 1.0, "seed": 8}
    harness.add(0, PROMPT, **sampling)
    expected = harness.generate([0], 8)[0]
    harness.add(0, [3, 3, 3], **sampling)
    harness.generate([0], 8)
    harness.add(0, PROMPT, **sampling)
    assert harness.generate([0], 8)[0] == expected


def test_the_thinking_budget_overrides_everything_else(harness: RunnerHarness) -> None:
    thinking = ThinkingBudget(budget=1, start_token_ids=[11], end_token_ids=[EOS, 51])
    banned = {"min_tokens": 9, "ignore_eos": False, "bad_words_token_ids": [[51]], "allowed_token_ids": [20, 21]}
    harness.add(0, PROMPT, thinking=thinking, temperature=1.0, **banned)
    tokens = harness.generate([0], 6)[0]
    assert tokens[1:3] == [EOS, 51]
    assert {tokens[0], *tokens[3:]} <= {20, 21}


def test_prompt_logprobs_are_those_of_the_model_for_every_chunk(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT, prompt_logprobs=2, logprobs=0)
    harness.add(1, [3, 4])
    told = []
    for count in (3, 1, 3):
        rows = {1: 2, 0: count} if count == 1 else {0: count}
        result = harness.step(rows)
        told += result.prompt_logprobs[list(rows).index(0)]
    assert len(told) == len(PROMPT) - 1
    for position, each in enumerate(told, start=1):
        raw = logits_after(PROMPT[:position]).log_softmax(-1)
        top = raw.topk(2)
        assert each.token_ids == [PROMPT[position], *top.indices.tolist()]
        assert each.logprobs == pytest.approx([raw[PROMPT[position]].item(), *top.values.tolist()], abs=1e-6)
        assert each.rank == int((raw >= raw[PROMPT[position]]).sum())
    [logprobs] = result.logprobs.values()
    assert logprobs.token_ids == result.token_ids


def test_results_and_plans_survive_the_wire(harness: RunnerHarness) -> None:
    harness.add(0, PROMPT, prompt_logprobs=1, logprobs=1)
    harness.plan = msgspec.msgpack.decode(msgspec.msgpack.encode(harness.plan), type=StepPlan)
    result = harness.step({0: 7})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
