"""Plans run in order on their own thread, at most one ahead; pulls wait for the steps that may write where they will."""

import select
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pdmesh.connector.base import Pull
from pdmesh.engine.executor import Executor
from pdmesh.engine.plan import StepPlan, StepResult
from support.core_harness import CoreHarness


class GatedWorker:
    """Computes and samples when it is told to."""

    def __init__(self) -> None:
        self.may_compute = threading.Semaphore(0)
        self.may_sample = threading.Semaphore(0)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan, on_computed: Callable[[], None] | None = None) -> StepResult:
        self.plans.append(plan)
        self.may_compute.acquire(timeout=10)
        if not plan.rows:
            raise RuntimeError("the device is on fire")
        if on_computed is not None:
            on_computed()
        self.may_sample.acquire(timeout=10)
        return StepResult(token_ids=list(plan.rows))


def wait(executor: Executor) -> list[StepResult | Exception]:
    readable, _, _ = select.select([executor.fileno()], [], [], 10)
    assert readable, "nothing happened"
    return executor.take_results()


def test_the_next_plan_is_taken_while_the_one_before_samples() -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    assert not executor.can_take
    worker.may_compute.release()
    assert wait(executor) == []
    assert executor.can_take
    assert not executor.is_idle
    executor.submit(StepPlan(rows=[2]))
    # The first samples still, and the second is computed only behind it.
    assert not executor.can_take
    assert len(worker.plans) == 1
    worker.may_sample.release()
    [result] = wait(executor)
    assert isinstance(result, StepResult)
    assert result.token_ids == [1]
    for gate in (worker.may_compute, worker.may_sample):
        gate.release()
    while not executor.is_idle:
        wait(executor)
    executor.close()
    assert [plan.rows for plan in worker.plans] == [[1], [2]]


def test_without_asynchronous_scheduling_a_plan_waits_for_the_tokens_before_it() -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=False)
    executor.submit(StepPlan(rows=[1]))
    worker.may_compute.release()
    worker.may_sample.release()
    assert len(wait(executor)) == 1
    assert executor.can_take
    executor.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_raises_comes_out_as_its_exception_and_the_next_runs(is_async: bool) -> None:
    worker = GatedWorker()
    executor = Executor(worker, is_async=is_async)
    executor.submit(StepPlan())
    worker.may_compute.release()
    [failed] = wait(executor)
    assert str(failed) == "the device is on fire"
    assert executor.can_take
    executor.submit(StepPlan(rows=[3]))
    worker.may_compute.release()
    worker.may_sample.release()
    while not executor.is_idle:
        wait(executor)
    executor.close()


def test_nothing_is_planned_on_a_step_that_failed_before_its_failure_is_known() -> None:
    """Once, the next step was planned as if the copies of the failed one had been made."""
    worker = GatedWorker()
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan())
    worker.may_compute.release()
    select.select([executor.fileno()], [], [], 10)
    assert not executor.can_take
    executor.take_results()
    assert executor.can_take
    executor.close()


def test_whatever_a_step_raises_the_next_runs() -> None:
    class Leaving(GatedWorker):
        def run(self, plan: StepPlan, on_computed: Callable[[], None] | None = None) -> StepResult:
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


def test_a_pull_starts_when_the_steps_that_were_under_way_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreHarness()
    done: list[str] = []
    monkeypatch.setattr(core.links, "start", lambda pull: done.append(f"start {pull.transfer_id}"))
    monkeypatch.setattr(core.links, "cancel", lambda transfer_id: done.append(f"cancel {transfer_id}"))
    steps = SimpleNamespace(num_submitted=2, num_ended=1)
    monkeypatch.setattr(core._core, "_executor", steps)
    outbox = core.scheduler.state.outbox
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
