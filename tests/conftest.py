"""What every test runs under: few threads, no outside configuration, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: tests share few cores, and thread counts must not change results.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests never reach for a hub, and a developer's settings never reach the services under test.
os.environ["HF_HUB_OFFLINE"] = "1"
for _name in [name for name in os.environ if name.startswith("PDMESH_") and not name.startswith("PDMESH_TEST_")]:
    del os.environ[_name]

# Packed weights, and a library that had to be built, go to a cache of the tests' own, which processes and later runs share. A
# test that needs it empty has one for itself.
_cache = Path(tempfile.gettempdir()) / f"pdmesh-tests-{os.getuid()}" / "cache"
(_cache / "pdmesh").mkdir(mode=0o700, parents=True, exist_ok=True)
_usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
# A library that is there already serves; packages stay where they are, since tests install some.
for _library in (_usual / "pdmesh").glob("libpdmesh_cpu-*.so"):
    with contextlib.suppress(FileExistsError):
        (_cache / "pdmesh" / _library.name).symlink_to(_library)
os.environ.setdefault("PIP_CACHE_DIR", str(_usual / "pip"))
os.environ["XDG_CACHE_HOME"] = str(_cache)

# Started in the background, a process ignores Ctrl-C, and so would all that it starts; some tests are about Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the code under test.
settings.register_profile("pdmesh", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdmesh")

ENDING_GRACE_S = 5.0
# Tests here start processes of their own and take seconds each: too much for --quick.
SLOW_FOLDERS = {
    "clients",
    "connector",
    "contract",
    "engine_server",
    "faults",
    "kvcache",
    "mesh",
    "offline",
    "operations",
}

# Single files elsewhere that take 15 s and more.
SLOW_FILES = {
    "test_engine_same_outputs.py",
    "test_engine_scheduler_properties.py",
    "test_models_gemma.py",
    "test_models_hybrid_engine.py",
    "test_models_transformers.py",
    "test_soak_minute.py",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `./dev test --quick` leaves out; where processes share the files, the long ones come first, so that all end
    at about the same time.
    """
    for item in items:
        if item.path.parent.name in SLOW_FOLDERS or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.services)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("services") is None)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Let a report pass between processes where a test has logged a lone surrogate: one ended the whole run."""
    return _encodable((yield))


def _encodable(part: Any) -> Any:
    if isinstance(part, str):
        return part.encode("utf-8", "backslashreplace").decode()
    if isinstance(part, dict):
        return {key: _encodable(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return type(part)(_encodable(value) for value in part)
    return part


@pytest.fixture(autouse=True)
def no_processes_left() -> Iterator[None]:
    """Fail a test that leaves a child process running; fixtures of a wider scope start theirs before this one looks."""
    before = _children()
    yield
    deadline = time.monotonic() + ENDING_GRACE_S
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left, f"the test left processes running: {left}"


def _children() -> set[psutil.Process]:
    """Living children, without Python's own helper that cleans up after multiprocessing."""
    return {
        child
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and child.status() != psutil.STATUS_ZOMBIE and not _is_resource_tracker(child)
    }


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
