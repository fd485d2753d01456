"""`pdmesh up` as a user runs it, with the demo model: it serves, it heals, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 90.0
GONE_TIMEOUT_S = 10.0


class Up:
    """A running `pdmesh up`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.05)

    def pid(self, service: str) -> int:
        """From the table that it printed."""
        found = re.search(rf"^{service} +(\d+) ", self.output, re.MULTILINE)
        assert found is not None, self.output
        return int(found[1])

    def engine_url(self, service: str) -> str:
        """Its own HTTP port, from the table."""
        found = re.search(rf"^{service} +\d+ +(\d+) ", self.output, re.MULTILINE)
        assert found is not None, self.output
        return f"http://127.0.0.1:{found[1]}"

    def log_of(self, service: str) -> str:
        """What it wrote, by the table."""
        found = re.search(rf"^{service} .* (/\S+)$", self.output, re.MULTILINE)
        assert found is not None, self.output
        return Path(found[1]).read_text()

    def everything(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def complete(self, prompt: str = "The capital of France is", **fields: object) -> httpx.Response:
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def run(self, command: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """One of the command line's clients, against this mesh."""
        full = [sys.executable, "-m", "pdmesh", command, "--url", f"{self.url}/v1", *flags]
        return subprocess.run(full, capture_output=True, text=True, timeout=60, check=True)

    def scale(self, *engines: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdmesh", "scale", "--port", str(self.port), *engines]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@contextlib.contextmanager
def up(folder: Path, *flags: str, wait: bool = True) -> Iterator[Up]:
    port = free_port()
    log = folder / "up.log"
    small = ["--kv-cache-memory-bytes", str(64 << 20), "--kvcache-args", f"--arena-bytes {64 << 20}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdmesh", "up", "--port", str(port), *small, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"XDG_STATE_HOME": str(folder)},
        )
    running = Up(process, port, log)
    try:
        if wait:
            running.wait_for("ready at http://")
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=GONE_TIMEOUT_S)
    alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"still running: {alive}"


def shared_memory() -> set[str]:
    """Named segments that are ours: nothing else on the machine uses these names."""
    return {name for name in os.listdir("/dev/shm") if "pdmesh" in name}


def test_up_serves_heals_scales_and_leaves_nothing(tmp_path: Path) -> None:
    prompt = "One line for each planet of the solar system, from the sun outwards. " * 4
    before = shared_memory()
    with up(tmp_path) as mesh:
        # The table, and a command line that works as printed.
        assert {"prefill-1", "decode-1", "proxy", "kvcache", "valkey"} <= {
            line.split()[0] for line in mesh.output.splitlines() if line.strip()
        }
        curl = next(line for line in mesh.output.splitlines() if line.strip().startswith("curl "))
        answer = subprocess.run(curl.strip(), shell=True, capture_output=True, text=True, check=True, timeout=60)
        assert '"text":' in answer.stdout
        first = mesh.complete(prompt)
        assert "prefill=prefill-1; decode=decode-1" in first.headers["x-pdmesh-route"]

        # The clients that we ship.
        assert mesh.run("chat", "-q", "Say hello.", "--max-tokens", "5", "--stats").stdout.strip()
        assert mesh.run("complete", "-q", "One, two,", "--max-tokens", "5", "--temperature", "0").stdout.strip()
        _benchmark_puts_servers_side_by_side(mesh.url)

        # A killed engine comes back, its core dies with it, and the answer stays the same.
        killed = psutil.Process(mesh.pid("decode-1"))
        family = [killed, *killed.children(recursive=True)]
        killed.kill()
        wait_gone(family)
        assert mesh.complete(prompt).json()["choices"] == first.json()["choices"]
        mesh.wait_for("decode-1 ended (signal 9), restarted in 0.5 s")

        # So does the door, and who comes meanwhile waits there.
        os.kill(mesh.pid("proxy"), signal.SIGKILL)
        mesh.wait_for("proxy ended (signal 9)")
        assert mesh.complete(prompt).json()["choices"] == first.json()["choices"]

        # One engine more, and one less.
        grown = mesh.scale("decode=2")
        assert grown.returncode == 0, grown.stderr
        assert re.search(r"decode-2 added, .* pid \d+, http \d+, grpc \d+, log .*decode-2.log", grown.stdout)
        shrunk = mesh.scale("decode=1")
        assert "decode-2 drained and removed" in shrunk.stdout
        refused = mesh.scale("decode=0")
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
        assert mesh.complete(prompt).status_code == 200

        # A router's prefill leg, whose KV nobody fetches.
        leg = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        offered = httpx.post(f"{mesh.engine_url('prefill-1')}/v1/completions", json=leg, timeout=60)
        assert offered.json()["kv_transfer_params"]["remote_request_id"]

        everything = mesh.everything()
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(60) == 0
        wait_gone(everything)
        # There was no engine left to fetch it, so that nobody waited for its lease.
        assert "not drained within" not in mesh.log_of("prefill-1")
        assert "ending 1 offers" in mesh.log_of("prefill-1")
        assert "stopped; nothing is left running" in mesh.output
    assert shared_memory() <= before
    left = {path.name for path in (tmp_path / "pdmesh").glob("run-*/*")}
    assert left == {"logs"}


def test_killed_up_takes_everything_with_it(tmp_path: Path) -> None:
    before = shared_memory()
    with up(tmp_path, "--connector", "nixl,grpc", "--aggregated") as mesh:
        everything = mesh.everything()
        assert len(everything) >= 4
        mesh.process.kill()
        mesh.process.wait()
        wait_gone(everything)
    assert shared_memory() <= before


def test_printed_commands_work_with_a_key_and_engines_that_cannot_pair_are_named(tmp_path: Path) -> None:
    sizes = ("--prefill-args", "--block-size 1", "--decode-args", "--block-size 1024")
    with up(tmp_path, "--api-key", "a-key,another", *sizes, "--no-kvcache") as mesh:
        printed = [line.strip() for line in mesh.output.splitlines() if "a-key" not in line]
        curl = next(line for line in printed if line.startswith("curl "))
        chat = next(line for line in printed if " chat" in line)
        for command in (curl, f"{chat} -q Hello --max-tokens 4"):
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, (command, done.stderr)
            assert "Unauthorized" not in done.stdout
        # Blocks of one token are not for the CPU library either.
        slow, warning = [line for line in printed if line.startswith("warning: ")]
        assert "prefill-1 computes with PyTorch" in slow
        assert "(block_size)" in slow
        assert "prefill-1 cannot hand over to decode-1: " in warning
        assert "block size 1 and 1024 differ" in warning
        done = subprocess.run(
            [sys.executable, "-m", "pdmesh", "complete", "One, two,", "--url", f"{mesh.url}/v1", "--max-tokens", "4"],
            env=os.environ | {"PDMESH_API_KEY": "a-key,another"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_ctrl_c_during_start_leaves_nothing(tmp_path: Path) -> None:
    with up(tmp_path, "--aggregated", wait=False) as mesh:
        mesh.wait_for("decode-1: starting")
        everything = mesh.everything()
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(30) == 0
        wait_gone(everything)


def test_model_that_cannot_load_ends_in_one_line(tmp_path: Path) -> None:
    """Its head is read before anything starts."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 64)
    with up(tmp_path, "--model", str(broken), wait=False) as mesh:
        assert mesh.process.wait(60) == 2
        last = mesh.output.splitlines()[-1]
        assert last.startswith("pdmesh up: ")
        assert "broken.gguf" in last
        assert "starting" not in mesh.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere/at/all"], ["/nowhere/at/all", "does not exist"]),
        (["--dekode", "2"], ["--dekode"]),
        (["--decode", "0"], ["decode", "greater than or equal to 1", "0"]),
        (["--host", "0.0.0.0"], ["mesh secret is required"]),
        (["--prefill-args", "'open"], ["prefill-args", "quotation"]),
        (["--decode-args=--no-such-flag 1"], ["decode-1", "--no-such-flag"]),
        (["--kvcache-args=--arena-bytes 1"], ["kvcache", "arena-bytes"]),
        (["--secret", "short"], ["secret", "at least 16"]),
        (["--max-model-len", "999999"], ["max-model-len 999999", "8192"]),
        (["--kv-cache-memory-bytes", "1000"], ["kv-cache-memory-bytes 1000"]),
        (["--aggregated", "--prefill", "2"], ["aggregated", "--prefill"]),
        (["--valkey", "redis://127.0.0.1:1/0"], ["redis://127.0.0.1:1/0", "--no-valkey-required"]),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    with up(tmp_path, *flags, wait=False) as mesh:
        assert mesh.process.wait(60) == 2
        last = mesh.output.splitlines()[-1]
        assert last.startswith("pdmesh up: ")
        assert all(word in last for word in words), last
        assert "starting" not in mesh.output


def test_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with up(tmp_path, "--port", str(port), wait=False) as mesh:
            assert mesh.process.wait(30) == 2
            assert mesh.output.splitlines() == [
                f"pdmesh up: port {port} on 127.0.0.1 is in use: stop what listens there, or choose another with --port"
            ]


def _benchmark_puts_servers_side_by_side(url: str) -> None:
    size = ["--rounds", "2", "--num-requests", "3", "--concurrency", "2", "--input-len", "40", "--output-len", "4"]
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), f"mesh={url}", f"peer={url}/v1", *size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert done.stdout.splitlines()[0].split() == ["mesh", "peer", "peer", "/", "mesh"]
    assert float(lines["output tok/s"][2]) > 0
    assert lines["errors"][1:] == ["0", "0"]
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=True)
    assert set(json.loads(as_json.stdout)["summary"]) == {"mesh", "peer"}


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
