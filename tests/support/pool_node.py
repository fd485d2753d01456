"""A process that owns a pool, lends it out over every connector and pulls from others; and the handle tests drive it with.

Block contents name themselves: every 8-byte word of a block is `word_of(block_id, generation)`, so a test can tell from the
bytes alone which block, at which generation, it has got.
"""

import asyncio
import json
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pdmesh.connector.base import (
    PeerPool,
    Publication,
    Published,
    Pull,
    PullResult,
    Push,
    PushConnector,
    ReadInPlace,
    WorkerConnector,
)
from pdmesh.connector.options import connector_options
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.parent import die_with_parent
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OfferTable
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server

SECRET = "a secret of the tests"


def word_of(block_id: int, generation: int) -> np.uint64:
    """What every word of a block holds."""
    return np.uint64((generation + (block_id + 1) * 0x9E3779B97F4A7C15) % (1 << 64))


def write_block(pool: KVPool, block_id: int) -> None:
    """Give a block new content as an engine does: first the generation, then the bytes."""
    pool.bump([block_id])
    pool.blocks[block_id].view(np.uint64)[:] = word_of(block_id, int(pool.generations[block_id]))


def make_pool(shape: PoolShape, *, filled: bool) -> KVPool:
    """Make a pool in this process."""
    fd = create_pool_file("test")
    size_pool_file(fd, shape)
    pool = KVPool(fd, shape, writable=True)
    os.close(fd)
    if filled:
        for block_id in range(shape.num_blocks):
            write_block(pool, block_id)
    return pool


def listed(pool: KVPool, block_ids: list[int], *, group: int = 0, first_block: int = 0) -> GroupBlocks:
    """Blocks of a pool as its owner lists them now."""
    generations = pool.generations_of(block_ids)
    return GroupBlocks(group=group, block_ids=block_ids, generations=generations, first_block=first_block)


def wait_for(connector: WorkerConnector, num: int, timeout_s: float) -> list[PullResult]:
    """Collect `num` results through `fileno`, as a core does; fewer when the time is over."""
    results: list[PullResult] = []
    end_s = time.monotonic() + timeout_s
    while len(results) < num and (left_s := end_s - time.monotonic()) > 0:
        if select.select([connector.fileno()], [], [], left_s)[0]:
            results += connector.poll()
    return results


