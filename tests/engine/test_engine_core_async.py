"""At most two steps are under way, whichever ends first and whoever looks; what failed, or is busy, holds nothing else up."""

import select
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from pdmesh.engine.backend import StepBatch
from pdmesh.engine.executor import Executor
from pdmesh.engine.plan import StepPlan, StepResult
from support.core_harness import CoreHarness
from support.fake_backend import FakeBackend, expected_tokens


class ToldWorker:
    """Ends a step when it is told to, and says when it has begun one."""

    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)
        self.has_begun = threading.Semaphore(0)

    def run(self, plan: StepPlan, on_begin: Callable[[], None] | None = None) -> StepResult:
        if not plan.rows:
            raise RuntimeError("the device is on fire")
        if on_begin is not None:
            on_begin()
        self.has_begun.release()
        assert self.may_end.acquire(timeout=10)
        return StepResult(token_ids=list(plan.rows))

    def begin(self) -> None:
        assert self.has_begun.acquire(timeout=10)


@pytest.fixture
def worker() -> ToldWorker:
    return ToldWorker()


def end(executor: Executor, worker: ToldWorker) -> None:
    """Let all that is under way end."""
    for _ in range(3):
        worker.may_end.release()
    executor.close()


def test_a_step_that_ended_is_under_way_until_its_result_was_taken(worker: ToldWorker) -> None:
    """Once, a third was planned here: on tokens that the scheduler had not heard of for two steps."""
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan(rows=[1]))
    assert executor.can_take
    executor.submit(StepPlan(rows=[2]))
    assert not executor.can_take
    worker.begin()
    worker.may_end.release()
    # The second has begun, so the first has ended.
    worker.begin()
    assert not executor.can_take
    [result] = executor.take_results()
    assert isinstance(result, StepResult)
    assert result.token_ids == [1]
    assert executor.can_take
    end(executor, worker)


def test_a_failed_step_does_not_end_planning_ahead(worker: ToldWorker) -> None:
    executor = Executor(worker, is_async=True)
    executor.submit(StepPlan())
    select.select([executor.fileno()], [], [], 10)
    # Nothing is planned on it before it is judged.
    assert not executor.can_take
    [failed] = executor.take_results()
    assert str(failed) == "the device is on fire"
    executor.submit(StepPlan(rows=[1]))
    assert executor.can_take
    end(executor, worker)


def test_a_step_is_waited_for_without_asynchronous_scheduling(worker: ToldWorker) -> None:
    executor = Executor(worker, is_async=False)
    executor.submit(StepPlan(rows=[1]))
    worker.begin()
    assert not executor.can_take
    end(executor, worker)


class GatedBackend(FakeBackend):
    """Computes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_compute = threading.Semaphore(0)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        assert self.may_compute.acquire(timeout=10)
        return super().forward(batch)


def test_who_comes_while_a_step_runs_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned already, but has not begun."""
    backend = GatedBackend()
    core = CoreHarness(is_async=True, backend=backend)
    inbox, num_waits = core._inbox, 0
    plain_wait = inbox.wait

    def wait(descriptors: list[int], timeout_s: float | None = None) -> bool:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 1:
            assert core.executor.num_submitted == 2
            core.add([20, 21, 22], "late", max_tokens=3)
            return True
        backend.may_compute.release(8)
        return plain_wait(descriptors, timeout_s)

    monkeypatch.setattr(inbox, "wait", wait)
    core.add([10, 11, 12], "early", max_tokens=3)
    core.run()
    assert [len(step.context_len) for step in backend.steps[:3]] == [1, 2, 2]
    assert core.tokens("early") == expected_tokens([10, 11, 12], 3)
    assert core.tokens("late") == expected_tokens([20, 21, 22], 3)


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
