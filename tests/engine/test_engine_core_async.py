"""The executor has at most two steps under way, whichever ends first and whoever looks; a failed one changes nothing of it."""

import select
import threading
from collections.abc import Callable

import pytest

from pdmesh.engine.executor import Executor
from pdmesh.engine.plan import StepPlan, StepResult


class ToldWorker:
    """Does each half of a step when it is told to, and says when it has."""

    def __init__(self) -> None:
        self.may_compute = threading.Semaphore(0)
        self.may_sample = threading.Semaphore(0)
        self.has_computed = threading.Semaphore(0)

    def run(self, plan: StepPlan, on_computed: Callable[[], None] | None = None) -> StepResult:
        assert self.may_compute.acquire(timeout=10)
        if not plan.rows:
            raise RuntimeError("the device is on fire")
        if on_computed is not None:
            on_computed()
        self.has_computed.release()
        assert self.may_sample.acquire(timeout=10)
        return StepResult(token_ids=list(plan.rows))

    def compute(self) -> None:
        self.may_compute.release()
        assert self.has_computed.acquire(timeout=10)


@pytest.fixture
def worker() -> ToldWorker:
    return ToldWorker()


def end(executor: Executor, worker: ToldWorker) -> None:
    """Let all that is under way end."""
    for _ in range(3):
        worker.may_compute.release()
        worker.may_sample.release()
    executor.close()


def test_a_step_that_ended_is_under_way_until_its_result_was_taken(worker: ToldWorker) -> None:
    """Once, a third was planned here: on tokens that the scheduler had not heard of for two steps."""
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    worker.compute()
    assert executor.can_take
    executor.submit(StepPlan(rows=[2]))
    assert not executor.can_take
    worker.may_sample.release()
    # It computes, so the first has ended.
    worker.compute()
    assert not executor.can_take
    [result] = executor.take_results()
    assert isinstance(result, StepResult)
    assert result.token_ids == [1]
    # One under way again, which samples.
    assert executor.can_take
    end(executor, worker)


def test_a_failed_step_does_not_end_planning_ahead(worker: ToldWorker) -> None:
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan())
    worker.may_compute.release()
    select.select([executor.fileno()], [], [], 10)
    [failed] = executor.take_results()
    assert str(failed) == "the device is on fire"
    executor.submit(StepPlan(rows=[1]))
    worker.compute()
    assert executor.can_take
    end(executor, worker)


def test_a_step_that_samples_is_waited_for_without_asynchronous_scheduling(worker: ToldWorker) -> None:
    executor = Executor(worker, is_async=False)
    executor.submit(StepPlan(rows=[1]))
    worker.compute()
    assert not executor.can_take
    end(executor, worker)
