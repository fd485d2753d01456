"""What crosses between scheduler and worker is msgpack, and costs what changed, not what lies behind it."""

import msgspec
import pytest

from pdmesh.engine.plan import RowFailure, StepPlan, StepResult
from pdmesh.protocol.messages import TokenLogprobs
from support.core_harness import CoreHarness
from support.fake_backend import expected_tokens
from support.prompts import random_prompt


class Boundary:
    """Stands before a runner and lets nothing through but bytes."""

    def __init__(self, core: CoreHarness) -> None:
        self._run = core.runner.run
        self.num_bytes: list[int] = []

    def run(self, plan: StepPlan, on_begin: object = None) -> StepResult:
        data = msgspec.msgpack.encode(plan)
        self.num_bytes.append(len(data))
        result = self._run(msgspec.msgpack.decode(data, type=StepPlan))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult)


@pytest.mark.parametrize("windows", [[0], [0, 6]])
def test_a_worker_needs_nothing_but_what_a_plan_says(windows: list[int]) -> None:
    core = CoreHarness(windows=windows, num_blocks=160, max_num_batched_tokens=16)
    core.runner.run = Boundary(core).run  # type: ignore[method-assign]
    for index, length in enumerate((3, 17, 40)):
        core.add(random_prompt(length), f"r{index}", n=1 if index else 2, logprobs=1)
    core.run()
    for index, length in enumerate((3, 17, 40)):
        assert core.tokens(f"r{index}") == expected_tokens(random_prompt(length), 8, windows=windows)


def test_a_decode_step_costs_bytes_per_row_and_none_per_token_behind_it() -> None:
    sizes = {}
    for length in (8, 150):
        core = CoreHarness(num_blocks=200, max_num_batched_tokens=700)
        boundary = Boundary(core)
        core.runner.run = boundary.run  # type: ignore[method-assign]
        for row in range(4):
            core.add([*random_prompt(length), row], f"r{row}", max_tokens=3)
        core.run()
        sizes[length] = boundary.num_bytes[1:]
    # Larger positions take a byte or two more, and a step may tell of one more block for each row.
    assert max(sizes[150] + sizes[8]) < 4 * 20


def test_results_survive_the_way_back() -> None:
    logprobs = TokenLogprobs(token_ids=[3, 1], logprobs=[-0.5, -1.0], rank=1)
    result = StepResult(
        token_ids=[3, -1],
        logprobs={0: logprobs},
        prompt_logprobs={1: [logprobs]},
        failures={1: RowFailure(code="InternalError", message="no", is_nan=True)},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
