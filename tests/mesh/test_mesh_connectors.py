"""Meshes whose engines exchange KV over one of the rarer connectors: it moves, and what fails is fetched over the next."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from pdmesh.connector.file_format import OWNER_FILE
from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh
from support.native_libraries import missing

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


# Back-off, interpreter, NIXL and UCX; nothing tells from outside when it is ready.
HELPER_STARTS_WITHIN_S = 6.0


def prompt(seed: int) -> list[int]:
    return [100 + (seed * 7919 + index * 31) % 4000 for index in range(160)]


def route_of(running: Mesh, seed: int) -> dict[str, str]:
    """Send a prompt that nobody has seen; what the debug header says of it."""
    answer = running.complete(prompt(seed))
    fields = dict(part.strip().split("=", 1) for part in answer["headers"]["x-pdmesh-route"].split(";"))
    assert len(answer["choices"][0]["token_ids"]) == 8
    return fields


def test_offers_travel_as_files_and_otherwise_when_they_cannot_be_written(tmp_path: Path) -> None:
    options = json.dumps({"file": {"path": str(tmp_path)}})
    with mesh(
        DEMO_MODEL,
        connector="file,grpc",
        engine_flags=("--connector-options", options),
        prefill_flags=("--engine-id", "p"),
        decode_flags=("--engine-id", "d"),
    ) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        assert route_of(running, 1)["kv"] == "file"
        (directory,) = [entry for entry in tmp_path.iterdir() if entry.name.startswith("p@")]
        running.wait_nothing_held()
        assert os.listdir(directory) == [OWNER_FILE]
        # The owner's next file cannot have its directory: it tells the consumer, which asks for another way.
        shutil.rmtree(directory)
        directory.write_text("in the way")
        assert route_of(running, 2)["kv"] == "grpc:after:file"
        assert prefill.metric("pdmesh_offers_unpublished_total") == 1
        assert decode.metric("pdmesh_connector_fallbacks_total") == 1
        # One that was only removed is made anew, by the owner itself.
        directory.unlink()
        assert route_of(running, 3)["kv"] == "file"
        assert prefill.metric("pdmesh_offer_directories_remade_total") == 1
        running.wait_nothing_held()
    assert not [entry for entry in tmp_path.iterdir() if entry != directory]


def test_a_handoff_s_two_ends_are_on_the_machine_s_clock() -> None:
    with mesh(DEMO_MODEL, connector="shm,grpc") as running:
        (prefill,), (decode,) = running.prefill, running.decode
        for seed in (1, 2):
            before_s = time.monotonic()
            assert route_of(running, seed)["kv"] == "shm"
            computed_s = prefill.metric("pdmesh_handoff_clock_seconds")
            resumed_s = decode.metric("pdmesh_handoff_clock_seconds")
            assert before_s < computed_s < resumed_s < time.monotonic()
        # Decode awaits the offer at prefill, whose core tells it: the first time the proxy may not have met both yet.
        deadline_s = time.monotonic() + 5.0
        while not decode.metric("pdmesh_requests_told_ahead_total"):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.mark.skipif(bool(missing("mooncake")), reason=missing("mooncake"))
def test_kv_moves_over_mooncake() -> None:
    with mesh(DEMO_MODEL, connector="mooncake,grpc") as running:
        for seed in (1, 2):
            assert route_of(running, seed)["kv"] == "mooncake"
        running.wait_nothing_held()


@pytest.mark.skipif(bool(missing("nixl")), reason=missing("nixl"))
def test_a_pull_goes_on_over_the_next_connector_when_the_first_breaks() -> None:
    with mesh(DEMO_MODEL, connector="nixl,grpc", engine_flags=("--kv-load-failure-policy", "fail")) as running:
        (prefill,), (decode,) = running.prefill, running.decode
        assert route_of(running, 1)["kv"] == "nixl"
        # What decode is connected to is gone; the process that takes its place is another peer to NIXL.
        (helper,) = [
            child
            for child in psutil.Process(prefill.process.pid).children(recursive=True)
            if "pdmesh.connector.native_process" in " ".join(child.cmdline())
        ]
        helper.kill()
        assert route_of(running, 2)["kv"] == "grpc:after:nixl"
        assert decode.metric("pdmesh_connector_fallbacks_total") == 1
        running.wait_nothing_held()
        # Hands are shaken anew: over what prefill has by then, so its next helper is given time to be there.
        time.sleep(HELPER_STARTS_WITHIN_S)
        assert route_of(running, 3)["kv"] == "nixl"
