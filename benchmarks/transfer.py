"""Measures how fast 64 MB of KV get from one process into another over each connector, sums and generation words checked.

    python benchmarks/transfer.py --json results/today-transfer.json

In turns within one run, each round in another order: one core's memcpy of the same bytes between the same pages; `shm`; bare UCX
(RMA reads by UCP's own calls, of each block and of the whole pool as one range) and a bare NIXL agent that reads all blocks at
once, without helper process, words or sums; two of each in two threads, with half of the blocks each; `nixl` as engines use
it; `grpc`. All of UCX runs with the environment that the connector gives it. The goals: `shm` at least 0.8 of memcpy, `nixl`
within 10 % of bare UCX, the faster of its two. Exit code 1 when one is missed.
"""

import argparse
import ctypes
import functools
import json
import os
import random
import secrets
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdmesh.connector.base import PeerPool, Pull, WorkerConnector
from pdmesh.connector.native_agent import AgentSettings, CopyState, Ranges
from pdmesh.connector.nixl import UCX_ENVIRONMENT, UCX_LOOPBACK_ENVIRONMENT
from pdmesh.connector.options import connector_options
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.connector.shm import ShmMetadata
from pdmesh.connector.shm_socket import fetch_pool
from pdmesh.security import MeshSecret
from transfer_owner import PEER_ID, address_of, make_pool

BLOCK_BYTES = 30 * 3 * 2 * 32 * 64 * 2
"""SmolLM2-135M's: layers, KV heads, keys and values, tokens, their size, bytes of bfloat16."""
NUM_BLOCKS = 91
SHM_GOAL = 0.8
NIXL_GOAL = 0.9


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to get the bytes across: `move` does it once and leaves them in the target pool."""

    name: str
    move: Callable[[], None]


class Puller:
    """A connector's consumer, and the pull of all blocks."""

    def __init__(
        self, connector: WorkerConnector, hello: dict[str, Any], target: KVPool, *, is_checked: bool = True
    ) -> None:
        name = connector.name
        metadata = hello["address"].encode() if name == "grpc" else bytes.fromhex(hello["connectors"][name])
        shape = target.shape
        self._connector = connector
        self._ids = list(range(shape.num_blocks))
        self._generations = hello["generations"]
        self._checksums = hello["checksums"] if is_checked else []
        connector.register(target)
        connector.connect(
            PeerPool(peer_id=PEER_ID, metadata=metadata, num_blocks=shape.num_blocks, block_bytes=shape.block_bytes)
        )

    def move(self) -> None:
        self._connector.start(
            Pull(
                transfer_id=secrets.token_hex(8),
                peer_id=PEER_ID,
                source_block_ids=self._ids,
                generations=self._generations,
                target_block_ids=self._ids,
                deadline_s=30.0,
                checksums=self._checksums,
            )
        )
        select.select([self._connector.fileno()], [], [], 30)
        [result] = self._connector.poll()
        if result.reason:
            sys.exit(f"{self._connector.name}: {result.reason}")


class BareAgent:
    """A NIXL agent that reads blocks at once, all of them or some, and is asked all the time whether it is done."""

    def __init__(self, hello: dict[str, Any], target: KVPool, blocks: slice = slice(None)) -> None:
        from pdmesh.connector.nixl_agent import NixlAgent

        self._agent = NixlAgent(AgentSettings(name=f"bare-{secrets.token_hex(4)}", on_loopback=True))
        self._agent.register(address_of(target), target.shape.total_bytes)
        self._peer = self._agent.add_peer(bytes.fromhex(hello["agent"]))
        self._local = _ranges(address_of(target), target.shape)[blocks]
        self._remote = _ranges(hello["base"], target.shape)[blocks]

    def move(self) -> None:
        handle = self._agent.read(self._local, self._remote, self._peer)
        while (state := self._agent.state(handle)) is CopyState.RUNNING:
            # The agent's own thread does the work.
            time.sleep(0.00005)
        self._agent.release(handle)
        if state is not CopyState.DONE:
            sys.exit("the bare agent's read failed")


