"""Each service, started as compose and Kubernetes would, in an environment with only what its image installs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.clean_venv import clean_venv
from support.manifests import API_KEY, SECRET, Deployed, from_compose, from_kubernetes

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(900)]

ORIGINS = {"compose": from_compose, "kubernetes": from_kubernetes}
READY_TIMEOUT_S = 120.0
LIGHT = ("proxy", "kvcache")


@contextlib.contextmanager
def started(deployed: Deployed, folder: Path) -> Iterator[str]:
    """Run the command with its environment and file, on free loopback ports; yields the HTTP base URL."""
    config = folder / "config.toml"
    config.write_text(deployed.config)
    secret = folder / "secret"
    secret.write_text(SECRET)
    venv = clean_venv(deployed.service)
    environment = {
        # Nothing of this test's own environment but what a container has.
        "PATH": f"{venv / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder),
        **{
            name: value.replace("/etc/pdmesh-secret/secret", str(secret))
            for name, value in deployed.environment.items()
        },
    }
    command = [str(venv / "bin" / deployed.command[0]), *deployed.command[1:]]
    command = [part.replace("/etc/pdmesh/config.toml", str(config)) for part in command]
    command += ["--host", "127.0.0.1", "--port", "0"]
    command += [] if deployed.service == "proxy" else ["--grpc-port", "0"]
    read_end, write_end = os.pipe()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--notify-fd", str(write_end)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[write_end],
            cwd=folder,
        )
    os.close(write_end)
    try:
        yield f"http://127.0.0.1:{_wait_ready(read_end, folder / 'log')['http_port']}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0, (folder / "log").read_text()
    finally:
        os.close(read_end)
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_ready(read_end: int, log: Path) -> dict[str, object]:
    deadline = time.monotonic() + READY_TIMEOUT_S
    pending = b""
    while time.monotonic() < deadline:
        if not select.select([read_end], [], [], 0.5)[0]:
            continue
        data = os.read(read_end, 65536)
        assert data, f"it ended:\n{log.read_text()[-3000:]}"
        *lines, pending = (pending + data).split(b"\n")
        for message in map(json.loads, lines):
            if message.get("ready"):
                return dict(message)
    raise AssertionError(f"not ready in {READY_TIMEOUT_S} s:\n{log.read_text()[-3000:]}")


@pytest.mark.parametrize("service", LIGHT)
def test_environment_has_no_torch(service: str) -> None:
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ('torch', 'transformers', 'nixl')))"
    assert subprocess.run([str(clean_venv(service) / "bin" / "python"), "-c", code], check=False).returncode == 0


def test_proxy_tokenises_a_gguf_model_without_torch() -> None:
    code = """
from pdmesh.openai.text import load_text_model
text = load_text_model("smollm2-135m")
ids = text.encode("The capital of France is Paris.", False)
assert text.decode(ids, True) == "The capital of France is Paris.", ids
assert "Hello" in text.render_chat([{"role": "user", "content": "Hello"}])
"""
    done = subprocess.run(
        [str(clean_venv("proxy") / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("origin", ORIGINS)
def test_proxy_starts_and_says_that_it_has_no_engines(origin: str, tmp_path: Path) -> None:
    with started(ORIGINS[origin]("proxy"), tmp_path) as url:
        assert httpx.get(f"{url}/health", timeout=10).status_code == 503
        assert httpx.get(f"{url}/v1/models", timeout=10).status_code == 401
        key = {"Authorization": f"Bearer {API_KEY}"}
        assert httpx.get(f"{url}/metrics", headers=key, timeout=10).status_code == 200


@pytest.mark.parametrize("origin", ORIGINS)
def test_kvcache_starts_without_valkey(origin: str, tmp_path: Path) -> None:
    with started(ORIGINS[origin]("kvcache"), tmp_path) as url:
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        assert "pdmesh_" in httpx.get(f"{url}/metrics", timeout=10).text


@pytest.mark.full
@pytest.mark.parametrize("service", ["prefill", "decode"])
@pytest.mark.parametrize("origin", ORIGINS)
def test_engine_starts_and_answers(origin: str, service: str, tmp_path: Path) -> None:
    with started(ORIGINS[origin](service), tmp_path) as url:
        body = {"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
        key = {"Authorization": f"Bearer {API_KEY}"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
