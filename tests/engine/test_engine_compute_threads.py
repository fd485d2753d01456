"""Compute threads are on the cores and at the niceness that are configured, and nothing else of the process is."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from pdmesh.config import EngineConfig
from pdmesh.engine.backend import Backend
from pdmesh.engine.compute_threads import resolve_threads
from pdmesh.engine.cpu_backend import CpuBackend
from pdmesh.engine.executor import Executor
from pdmesh.engine.plan import StepPlan, StepResult
from pdmesh.engine.server.preflight import check_engine
from pdmesh.engine.torch_backend import TorchBackend
from pdmesh.errors import ConfigError
from support.library_threads import library_threads

# With one core there is nothing to choose from, but being pinned to it can be seen all the same.
CORES = tuple(sorted(os.sched_getaffinity(0)))[-2:]
LISTED = ",".join(map(str, CORES))


def niceness_of(thread_id: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread_id)


def started(wanted: int, before: set[int]) -> dict[int, Path]:
    """Those that came, once they have got their names and places."""
    deadline = time.monotonic() + 10
    while len(found := {key: task for key, task in library_threads().items() if key not in before}) < wanted:
        assert time.monotonic() < deadline, f"{len(found)} threads of {wanted}"
        time.sleep(0.01)
    time.sleep(0.05)
    return found


class Witness:
    """A worker that looks where it runs."""

    def run(self, plan: StepPlan, on_begin: object = None) -> StepResult:
        self.thread_id = threading.get_native_id()
        self.cores = os.sched_getaffinity(0)
        self.niceness = niceness_of(self.thread_id)
        return StepResult(token_ids=[])


def seen_by_step(backend: Backend) -> Witness:
    witness = Witness()
    executor = Executor(witness, is_async=True, on_start=backend.step_thread.take)
    executor.submit(StepPlan())
    executor.close()
    return witness


@pytest.mark.parametrize(
    ("settings", "count", "cores"),
    [
        ({"cpu_cores": LISTED}, len(CORES), CORES),
        ({"cpu_cores": LISTED, "cpu_threads": 1}, 1, CORES[:1]),
        ({"cpu_threads": 3}, 3, ()),
    ],
)
def test_each_thread_has_a_core_of_its_own(settings: dict[str, object], count: int, cores: tuple[int, ...]) -> None:
    threads = resolve_threads(EngineConfig.model_validate(settings))
    assert (threads.count, threads.cores) == (count, cores)


def test_no_more_threads_than_a_container_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.engine.compute_threads.usable_cores", lambda: 3)
    assert resolve_threads(EngineConfig()).count == 3


def test_a_core_that_may_not_be_used_is_named_with_those_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 5})
    with pytest.raises(ConfigError, match=r"cpu-cores 1,4-6: core 4 is not one .* 0-2,5$"):
        resolve_threads(EngineConfig(cpu_cores="1,4-6"))


def test_it_is_refused_before_a_core_is_started() -> None:
    config = EngineConfig(model="none-such", cpu_cores="1023", secret="a secret of this test", port=0, grpc_port=0)
    with pytest.raises(ConfigError, match="cpu-cores 1023: core 1023"):
        asyncio.run(check_engine(config))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_more_threads_than_cores_are_told_of(
    num_threads: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sixty-four threads in a container of two cores took three times as long, and nothing said why."""
    monkeypatch.setattr("pdmesh.engine.server.preflight.usable_cores", lambda: 2)
    config = EngineConfig(
        model="none-such", cpu_threads=num_threads, secret="a secret of this test", port=0, grpc_port=0
    )
    with pytest.raises(ConfigError, match="none-such"):
        asyncio.run(check_engine(config))
    assert ("3 compute threads are more than the cores" in caplog.text) == (num_threads == 3)


def test_the_library_gets_one_thread_per_core_and_the_first_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before, own = set(library_threads()), niceness_of(0)
    with closing(CpuBackend(len(CORES), cores=CORES, niceness=2)) as backend:
        others = started(len(CORES) - 1, before)
        assert {frozenset(os.sched_getaffinity(thread)) for thread in others} == {
            frozenset({core}) for core in CORES[1:]
        }
        assert {niceness_of(thread) for thread in others} <= {own + 2}
        step = seen_by_step(backend)
        assert step.cores == {CORES[0]}
        assert step.niceness == own + 2
    # The core's own loop has its turn before them, and any core.
    assert niceness_of(0) == own
    assert os.sched_getaffinity(0) > {CORES[0]} or len(os.sched_getaffinity(0)) == 1


def test_threads_without_cores_run_anywhere() -> None:
    before, own = set(library_threads()), niceness_of(0)
    with closing(CpuBackend(3)) as backend:
        others = started(2, before)
        assert {frozenset(os.sched_getaffinity(thread)) for thread in others} == {frozenset(os.sched_getaffinity(0))}
        assert {niceness_of(thread) for thread in others} == {own}
        step = seen_by_step(backend)
        assert (step.cores, step.niceness) == (os.sched_getaffinity(0), own)


class TorchWitness(Witness):
    """A worker whose step is large enough for torch to share it among its team."""

    def run(self, plan: StepPlan, on_begin: object = None) -> StepResult:
        before = {int(task.name) for task in Path("/proc/self/task").iterdir()}
        torch.ones(512, 512) @ torch.ones(512, 512)
        team = {int(task.name) for task in Path("/proc/self/task").iterdir()} - before
        self.team = {thread: (os.sched_getaffinity(thread), niceness_of(thread)) for thread in team}
        return super().run(plan, on_begin)


def test_torch_starts_its_team_from_a_thread_on_all_of_the_cores() -> None:
    own, threads = niceness_of(0), torch.get_num_threads()
    witness = TorchWitness()
    try:
        with closing(TorchBackend(2, cores=CORES, niceness=1)) as backend:
            executor = Executor(witness, is_async=True, on_start=backend.step_thread.take)
            executor.submit(StepPlan())
            executor.close()
    finally:
        torch.set_num_threads(threads)
    assert (witness.cores, witness.niceness) == (set(CORES), own + 1)
    assert len(witness.team) == 1
    assert list(witness.team.values()) == [(set(CORES), own + 1)]


def test_a_core_that_has_gone_leaves_the_thread_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(CpuBackend(1, cores=(1023,))) as backend:
        assert seen_by_step(backend).cores == os.sched_getaffinity(0)