class BareUcx:
    """UCX's own reads: of blocks, all of them or some, or of the whole pool as one range."""

    def __init__(
        self, hello: dict[str, Any], target: KVPool, blocks: slice = slice(None), *, in_one_range: bool = False
    ) -> None:
        from transfer_ucx import UcxReader

        local, remote = (_ranges(base, target.shape)[blocks] for base in (address_of(target), hello["base"]))
        reads = [
            (int(here), int(there), int(size)) for (here, size, _), (there, _, _) in zip(local, remote, strict=True)
        ]
        if in_one_range:
            reads = [(reads[0][0], reads[0][1], sum(size for _, _, size in reads))]
        keys = (bytes.fromhex(hello["ucx_address"]), bytes.fromhex(hello["ucx_key"]))
        self._reader = UcxReader(address_of(target), target.shape.total_bytes, *keys, reads)
        self.move = self._reader.move


class InTwoThreads:
    """Two such readers, each with one half and in a thread of its own."""

    def __init__(self, make: Callable[[slice], BareAgent | BareUcx], num_blocks: int) -> None:
        middle = num_blocks // 2
        self._first, self._second = make(slice(middle)), make(slice(middle, None))
        self._thread = ThreadPoolExecutor(1)

    def move(self) -> None:
        second = self._thread.submit(self._second.move)
        self._first.move()
        second.result()


