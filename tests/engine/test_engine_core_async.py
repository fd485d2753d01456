"""At most two steps are under way, whichever ends first and whoever looks; what failed, or is busy, holds nothing else up."""

import select
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pdmesh.engine.executor import Executor
from pdmesh.engine.plan import StepPlan, StepResult
from support.core_harness import CoreHarness


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


def test_failed_steps_that_are_not_in_a_row_do_not_end_the_core() -> None:
    core = CoreHarness(max_num_seqs=1)
    for ids in ("abc", "def"):
        core.backend.fail_next = 2
        for request_id in ids:
            core.add([10, 11, 12], request_id, max_tokens=2)
        core.run()
        assert [core.finish_reason(request_id) for request_id in ids] == ["error", "error", "length"]


def test_pulls_are_cancelled_while_a_step_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreHarness()
    cancelled: list[str] = []
    monkeypatch.setattr(core.links, "cancel", cancelled.append)
    monkeypatch.setattr(core._core, "_executor", SimpleNamespace(can_take=False, num_submitted=1, num_ended=0))
    core.scheduler.state.outbox.cancels.append("t")
    core._core._plan()
    assert cancelled == ["t"]
