"""The library's threads: asleep when there is nothing to do, late ones waited for, where and as nice as they were asked to be."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pdmesh_kernels.cpu.library import Library, LibraryError, Pool
from support.library_threads import library_threads

NUM_THREADS = 3
# One wake-up on a busy machine; a thread that spins takes the window.
MOST_IDLE_S = 0.005
WINDOW_S = 1.0


def run_s(task: Path) -> float:
    """As the scheduler counts it: ticks are too coarse."""
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def turns_on_a_core(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[2])


class Angles:
    """A small operation with pieces for several threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._positions = np.arange(2000, dtype=np.int64)
        self._frequencies = np.full(16, 0.01, dtype=np.float32)

    def run(self, pool: Pool) -> np.ndarray:
        angles = np.empty((2000, 32), dtype=np.float32)
        arguments = (self._positions.ctypes.data, 2000, self._frequencies.ctypes.data, 32, 1.0, angles.ctypes.data)
        self._library.call("pdm_angles", pool.handle, *arguments)
        return angles

    @property
    def wanted(self) -> np.ndarray:
        angles = self._positions[:, None] * self._frequencies
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


@pytest.fixture
def angles(library: Library) -> Angles:
    return Angles(library)


@pytest.fixture
def before() -> set[int]:
    return set(library_threads())


@pytest.fixture
def pool(library: Library, before: set[int]) -> Iterator[Pool]:
    with closing(Pool(library, NUM_THREADS)) as made:
        yield made


def test_threads_that_have_nothing_to_do_take_no_time(pool: Pool, before: set[int], angles: Angles) -> None:
    for _ in range(20):
        angles.run(pool)
    threads = [task for key, task in library_threads().items() if key not in before]
    assert len(threads) == NUM_THREADS - 1
    # The last run's threads are on their way to sleep.
    time.sleep(0.1)
    used_s = [run_s(task) for task in threads]
    time.sleep(WINDOW_S)
    assert [
        run_s(task) - used for task, used in zip(threads, used_s, strict=True) if run_s(task) - used > MOST_IDLE_S
    ] == []
    # They wake up again.
    np.testing.assert_allclose(angles.run(pool), angles.wanted, atol=1e-4)


def test_more_threads_than_cores_compute_the_same(library: Library, angles: Angles) -> None:
    with closing(Pool(library, 2 * (os.cpu_count() or 1) + 1)) as pool:
        for _ in range(50):
            np.testing.assert_allclose(angles.run(pool), angles.wanted, atol=1e-4)


def test_a_thread_that_has_no_core_is_not_waited_for(library: Library, before: set[int], angles: Angles) -> None:
    allowed, num_runs = os.sched_getaffinity(0), 50
    core = min(allowed)
    with closing(Pool(library, 2, [core, core])) as pool:
        angles.run(pool)
        ((thread, task),) = ((key, task) for key, task in library_threads().items() if key not in before)
        # It has the core only while the caller sleeps, which would have to be in each run.
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setaffinity(0, {core})
        try:
            num_turns = turns_on_a_core(task)
            for _ in range(num_runs):
                np.testing.assert_allclose(angles.run(pool), angles.wanted, atol=1e-4)
            assert turns_on_a_core(task) - num_turns < num_runs / 2
        finally:
            os.sched_setaffinity(0, allowed)


def test_threads_are_where_and_as_nice_as_they_were_asked_to_be(
    library: Library, before: set[int], angles: Angles
) -> None:
    core = max(os.sched_getaffinity(0))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    # The last is not pinned; a core that there is not is as if none had been named.
    with closing(Pool(library, 4, [core, core, -1, 1023], niceness=3)) as pool:
        angles.run(pool)
        threads = [key for key in sorted(library_threads()) if key not in before]
        assert len(threads) == 3
        everywhere = os.sched_getaffinity(0)
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}, everywhere, everywhere]
        assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [own + 3] * 3
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_number_of_threads_that_cannot_be_had_is_named(library: Library) -> None:
    with pytest.raises(LibraryError, match="cpu-threads 1025"):
        Pool(library, 1025)