def main() -> int:
    """Measure and report; returns the exit code."""
    arguments = _arguments()
    # For the bare ones here and in the owner; connectors' processes get the same.
    os.environ.update(UCX_ENVIRONMENT | UCX_LOOPBACK_ENVIRONMENT | dict(os.environ))
    shape = PoolShape(arguments.blocks, arguments.block_bytes)
    with ExitStack() as stack:
        hello, secret = _start_owner(stack, arguments.connectors, shape)
        target = make_pool(shape, fill=False)
        source = _source(hello, shape, secret)
        ways = _ways(stack, arguments, hello, secret, source, target)
        times = _measure(ways, source, target, arguments.rounds)
        report = _report(times, shape, hello, arguments)
    print(_table(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    # Without destructors: NIXL's may wait for peers that are gone.
    os._exit(0 if all(goal["met"] for goal in report["goals"]) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--connectors", default="shm,nixl,grpc", type=lambda text: text.split(","))
    parser.add_argument("--connector-options", default="", help="as engines take it")
    parser.add_argument("--json", default="", metavar="FILE", help="write all times there")
    return parser.parse_args()


def _start_owner(stack: ExitStack, names: list[str], shape: PoolShape) -> tuple[dict[str, Any], MeshSecret]:
    secret = secrets.token_hex(16)
    shown = [json.dumps(sorted({*names, "shm"})), str(shape.num_blocks), str(shape.block_bytes), secret]
    owner = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("transfer_owner.py")), *shown],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(owner.kill)
    assert owner.stdout is not None
    return json.loads(owner.stdout.readline()), MeshSecret(secret)


def _source(hello: dict[str, Any], shape: PoolShape, secret: MeshSecret) -> KVPool:
    """The owner's pool itself, for memcpy and to check what arrived."""
    import msgspec

    name = msgspec.msgpack.decode(bytes.fromhex(hello["connectors"]["shm"]), type=ShmMetadata).socket_name
    return fetch_pool(name, PEER_ID, shape, secret).pool


def _ways(
    stack: ExitStack,
    arguments: argparse.Namespace,
    hello: dict[str, Any],
    secret: MeshSecret,
    source: KVPool,
    target: KVPool,
) -> list[Way]:
    def memcpy() -> None:
        ctypes.memmove(target.blocks.ctypes.data, source.blocks.ctypes.data, source.blocks.nbytes)

    options = connector_options(arguments.connector_options)
    ways = [Way(name="memcpy", move=memcpy)]
    for name in arguments.connectors:
        if name == "nixl":
            ways += _bare_ways(hello, target)
        for is_checked in (True, False):
            made = make_worker_connectors(
                [name], peer_id=f"consumer-{name}@{int(is_checked)}", secret=secret, on_loopback=True, options=options
            )
            stack.callback(made[name].close)
            label = name if is_checked else f"{name}, no sums"
            ways.append(Way(name=label, move=Puller(made[name], hello, target, is_checked=is_checked).move))
    return ways


def _bare_ways(hello: dict[str, Any], target: KVPool) -> list[Way]:
    # The agent first: it loads the library.
    agent = BareAgent(hello, target)
    two_agents, two_ucx = (
        InTwoThreads(functools.partial(bare, hello, target), target.shape.num_blocks) for bare in (BareAgent, BareUcx)
    )
    return [
        Way(name="bare ucx", move=BareUcx(hello, target).move),
        Way(name="bare ucx, one range", move=BareUcx(hello, target, in_one_range=True).move),
        Way(name="two bare ucx", move=two_ucx.move),
        Way(name="bare nixl", move=agent.move),
        Way(name="two bare nixl", move=two_agents.move),
    ]


def _measure(ways: list[Way], source: KVPool, target: KVPool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, round by round; the first is a warm-up, in which what arrived is compared byte by byte.

    Each round has another order: what a way finds in the caches depends on the one before it.
    """
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    order = random.Random(1)
    for number in range(rounds + 1):
        for way in order.sample(ways, len(ways)):
            if not number:
                target.blocks[:] = 0
            started_s = time.perf_counter()
            way.move()
            taken_s = time.perf_counter() - started_s
            if number:
                times[way.name].append(taken_s)
            elif not np.array_equal(target.blocks, source.blocks):
                sys.exit(f"{way.name}: other bytes arrived")
    return times


def _report(
    times: dict[str, list[float]], shape: PoolShape, hello: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    num_bytes = shape.num_blocks * shape.block_bytes
    rows: dict[str, dict[str, Any]] = {
        name: {
            "median_ms": statistics.median(each) * 1e3,
            "min_ms": min(each) * 1e3,
            "gb_s": num_bytes / statistics.median(each) / 1e9,
            "times_ms": [round(taken_s * 1e3, 3) for taken_s in each],
        }
        for name, each in times.items()
    }
    goals = []
    bare = [name for name in ("bare ucx", "bare ucx, one range") if name in rows]
    fastest = min(bare, key=lambda name: rows[name]["median_ms"], default="")
    for name, beside, least in (("shm", "memcpy", SHM_GOAL), ("nixl", fastest, NIXL_GOAL)):
        if name in rows:
            ratio = rows[beside]["median_ms"] / rows[name]["median_ms"]
            best = rows[beside]["min_ms"] / rows[name]["min_ms"]
            goals.append(
                {
                    "way": name,
                    "beside": beside,
                    "ratio": ratio,
                    "ratio_of_best": best,
                    "goal": least,
                    "met": ratio >= least,
                }
            )
    return {
        "bytes": num_bytes,
        "blocks": shape.num_blocks,
        "rounds": arguments.rounds,
        "connector_options": arguments.connector_options,
        "ucx": hello["ucx_version"],
        "ways": rows,
        "goals": goals,
    }


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['bytes'] / 1e6:.1f} MB in {report['blocks']} blocks, {report['rounds']} rounds in turns",
        "",
        "| way | median ms | least ms | GB/s |",
        "|---|---|---|---|",
    ]
    for name, row in report["ways"].items():
        lines.append(f"| {name} | {row['median_ms']:.2f} | {row['min_ms']:.2f} | {row['gb_s']:.1f} |")
    for goal in report["goals"]:
        lines.append(
            f"\n{goal['way']} moves as fast as {goal['beside']} times {goal['ratio']:.2f} (the best of each: "
            f"{goal['ratio_of_best']:.2f}; goal {goal['goal']}): {'met' if goal['met'] else 'MISSED'}"
        )
    return "\n".join(lines)


def _ranges(base: int, shape: PoolShape) -> Ranges:
    ranges = np.zeros((shape.num_blocks, 3), dtype=np.uint64)
    ranges[:, 0] = np.arange(shape.num_blocks) * shape.block_bytes + base + shape.header_bytes
    ranges[:, 1] = shape.block_bytes
    return ranges


if __name__ == "__main__":
    sys.exit(main())
