"""Plans run in order on their own thread, at most one ahead; pulls wait for the steps that may write where they will."""

import select
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pdmesh.connector.base import Pull
from pdmesh.engine.executor import Executor
from pdmesh.engine.plan import StepPlan, StepResult
from support.core_harness import CoreHarness


class GatedWorker:
    """Begins and ends steps when it is told to."""

    def __init__(self) -> None:
        self.may_begin = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, on_begin: Callable[[], None] | None = None) -> StepResult:
        self.plans.append(plan)
        self.may_begin.acquire(timeout=10)
        if not plan.rows:
            raise RuntimeError("the device is on fire")
        if on_begin is not None:
            on_begin()
        self.may_end.acquire(timeout=10)
        return StepResult(token_ids=list(plan.rows))


def wait(executor: Executor) -> list[StepResult | Exception]:
    readable, _, _ = select.select([executor.fileno()], [], [], 10)
    assert readable, "nothing happened"
    return executor.take_results()


def test_the_next_plan_is_taken_while_the_one_before_runs() -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    assert executor.can_take
    assert not executor.is_idle
    executor.submit(StepPlan(rows=[2]))
    assert not executor.can_take
    worker.may_begin.release()
    worker.may_end.release()
    worker.may_begin.release()
    [result] = wait(executor)
    assert isinstance(result, StepResult)
    assert result.token_ids == [1]
    # The second runs.
    assert executor.can_take
    first_s = executor.begun_s, executor.ended_s
    worker.may_end.release()
    while not executor.is_idle:
        wait(executor)
    # What it tells is of the step whose result was taken.
    assert 0 < first_s[0] <= first_s[1] <= executor.begun_s <= executor.ended_s
    executor.close()
    assert [plan.rows for plan in worker.plans] == [[1], [2]]


def test_the_core_hears_of_a_step_when_the_next_one_has_begun() -> None:
    """Told before, it would hold Python's lock while the device waits for the next step's input."""
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    executor.submit(StepPlan(rows=[2]))
    worker.may_begin.release()
    worker.may_end.release()
    while len(worker.plans) < 2:
        time.sleep(0.001)
    assert select.select([executor.fileno()], [], [], 0)[0] == []
    worker.may_begin.release()
    assert len(wait(executor)) == 1
    # Nothing follows the second, so its end is told at once.
    worker.may_end.release()
    assert len(wait(executor)) == 1
    executor.close()


def test_a_step_is_told_though_the_next_one_fails_before_it_begins() -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    executor.submit(StepPlan())
    for gate in (worker.may_begin, worker.may_end, worker.may_begin):
        gate.release()
    results = wait(executor)
    while not executor.is_idle:
        results += wait(executor)
    assert [type(result) for result in results] == [StepResult, RuntimeError]
    executor.close()


def test_a_plan_can_be_had_back_until_it_begins() -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    while not worker.plans:
        time.sleep(0.001)
    assert not executor.recall()
    plan = StepPlan(rows=[2])
    executor.submit(plan)
    assert executor.recall()
    assert executor.num_submitted == 1
    plan.rows.append(3)
    executor.submit(plan)
    for gate in (worker.may_begin, worker.may_end) * 2:
        gate.release()
    results = wait(executor)
    while not executor.is_idle:
        results += wait(executor)
    executor.close()
    assert [result.token_ids for result in results if isinstance(result, StepResult)] == [[1], [2, 3]]


def test_the_last_plan_is_had_back_though_the_one_before_has_not_begun() -> None:
    """Once, the first was taken back and ran behind the second."""
    worker = GatedWorker()
    for gate in (worker.may_begin, worker.may_end) * 200:
        gate.release()
    executor = Executor(worker, is_async=True)
    for number in range(0, 200, 2):
        executor.submit(StepPlan(rows=[number]))
        executor.submit(StepPlan(rows=[number + 1]))
        if executor.recall():
            executor.submit(StepPlan(rows=[number + 1]))
        while not executor.is_idle:
            wait(executor)
    executor.close()
    assert [plan.rows for plan in worker.plans] == [[number] for number in range(200)]


def test_without_asynchronous_scheduling_a_plan_waits_for_the_tokens_before_it() -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=False)
    executor.submit(StepPlan(rows=[1]))
    worker.may_begin.release()
    worker.may_end.release()
    assert len(wait(executor)) == 1
    assert executor.can_take
    executor.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_raises_comes_out_as_its_exception_and_the_next_runs(is_async: bool) -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=is_async)
    executor.submit(StepPlan())
    worker.may_begin.release()
    [failed] = wait(executor)
    assert str(failed) == "the device is on fire"
    assert executor.can_take
    executor.submit(StepPlan(rows=[3]))
    worker.may_begin.release()
    worker.may_end.release()
    while not executor.is_idle:
        wait(executor)
    executor.close()


def test_nothing_is_planned_on_a_step_that_failed_before_its_failure_is_known() -> None:
    """Once, the next step was planned as if the copies of the failed one had been made."""
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan())
    worker.may_begin.release()
    select.select([executor.fileno()], [], [], 10)
    assert not executor.can_take
    executor.take_results()
    assert executor.can_take
    executor.close()


def test_whatever_a_step_raises_the_next_runs() -> None:
    class Leaving(GatedWorker):
        def run(self, plan: StepPlan, on_begin: Callable[[], None] | None = None) -> StepResult:
            if not plan.rows:
                raise SystemExit(1)
            return StepResult(token_ids=list(plan.rows))

    executor = Executor(Leaving(), is_async=False)
    executor.submit(StepPlan())
    [failed] = wait(executor)
    assert isinstance(failed, RuntimeError)
    executor.submit(StepPlan(rows=[1]))
    assert isinstance(wait(executor)[0], StepResult)
    executor.close()


def test_a_pull_starts_when_the_steps_that_may_write_to_its_blocks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreHarness()
    done: list[str] = []
    monkeypatch.setattr(core.links, "start", lambda pull, **_: done.append(f"start {pull.transfer_id}"))
    monkeypatch.setattr(core.links, "cancel", lambda transfer_id: done.append(f"cancel {transfer_id}"))
    steps = SimpleNamespace(num_submitted=2, num_ended=1)
    monkeypatch.setattr(core._core, "_executor", steps)
    outbox = core.scheduler.state.outbox
    outbox.pulls.append(make_pull("quick"))
    core._core._order_pulls()
    # No step under way knows its blocks.
    assert done == ["start quick"]
    done.clear()
    monkeypatch.setattr(core.scheduler.state, "_has_strays", True)
    outbox.pulls += [make_pull("a"), make_pull("b")]
    core._core._order_pulls()
    assert done == []
    outbox.cancels.append("b")
    steps.num_submitted = 3
    core._core._order_pulls()
    assert done == []
    steps.num_ended = 2
    core._core._order_pulls()
    # What was cancelled meanwhile still ends as a pull does, so that its blocks come back.
    assert done == ["start a", "start b", "cancel b"]


def make_pull(transfer_id: str) -> Pull:
    return Pull(
        transfer_id=transfer_id,
        peer_id="p@1",
        source_block_ids=[0],
        generations=[1],
        target_block_ids=[0],
        deadline_s=1.0,
    )
