"""The tier: prompts outlive the engines that computed them, and a missing Valkey costs nothing but hits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdmesh import embedded_valkey
from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

PROMPT = " ".join(f"Fact {i}: {i} squared is {i * i}." for i in range(40))

# What a loaded machine makes of a quarter of a second is not what is tested.
PATIENT = ("--kvcache-lookup-timeout-s", "10")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[embedded_valkey.EmbeddedValkey]:
    server = embedded_valkey.start(tmp_path / "valkey", maxmemory_bytes=256 << 20)
    yield server
    server.stop()


def wait_stored(running: Mesh, name: str, at_least: float = 1) -> None:
    assert running.kvcache is not None
    deadline = time.monotonic() + 10
    while running.kvcache.metric(name) < at_least:
        assert time.monotonic() < deadline, (name, running.kvcache.metrics(), running.kvcache.log[-2000:])
        time.sleep(0.1)


def test_prompt_survives_prefill_in_the_arena_and_all_but_valkey_in_valkey(
    valkey: embedded_valkey.EmbeddedValkey,
) -> None:
    with mesh(DEMO_MODEL, kvcache_flags=("--valkey", valkey.url), engine_flags=PATIENT) as running:
        first = running.complete(PROMPT)
        wait_stored(running, "pdmesh_kvcache_slots_used", 10)
        wait_stored(running, "pdmesh_kvcache_backing_writes_total", 10)
        running.prefill.pop().kill()
        running.start_engine("prefill", "--connector", "shm", "--kv-load-failure-policy", "recompute", *PATIENT)
        running.announce()
        running.wait_healthy()
        again = running.complete(PROMPT)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 10 * 32
        assert running.prefill[0].metric("vllm:external_prefix_cache_hits_total") >= 10 * 32
        running.wait_nothing_held()

    with mesh(DEMO_MODEL, kvcache_flags=("--valkey", valkey.url), engine_flags=PATIENT) as restarted:
        third = restarted.complete(PROMPT)
        assert third["choices"] == first["choices"]
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] >= 10 * 32

        valkey.stop()
        other = restarted.complete("Something new: " + PROMPT)
        assert other["choices"][0]["finish_reason"] == "length"
        assert restarted.kvcache is not None
        deadline = time.monotonic() + 10
        while restarted.kvcache.metric("pdmesh_kvcache_backing_up") != 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert restarted.complete(PROMPT)["choices"] == first["choices"]


def test_mesh_starts_and_serves_with_an_unreachable_valkey_when_told_to() -> None:
    with mesh(DEMO_MODEL, kvcache_flags=("--valkey", "redis://127.0.0.1:1/0", "--no-valkey-required")) as running:
        assert running.complete("Hello")["choices"]
        assert running.kvcache is not None
        assert running.kvcache.metric("pdmesh_kvcache_backing_up") == 0
