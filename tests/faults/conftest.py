"""Meshes that stand for many cells, one at a time, and the single engine whose tokens are the right ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from faults import clocks
from faults.matrix import Cell, Fault
from faults.node import Node, environment
from faults.stage import Stage, StageSettings, free_port, standing
from faults.trial import RightTokens
from faults.wires import obstacle, wires
from support import mesh
from support.tiny_models import make_tiny

# Two of each engine, one with the wrong model, and the rest of the mesh.
NUM_STATIONS = 6
# What a whole matrix writes to one of them, several times over; kept in memory.
SMALL_DISK_BYTES = 128 << 20


@pytest.fixture(autouse=True)
def no_processes_left() -> None:
    """Here services outlive the test in which they were started again; each mesh ends its own when it is taken down."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and one of the same shapes with other weights."""
    folder = tmp_path_factory.mktemp("fault-models")
    return make_tiny("llama", folder / "model"), make_tiny("llama", folder / "wrong", seed=1)


@pytest.fixture(scope="session")
def right_tokens(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RightTokens]:
    """What one engine alone answers."""
    folder, port = tmp_path_factory.mktemp("single"), free_port()
    flags = ("--model", str(models[0]), "--dtype", "float32", "--port", str(port), "--grpc-port", "0")
    more = ("--cpu-threads", "1", "--kv-cache-memory-bytes", str(8 << 20), "--block-size", "32")
    single = Node("single", lambda _: mesh.start("decode", *flags, *more, folder=folder, env=environment()), port=port)
    single.start()
    single.wait_ready()

    def ask(body: dict[str, Any]) -> list[int]:
        answer = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions", json=body | {"return_token_ids": True}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    yield ask
    single.close()


@pytest.fixture(scope="session")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a file system of its own that a test may fill; an ordinary folder where this process may mount none."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = _mount(folder)
    yield folder
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def stage_for(
    models: tuple[Path, Path], small_disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Cell], Stage]]:
    """The mesh that a cell needs; the one before is taken down when it was another kind."""
    model, wrong_model = models
    with ExitStack() as stack:
        standing_now: dict[str, tuple[Stage, ExitStack]] = {}

        def give(cell: Cell) -> Stage:
            kind = cell.kind
            if cell.row.fault is Fault.DISK_FULL and not small_disk.is_mount():
                pytest.skip("a disk to be filled cannot be mounted here (needs root)")
            if cell.has_wires and (reason := obstacle()):
                pytest.skip(reason)
            if cell.row.fault is Fault.CLOCK_SKEW and (reason := clocks.obstacle()):
                pytest.skip(reason)
            if kind not in standing_now:
                for _, own in standing_now.values():
                    own.close()
                standing_now.clear()
                own = stack.enter_context(ExitStack())
                folder = tmp_path_factory.mktemp("stage")
                wired = own.enter_context(wires(NUM_STATIONS)) if cell.has_wires else None
                settings = StageSettings(
                    policy=cell.policy, connector=cell.connector, model=model, wrong_model=wrong_model,
                    folder=folder, valkey_folder=small_disk, wires=wired,
                )  # fmt: skip
                standing_now[kind] = own.enter_context(standing(settings)), own
            return standing_now[kind][0]

        yield give


def _mount(folder: Path) -> bool:
    """Give the folder a small file system, where that is allowed."""
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
