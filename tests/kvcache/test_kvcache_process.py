"""The service as its own process: memory shared across processes, an orderly end, and nothing left after a violent one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pdmesh import embedded_valkey
from support.tier import SECRET, RunningTier, chain, running_engine

pytestmark = pytest.mark.timeout(60)


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], RunningTier]]:
    """A kvcache process that has reported ready; to be called with an event loop running."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "pdmesh_kvcache", "--port", "0", "--grpc-port", "0", "--notify-fd", str(writer), *flags],
        env={**os.environ, "PDMESH_SECRET": SECRET},
        pass_fds=[writer],
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            facts = json.loads(lines.readline())
        yield process, RunningTier(facts["http_port"], facts["grpc_port"])
    finally:
        process.kill()
        process.communicate()


def test_blocks_cross_processes_over_shared_memory_and_the_end_is_orderly(tmp_path: Path) -> None:
    valkey = embedded_valkey.start(tmp_path / "v", maxmemory_bytes=64 << 20)

    async def scenario() -> None:
        keys = chain("prompt", 6)
        ids = list(range(6))
        async with running_engine("prefill") as prefill:
            content = prefill.fill(ids, seed=1)
            with started("--valkey", valkey.url) as (process, tier):
                await prefill.store(tier, keys, ids)
                await tier.until("store_blocks_committed_total", lambda value: value == 6)
                reply = await tier.lookup(keys)
                prefill.fill(ids, seed=2)
                assert (await prefill.pull(tier, reply)).reason == ""
                assert np.array_equal(prefill.pool.blocks[:6], content)
                await tier.close()
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=15)
                assert process.returncode == 0, errors
                assert b"Traceback" not in errors
            with started("--valkey", valkey.url) as (process, tier):
                assert (await tier.lookup(keys)).num_backing == 6
                await tier.close()

    try:
        asyncio.run(scenario())
    finally:
        valkey.stop()


def test_nothing_is_left_after_sigkill() -> None:
    def leftovers() -> set[str]:
        sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "pdmesh" in line}
        return sockets | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}

    async def scenario() -> None:
        async with running_engine("prefill") as prefill:
            before = leftovers()
            with started() as (process, tier):
                prefill.fill([0], seed=1)
                await prefill.store(tier, chain("prompt", 1), [0])
                await tier.until("store_blocks_committed_total", lambda value: value == 1)
                await tier.close()
                process.kill()
                process.wait()
            ours = {name for name in leftovers() - before if "kvcache" in name or str(process.pid) in name}
            assert ours == set()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--valkey", "http://127.0.0.1:6379"], "valkey: 'http://127.0.0.1:6379' is not the URL"),
        (["--connector", "carrier-pigeon"], "connector"),
        (["--arena-bytes", "12"], "arena-bytes"),
        (["--host", "0.0.0.0", "--secret", "short"], "at least 16"),
    ],
)
def test_wrong_setting_is_one_line_and_exit_code_2(flags: list[str], complaint: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pdmesh_kvcache", "--port", "0", "--grpc-port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_service_imports_no_torch() -> None:
    code = "import sys, pdmesh_kvcache.server; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
