"""A prefill killed with SIGKILL and started again under the same name and port, which is what `pdmesh up` does with one."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

PROMPT = "Explain, in a few plain words and without any formula, number {number}: why the sky is blue by day and red at dusk."


def _stock(running: Mesh, number: int) -> str:
    """Both legs over the engines' HTTP ports; the second one's debug header."""
    body: dict[str, Any] = {"prompt": PROMPT.format(number=number), "temperature": 0, "max_tokens": 4}
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = body | {"max_tokens": 1, "kv_transfer_params": asked}
    leg = httpx.post(f"{running.prefill[0].http}/v1/completions", json=first, timeout=60).json()
    second = body | {"kv_transfer_params": leg["kv_transfer_params"]}
    answer = httpx.post(f"{running.decode[0].http}/v1/completions", json=second, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-pdmesh-route"]


def _ticket(running: Mesh, number: int) -> str:
    return str(running.complete(PROMPT.format(number=number))["headers"]["x-pdmesh-route"])


def test_both_flows_fetch_again_after_a_restart() -> None:
    """Under a fixed name decode went on pulling from the memory of the dead process, and recomputed silently for ever."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--engine-id", "prefill-1", "--grpc-port", str(port))
    with mesh(DEMO_MODEL, prefill_flags=flags) as running:
        assert "kv=shm" in _stock(running, 1)
        assert "kv=shm" in _ticket(running, 2)
        running.prefill.pop().kill()
        running.start_engine("prefill", "--connector", "shm", *flags)
        running.announce()
        running.wait_healthy()
        for number in (3, 4):
            assert "kv=shm" in _stock(running, number)
        for number in (5, 6):
            assert "kv=shm" in _ticket(running, number)
        assert running.decode[0].metric("pdmesh_fallbacks_total") == 0
        running.wait_nothing_held()
