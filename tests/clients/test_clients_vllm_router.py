"""vllm-router 0.1.17, unchanged, in front of our prefill and decode."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, mesh

ROUTER = os.environ.get("PDMESH_TEST_VLLM_ROUTER") or shutil.which("vllm-router")

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not ROUTER, reason="vllm-router is not installed; ./dev test installs it"),
]

PROMPT = "A list of the planets of the solar system, from the sun outwards, with one remark on each:"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_router_runs_both_legs_and_kv_moves(tmp_path: Path) -> None:
    with mesh(DEMO_MODEL) as running:
        url = start_router(running, tmp_path)
        try:
            alone = running.complete(PROMPT, max_tokens=8)
            before = running.decode[0].metric("pdmesh_engine_transfer_bytes_total")
            answer = httpx.post(
                f"{url}/v1/completions",
                json={"model": "smollm2-135m", "prompt": PROMPT + " ", "max_tokens": 8, "temperature": 0},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] == alone["choices"][0]["finish_reason"]
            assert running.decode[0].metric("pdmesh_engine_transfer_bytes_total") > before
            with httpx.stream(
                "POST",
                f"{url}/v1/chat/completions",
                json={
                    "model": "smollm2-135m",
                    "messages": [{"role": "user", "content": PROMPT}],
                    "max_tokens": 8,
                    "stream": True,
                },
                timeout=60,
            ) as stream:
                assert stream.status_code == 200
                assert "data: [DONE]" in "".join(stream.iter_text())
            running.wait_nothing_held()
        finally:
            stop_router()


_ROUTERS: list[subprocess.Popen[bytes]] = []


def start_router(running: Mesh, folder: Path) -> str:
    assert ROUTER is not None
    port = free_port()
    log = (folder / "router.log").open("wb")
    _ROUTERS.append(
        subprocess.Popen(
            [
                ROUTER,
                "--vllm-pd-disaggregation",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--prefill",
                running.prefill[0].http,
                "--decode",
                running.decode[0].http,
                "--prometheus-port",
                str(free_port()),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return url
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError((folder / "router.log").read_text(errors="replace")[-3000:])


def stop_router() -> None:
    for process in _ROUTERS:
        process.terminate()
        process.wait(15)
    _ROUTERS.clear()
