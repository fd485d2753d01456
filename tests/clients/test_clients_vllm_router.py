"""vllm-router 0.1.17, unchanged, in front of our prefill and decode."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh
from support.router import free_port, running_router

ROUTER = os.environ.get("PDMESH_TEST_VLLM_ROUTER") or shutil.which("vllm-router")

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not ROUTER, reason="vllm-router is not installed; ./dev test installs it"),
]

PROMPT = "A list of the planets of the solar system, from the sun outwards, with one remark on each:"


def test_router_runs_both_legs_and_kv_moves(tmp_path: Path) -> None:
    with mesh(DEMO_MODEL) as running, router(running, tmp_path) as url:
        alone = running.complete(PROMPT, url=running.prefill[0].http, max_tokens=8)
        before = running.decode[0].metric("pdmesh_transfer_bytes_total")
        body = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == alone["choices"][0]["text"]
        assert running.decode[0].metric("pdmesh_transfer_bytes_total") > before

        chat = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 8,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat, timeout=60) as stream:
            assert stream.status_code == 200
            assert "data: [DONE]" in "".join(stream.iter_text())
        running.wait_nothing_held(timeout_s=40)


@contextlib.contextmanager
def router(running: Mesh, folder: Path) -> Iterator[str]:
    """A vllm-router process over the mesh's first prefill and decode; yields its URL."""
    port, log_path = free_port(), folder / "router.log"
    command = [str(ROUTER), "--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prefill", running.prefill[0].http, "--decode", running.decode[0].http]
    command += ["--prometheus-port", str(free_port())]
    with running_router(command, port, log_path) as url:
        yield url