class Node:
    """A running pool node, from a test's point of view."""

    def __init__(self, process: "subprocess.Popen[str]", hello: dict[str, Any]) -> None:
        self.process = process
        self.peer_id: str = hello["peer_id"]
        self.address: str = hello["address"]
        self.shape = PoolShape(hello["num_blocks"], hello["block_bytes"])
        self.first_generations: list[int] = hello["generations"]
        """Of every block, when the node had started."""
        self._metadata = {name: bytes.fromhex(value) for name, value in hello["connectors"].items()}

    def pool_for(self, connector: str) -> PeerPool:
        """What a consumer needs to connect."""
        metadata = self.address.encode() if connector == "grpc" else self._metadata[connector]
        return PeerPool(
            peer_id=self.peer_id,
            metadata=metadata,
            num_blocks=self.shape.num_blocks,
            block_bytes=self.shape.block_bytes,
        )

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have the node do something and return what it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the node died at {command}"
        return json.loads(line)

    def publish(self, connector: str, offer_id: str, block_ids: list[int], generations: list[int]) -> str:
        """Have blocks made available over a connector; what went wrong, or nothing."""
        return str(
            self.ask("publish", connector=connector, offer_id=offer_id, block_ids=block_ids, generations=generations)
        )

    def generations(self, block_ids: list[int]) -> list[int]:
        return [int(word) for word in self.ask("generations", block_ids=block_ids)]

    def refresh(self) -> bool:
        """Take over metadata that changed; whether any did."""
        changed = {name: bytes.fromhex(value) for name, value in self.ask("metadata").items()}
        self._metadata |= changed
        return bool(changed)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def pool_node(
    connectors: list[str],
    shape: PoolShape,
    peer_id: str = "owner@1",
    secret: str = SECRET,
    options: dict[str, dict[str, object]] | None = None,
) -> Iterator[Node]:
    """Start a node and end it with the block."""
    arguments = [json.dumps(connectors), str(shape.num_blocks), str(shape.block_bytes), peer_id, secret]
    arguments.append(json.dumps(options or {}))
    process = subprocess.Popen(
        [sys.executable, "-m", "support.pool_node", *arguments, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # What this process imports: the same sources, wherever they are.
        env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        hello = process.stdout.readline()
        assert hello, "the node did not start"
        yield Node(process, json.loads(hello))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class _Server:
    """The node's own side."""

    def __init__(self, names: list[str], shape: PoolShape, peer_id: str, secret: MeshSecret, options: str) -> None:
        self.pool = make_pool(shape, filled=True)
        self.connectors = make_worker_connectors(
            # Networks that come and go on this machine meanwhile, as those of other tests do, are nothing to these.
            names,
            peer_id=peer_id,
            secret=secret,
            on_loopback=True,
            options=connector_options(options),
        )
        self.metadata = {name: connector.register(self.pool) for name, connector in self.connectors.items()}
        self._changed: dict[str, bytes] = {}
        self._published: queue.SimpleQueue[Published] = queue.SimpleQueue()
        self._churn: subprocess.Popen[bytes] | None = None
        for name, connector in self.connectors.items():
            connector.watch_metadata(partial(self._changed.__setitem__, name))
            connector.watch_published(self._published.put)

    def do(self, command: str, message: dict[str, Any]) -> Any:
        match command:
            case "generations":
                return self.pool.generations_of(message["block_ids"])
            case "write":
                for block_id in message["block_ids"]:
                    write_block(self.pool, block_id)
            case "flip":
                self.pool.blocks[message["block_id"], message["place"]] ^= 0x10
            case "churn":
                self._churn = _churn_beside(self.pool, message["seconds"])
            case "churning":
                return self._churn is not None and self._churn.poll() is None
            case "publish":
                connector = self.connectors[message.pop("connector")]
                connector.publish(Publication(**message))
                return "" if isinstance(connector, ReadInPlace) else self._published.get(timeout=10).error
            case "retract":
                self.connectors[message["connector"]].retract(message["offer_id"])
            case "words":
                # As this process sees them now: of each block the smallest and the largest.
                words = self.pool.blocks[message["block_ids"]].view(np.uint64)
                return [[int(block.min()), int(block.max())] for block in words]
            case "push":
                # Whatever comes of them: each writes the same blocks.
                connector = self.connectors[message["connector"]]
                assert isinstance(connector, PushConnector)
                for number in range(message["num_times"]):
                    connector.push(
                        Push(
                            transfer_id=f"push-{number}",
                            peer_id=message["peer_id"],
                            source_block_ids=message["block_ids"],
                            target_block_ids=message["block_ids"],
                            deadline_s=10.0,
                        )
                    )
            case "shut_out":
                connector = self.connectors[message["connector"]]
                assert isinstance(connector, PushConnector)
                done = threading.Event()
                connector.shut_out(done.set)
                return done.wait(message["timeout_s"])
            case "metadata":
                changed = dict(self._changed)
                return {name: value.hex() for name, value in changed.items()}
            case "connect":
                peer = PeerPool(**message["peer"] | {"metadata": bytes.fromhex(message["peer"]["metadata"])})
                self.connectors[message["connector"]].connect(peer)
            case "start":
                self.connectors[message["connector"]].start(Pull(**message["pull"]))
            case "wait":
                results = wait_for(self.connectors[message["connector"]], message["num"], message["timeout_s"])
                return [result.reason for result in results]
            case _:
                raise ValueError(command)
        return True


def _churn_beside(pool: KVPool, seconds: float) -> "subprocess.Popen[bytes]":
    """Begin to rewrite blocks from another process, as an engine's core does beside its server process."""
    arguments = ["churn", str(pool.fd), str(pool.shape.num_blocks), str(pool.shape.block_bytes), str(seconds)]
    return subprocess.Popen([sys.executable, "-m", "support.pool_node", *arguments], pass_fds=[pool.fd])


def _churn(pool: KVPool, seconds: float) -> None:
    """Any block, with pauses about as long as a pull, so that some pulls meet a change and some do not."""
    chance, end_s = random.Random(3), time.monotonic() + seconds
    while time.monotonic() < end_s:
        write_block(pool, chance.randrange(pool.shape.num_blocks))
        time.sleep(0.001)


async def _serve(names: list[str], shape: PoolShape, peer_id: str, secret: MeshSecret, options: str) -> None:
    server = _Server(names, shape, peer_id, secret, options)
    owner = PoolOwner(
        peer_id=peer_id,
        pool=server.pool,
        offers=OfferTable(),
        connectors=server.metadata,
        model_fingerprint="model",
        layout_fingerprints=["layout"],
        on_ended=lambda ended: None,
    )
    async with grpc_server("127.0.0.1", 0, secret, lambda grpc: [owner.add_to(grpc)]) as port:
        hello = {
            "peer_id": peer_id,
            "address": f"127.0.0.1:{port}",
            "num_blocks": shape.num_blocks,
            "block_bytes": shape.block_bytes,
            "generations": server.pool.generations_of(list(range(shape.num_blocks))),
            "connectors": {name: value.hex() for name, value in server.metadata.items()},
        }
        sys.stdout.write(json.dumps(hello) + "\n")
        sys.stdout.flush()
        while line := await asyncio.to_thread(sys.stdin.readline):
            message = json.loads(line)
            answer = await asyncio.to_thread(server.do, message.pop("command"), message)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "churn":
        die_with_parent()
        shape = PoolShape(int(sys.argv[3]), int(sys.argv[4]))
        _churn(KVPool(int(sys.argv[2]), shape, writable=True), float(sys.argv[5]))
    else:
        die_with_parent(int(sys.argv[7]))
        shape = PoolShape(int(sys.argv[2]), int(sys.argv[3]))
        asyncio.run(_serve(json.loads(sys.argv[1]), shape, sys.argv[4], MeshSecret(sys.argv[5]), sys.argv[6]))
