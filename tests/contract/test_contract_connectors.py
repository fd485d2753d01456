"""What every connector must do, against owners and consumers that are processes of their own."""

import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from pdmesh.connector.base import Pull, PullResult, WorkerConnector
from pdmesh.connector.options import connector_options
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.publications import PUBLISHING
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.connector.shm import ShmMetadata
from pdmesh.connector.shm_socket import fetch_pool
from pdmesh.connector.staging import Lane, StagingArea
from pdmesh.errors import HandshakeRefused
from pdmesh.protocol.layout import Layout
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks
from support.native_libraries import missing
from support.pool_node import SECRET, Node, make_pool, pool_node, wait_for, word_of
from support.shm_files import files_of_nobody_else

NATIVE = ["nixl", "mooncake", "ucxx"]
"""With a helper process."""
CONNECTORS = ["shm", "grpc", "file", *NATIVE]
AT_REST = ["shm"]
"""Of which a loop at rest has pulls carried out in it; the others begin those like any."""
AVAILABLE = [name for name in CONNECTORS if not missing(name)]
DIRECTORY = tempfile.TemporaryDirectory(prefix="pdmesh-contract-")
OPTIONS: dict[str, dict[str, object]] = {"file": {"path": DIRECTORY.name}}
SHAPE = PoolShape(num_blocks=96, block_bytes=64 << 10)
DEADLINE_S = 10.0
_ids = itertools.count()


class Consumer:
    """A connector in this process with a pool of its own."""

    is_at_rest = False
    """Whether its loop does nothing beside."""

    def __init__(
        self,
        name: str,
        secret: str = SECRET,
        shape: PoolShape = SHAPE,
        peer_id: str = "",
        options: dict[str, object] | None = None,
        lane_bytes: int = 0,
    ) -> None:
        made = make_worker_connectors(
            [name],
            peer_id=peer_id or f"consumer@{next(_ids)}",
            secret=MeshSecret(secret),
            on_loopback=True,
            options=connector_options(json.dumps({name: OPTIONS.get(name, {}) | (options or {})})),
        )
        self.name = name
        self.connector: WorkerConnector = made[name]
        self.pool: KVPool = make_pool(shape, filled=False)
        self.pool.staging = StagingArea(lane_bytes) if lane_bytes else None
        self.connector.register(self.pool)

    def publish(self, node: Node, blocks: list[int]) -> str:
        """Have the owner make blocks available for an offer; returns its id."""
        offer_id = f"o{next(_ids)}"
        assert node.publish(self.name, offer_id, blocks, firsts(node, blocks)) == ""
        return offer_id

    def pull(self, node: Node, source: list[int], target: list[int], **changes: object) -> Pull:
        """Pull blocks that the owner has made available, unless `offer_id` says that something else is to be asked for."""
        if "offer_id" not in changes and self.name in PUBLISHING and all(each < SHAPE.num_blocks for each in source):
            changes["offer_id"] = self.publish(node, source)
        pull = Pull(
            transfer_id=f"t{next(_ids)}",
            peer_id=node.peer_id,
            source_block_ids=source,
            generations=firsts(node, source),
            target_block_ids=target,
            deadline_s=DEADLINE_S,
            checksums=expected_sums(source, firsts(node, source)),
        )
        pull = replace(pull, **changes)  # type: ignore[arg-type]
        (self.connector.start_at_rest if self.is_at_rest else self.connector.start)(pull)
        return pull

    def result(self) -> PullResult:
        results = wait_for(self.connector, 1, DEADLINE_S + 5)
        assert len(results) == 1, "a pull did not end"
        return results[0]

    def holds(self, target: list[int], source: list[int], generations: list[int]) -> bool:
        """Whether target blocks hold exactly the source blocks at these generations."""
        return content_is(self.pool, target, source, generations)

    def close(self) -> None:
        self.connector.close()
        if self.pool.staging is not None:
            self.pool.staging.close()
        self.pool.close()


def expected_sums(block_ids: list[int], generations: list[int]) -> list[int]:
    """What blocks sum to with the content of these generations."""
    words = [word_of(block_id, word) for block_id, word in zip(block_ids, generations, strict=True)]
    blocks = np.repeat(np.asarray(words, dtype=np.uint64)[:, None], SHAPE.block_bytes // 8, axis=1)
    return [int(each) for each in sum_blocks(blocks.view(np.uint8), range(len(block_ids)))] if block_ids else []


def content_is(pool: KVPool, target: list[int], source: list[int], generations: list[int]) -> bool:
    """Whether blocks `target` of a pool hold what the owner writes to blocks `source` at these generations."""
    wanted = [word_of(block_id, word) for block_id, word in zip(source, generations, strict=True)]
    return bool((pool.blocks[target].view(np.uint64) == np.asarray(wanted, dtype=np.uint64)[:, None]).all())


@contextmanager
def consumer(name: str, **arguments: object) -> Iterator[Consumer]:
    made = Consumer(name, **arguments)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def firsts(node: Node, block_ids: list[int]) -> list[int]:
    """Generations that blocks had when their owner started; made up for ids it does not have."""
    known = dict(enumerate(node.first_generations))
    return [known.get(block_id, 0) for block_id in block_ids]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, at_rest),
            marks=pytest.mark.skipif(name not in AVAILABLE, reason=missing(name)),
            id=name + "-at-rest" * at_rest,
        )
        for name in CONNECTORS
        for at_rest in (False, True)[: 1 + (name in AT_REST)]
    ],
)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    name, Consumer.is_at_rest = request.param
    yield name
    Consumer.is_at_rest = False


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """An owner whose blocks stay at generation 1."""
    with pool_node(AVAILABLE, SHAPE, options=OPTIONS) as node:
        yield node


@pytest.fixture(scope="module")
def attached(name: str, shared_node: Node) -> Iterator[Consumer]:
    """A consumer connected to it."""
    with consumer(name) as made:
        made.connector.connect(shared_node.pool_for(name))
        yield made


@pytest.fixture
def own_node(name: str) -> Iterator[Node]:
    """An owner that the test may do anything to."""
    with pool_node([name], SHAPE, f"mortal@{next(_ids)}", options=OPTIONS) as node:
        yield node


SHUFFLED = random.Random(7).sample(range(SHAPE.num_blocks), SHAPE.num_blocks)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([5], [90]),
        (list(range(96)), list(range(96))),
        (SHUFFLED, list(reversed(range(96)))),
        ([1, 2, 3, 50, 51, 9], [10, 11, 12, 13, 14, 15]),
        ([], []),
    ],
    ids=["one", "all", "shuffled", "runs", "none"],
)
def test_a_pull_brings_the_right_bytes(
    attached: Consumer, shared_node: Node, source: list[int], target: list[int]
) -> None:
    attached.pool.blocks[:] = 0xEE
    pull = attached.pull(shared_node, source, target)
    result = attached.result()
    assert (result.transfer_id, result.reason) == (pull.transfer_id, "")
    assert result.num_bytes == len(source) * SHAPE.block_bytes
    assert attached.holds(target, source, firsts(shared_node, source))
    others = [block_id for block_id in range(SHAPE.num_blocks) if block_id not in target]
    assert bool((attached.pool.blocks[others] == 0xEE).all())


def test_a_generation_that_differs_is_stale(attached: Consumer, shared_node: Node) -> None:
    attached.pull(shared_node, [1, 2, 3], [1, 2, 3], generations=[0, *firsts(shared_node, [2, 3])])
    assert attached.result().reason == "stale"


def test_bytes_that_are_not_those_that_were_summed_are_corrupt(attached: Consumer, shared_node: Node) -> None:
    blocks = list(range(96))
    wanted = expected_sums(blocks, firsts(shared_node, blocks))
    for place in (0, 50, 95):
        damaged = [*wanted[:place], wanted[place] ^ 1, *wanted[place + 1 :]]
        attached.pull(shared_node, blocks, blocks, checksums=damaged)
        assert attached.result().reason == "corrupt"
    attached.pull(shared_node, blocks, blocks, checksums=[])
    assert attached.result().reason == ""


def test_a_block_without_a_sum_is_not_checked_and_the_others_are(attached: Consumer, shared_node: Node) -> None:
    blocks = list(range(96))
    told = expected_sums(blocks, firsts(shared_node, blocks))
    told[95] = 0
    attached.pull(shared_node, blocks, blocks, checksums=told)
    assert attached.result().reason == ""
    told[94] ^= 1
    attached.pull(shared_node, blocks, blocks, checksums=told)
    assert attached.result().reason == "corrupt"


def test_new_content_is_stale_and_not_corrupt(name: str, own_node: Node) -> None:
    """Its sums differ as well: the generation says why."""
    if name in PUBLISHING:
        pytest.skip("consumers read copies, which do not change")
    with consumer(name) as made:
        made.connector.connect(own_node.pool_for(name))
        own_node.ask("write", block_ids=[40])
        blocks = list(range(96))
        made.pull(own_node, blocks, blocks)
        assert made.result().reason == "stale"


def test_a_byte_that_was_flipped_in_the_owners_memory_is_found(name: str) -> None:
    with (
        pool_node(sorted({name, "shm"}), SHAPE, f"mortal@{next(_ids)}", options=OPTIONS) as node,
        consumer(name) as made,
        consumer("shm") as other,
    ):
        made.connector.connect(node.pool_for(name))
        made.pull(node, [3], [3])
        assert made.result().reason == ""
        node.ask("flip", block_id=3, place=1234)
        made.pull(node, [2, 3], [2, 3])
        assert made.result().reason == "corrupt"
        # It is not on its way that it was damaged.
        other.connector.connect(node.pool_for("shm"))
        other.pull(node, [3], [3])
        assert other.result().reason == "corrupt"
        made.pull(node, [2, 4], [2, 4])
        assert made.result().reason == ""


def test_a_deadline_that_is_over_ends_the_pull(attached: Consumer, shared_node: Node) -> None:
    attached.pull(shared_node, list(range(96)), list(range(96)), deadline_s=0.0)
    assert attached.result().reason == "timeout"
    attached.pull(shared_node, [3], [4])
    assert attached.result().reason == ""


def test_a_cancelled_pull_ends_once(attached: Consumer, shared_node: Node) -> None:
    blocks = list(range(96))
    pulls = [attached.pull(shared_node, blocks, blocks) for _ in range(4)]
    for pull in pulls:
        attached.connector.cancel(pull.transfer_id)
        attached.connector.cancel(pull.transfer_id)
    results = wait_for(attached.connector, 4, DEADLINE_S)
    assert sorted(each.transfer_id for each in results) == sorted(pull.transfer_id for pull in pulls)
    assert {each.reason for each in results} <= {"cancelled", ""}
    assert attached.is_at_rest or "cancelled" in {each.reason for each in results}
    attached.connector.cancel(pulls[0].transfer_id)
    assert wait_for(attached.connector, 1, 0.1) == []


def test_a_throttled_pull_brings_the_right_bytes_piece_by_piece(name: str, shared_node: Node) -> None:
    blocks = list(range(96))
    # Three blocks in each of 32 pieces.
    with consumer(name, options={"throttle_bytes_s": 64 << 20}) as made:
        made.connector.connect(shared_node.pool_for(name))
        pulls = [made.pull(shared_node, blocks[half::2], blocks[half::2]) for half in (0, 1)]
        results = wait_for(made.connector, len(pulls), DEADLINE_S)
        assert [each.reason for each in results] == ["", ""]
        assert made.holds(blocks, blocks, firsts(shared_node, blocks))


def test_a_pull_that_waits_for_its_share_of_the_link_can_be_ended(name: str, shared_node: Node) -> None:
    # One block takes longer than any deadline here.
    with consumer(name, options={"throttle_bytes_s": 2048}) as made:
        made.connector.connect(shared_node.pool_for(name))
        made.pool.blocks[:] = 0xEE
        made.pull(shared_node, [1, 2], [1, 2], deadline_s=0.3)
        assert made.result().reason == "timeout"
        cancelled = made.pull(shared_node, [1, 2], [1, 2])
        made.connector.cancel(cancelled.transfer_id)
        assert made.result().reason == "cancelled"
        made.pull(shared_node, [1, 2], [1, 2])
        made.connector.disconnect(shared_node.peer_id)
        assert made.result().reason == "peer_lost"
        assert bool((made.pool.blocks == 0xEE).all())


def test_many_pulls_at_once_all_end_well(attached: Consumer, shared_node: Node) -> None:
    pulls = {}
    for begin in range(0, 96, 8):
        blocks = list(range(begin, begin + 8))
        pulls[attached.pull(shared_node, blocks[::-1], blocks).transfer_id] = blocks
    results = wait_for(attached.connector, len(pulls), DEADLINE_S)
    assert {each.transfer_id: each.reason for each in results} == dict.fromkeys(pulls, "")
    assert all(attached.holds(blocks, blocks[::-1], firsts(shared_node, blocks[::-1])) for blocks in pulls.values())


def test_a_pull_that_names_impossible_blocks_ends_with_an_error(attached: Consumer, shared_node: Node) -> None:
    attached.pull(shared_node, [96], [0])
    assert attached.result().reason.startswith("error:")
    attached.pull(shared_node, [1, 2], [0, 0])
    assert attached.result().reason.startswith("error:")
    attached.pull(shared_node, [1, 2], [0])
    assert attached.result().reason.startswith("error:")


def test_a_pull_from_someone_unknown_ends_with_peer_lost(attached: Consumer, shared_node: Node) -> None:
    attached.pull(shared_node, [1], [1], peer_id="nobody@1")
    assert attached.result().reason == "peer_lost"
    attached.connector.disconnect("nobody@1")


def test_two_consumers_pull_at_once(name: str, attached: Consumer, shared_node: Node) -> None:
    with consumer(name, peer_id="second@1") as second:
        second.connector.connect(shared_node.pool_for(name))
        blocks = list(range(96))
        for each in (attached, second):
            each.pool.blocks[:] = 0
            each.pull(shared_node, blocks, blocks[::-1])
        for each in (attached, second):
            assert each.result().reason == ""
            assert each.holds(blocks[::-1], blocks, firsts(shared_node, blocks))


def test_a_peer_that_cannot_be_what_it_seems_is_refused(name: str, attached: Consumer, shared_node: Node) -> None:
    pool = shared_node.pool_for(name)
    with pytest.raises(HandshakeRefused, match="owner@1"):
        attached.connector.connect(replace(pool, block_bytes=32 << 10))
    if name != "grpc":
        # Over grpc the number comes from the owner itself and every read is checked there.
        with pytest.raises(HandshakeRefused, match="97"):
            attached.connector.connect(replace(pool, num_blocks=97))
        with pytest.raises(HandshakeRefused):
            attached.connector.connect(replace(pool, metadata=b"\xc1"))
    with pytest.raises(HandshakeRefused):
        attached.connector.connect(replace(pool, peer_id="owner@2"))


def test_another_secret_is_refused(name: str, shared_node: Node) -> None:
    with consumer(name, secret="the secret of another mesh") as stranger, pytest.raises(HandshakeRefused):
        stranger.connector.connect(shared_node.pool_for(name))


def test_blocks_rewritten_during_a_pull_are_never_taken_for_the_old(name: str) -> None:
    """The seqlock: whatever the owner does meanwhile, success means the bytes of the generation that was asked for."""
    chance = random.Random(11)
    reasons: list[str] = []
    with (
        pool_node(sorted({name, "shm"}), SHAPE, f"mortal@{next(_ids)}", options=OPTIONS) as node,
        consumer(name) as made,
    ):
        made.connector.connect(node.pool_for(name))
        with watching(node) as owners_pool:
            node.ask("churn", seconds=1.5)
            while node.ask("churning"):
                first, num = chance.randrange(48), chance.choice([1, 8, 48])
                source = list(range(first, first + num))
                generations = owners_pool.generations_of(source)
                if not content_is(owners_pool, source, source, generations):
                    # Read between a block's bump and its bytes: nothing has been promised of it yet.
                    continue
                offer_id = f"o{next(_ids)}"
                if node.publish(name, offer_id, source, generations):
                    # The owner itself found them changed.
                    reasons.append("stale")
                    continue
                sums = expected_sums(source, generations)
                made.pull(node, source, source, generations=generations, offer_id=offer_id, checksums=sums)
                reason = made.result().reason
                assert reason in ("", "stale")
                assert reason == "stale" or made.holds(source, source, generations)
                reasons.append(reason)
        assert {"", "stale"} == set(reasons)


@contextmanager
def watching(node: Node) -> Iterator[KVPool]:
    """The owner's pool itself, to know its generations at once."""
    name = msgspec.msgpack.decode(node.pool_for("shm").metadata, type=ShmMetadata).socket_name
    shared = fetch_pool(name, node.peer_id, node.shape, MeshSecret(SECRET))
    try:
        yield shared.pool
    finally:
        shared.close()


def test_a_killed_owner_costs_its_pulls_and_no_more(name: str, own_node: Node, shared_node: Node) -> None:
    blocks = list(range(96))
    with consumer(name) as made:
        with ThreadPoolExecutor() as threads:
            # At once, as the core does it.
            list(threads.map(made.connector.connect, [node.pool_for(name) for node in (own_node, shared_node)]))
        pulls = [made.pull(own_node, blocks, blocks, deadline_s=3.0) for _ in range(3)]
        own_node.kill()
        pulls.append(made.pull(own_node, blocks, blocks, deadline_s=3.0, offer_id="of nobody"))
        started_s = time.monotonic()
        results = {each.transfer_id: each.reason for each in wait_for(made.connector, 4, 6.0)}
        assert time.monotonic() - started_s < 5.0
        assert set(results) == {pull.transfer_id for pull in pulls}
        assert results[pulls[-1].transfer_id] != ""
        if "" in results.values():
            assert made.holds(blocks, blocks, own_node.first_generations)
        for reason in results.values():
            assert reason in ("", "peer_lost", "timeout") or reason.startswith("error:")
        made.connector.disconnect(own_node.peer_id)
        made.pull(shared_node, blocks, blocks)
        assert made.result().reason == ""
        assert made.holds(blocks, blocks, shared_node.first_generations)


def test_a_stopped_owner_cannot_hold_a_pull_beyond_its_deadline(name: str, own_node: Node) -> None:
    blocks = list(range(96))
    with consumer(name) as made:
        made.connector.connect(own_node.pool_for(name))
        offer_id = made.publish(own_node, blocks)
        family = [psutil.Process(own_node.process.pid), *psutil.Process(own_node.process.pid).children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            made.pull(own_node, blocks, blocks, deadline_s=0.5, offer_id=offer_id)
            reason = made.result().reason
            assert time.monotonic() - started_s < 3.0
            assert reason == "timeout" or (reason == "" and made.holds(blocks, blocks, own_node.first_generations))
        finally:
            for process in family:
                process.send_signal(signal.SIGCONT)


def test_disconnecting_ends_the_peers_pulls(name: str, shared_node: Node) -> None:
    blocks = list(range(96))
    with consumer(name) as made:
        made.connector.connect(shared_node.pool_for(name))
        for _ in range(3):
            made.pull(shared_node, blocks, blocks)
        made.connector.disconnect(shared_node.peer_id)
        results = wait_for(made.connector, 3, DEADLINE_S)
        assert len(results) == 3
        assert {each.reason for each in results} <= {"", "peer_lost"}
        assert made.is_at_rest or "peer_lost" in {each.reason for each in results}


def test_closing_ends_all_and_leaves_nothing(name: str, shared_node: Node) -> None:
    with consumer(name) as warm_up:
        # What a library opens once per process is not a leak.
        warm_up.connector.connect(shared_node.pool_for(name))
    before = _Traces.taken()
    # More often than the warm-up may have had descriptors that close late.
    for _ in range(3 if name in NATIVE else 10):
        made = Consumer(name)
        made.connector.connect(shared_node.pool_for(name))
        pulls = [made.pull(shared_node, list(range(96)), list(range(96))) for _ in range(3)]
        made.close()
        ended = sorted(each.transfer_id for each in made.connector.poll())
        assert ended == sorted(pull.transfer_id for pull in pulls)
    end_s = time.monotonic() + 5.0
    while not (now := _Traces.taken()).within(before):
        assert time.monotonic() < end_s, f"left behind: {now} after {before}"
        time.sleep(0.05)


def test_a_killed_consumer_leaves_nothing_and_the_owner_serves_on(
    name: str, shared_node: Node, attached: Consumer
) -> None:
    before = files_of_nobody_else()
    pool = shared_node.pool_for(name)
    peer = {each: getattr(pool, each) for each in ("peer_id", "num_blocks", "block_bytes")}
    with ExitStack() as stack:
        node = stack.enter_context(pool_node([name], SHAPE, "victim@1", options=OPTIONS))
        family = psutil.Process(node.process.pid).children(recursive=True)
        node.ask("connect", connector=name, peer=peer | {"metadata": pool.metadata.hex()})
        pull = {
            "transfer_id": "t",
            "peer_id": shared_node.peer_id,
            "source_block_ids": list(range(96)),
            "generations": shared_node.first_generations,
            "target_block_ids": list(range(96)),
            "deadline_s": 5.0,
            "offer_id": attached.publish(shared_node, list(range(96))),
        }
        node.ask("start", connector=name, pull=pull)
        node.kill()
        gone, alive = psutil.wait_procs(family, timeout=5)
        assert alive == []
        assert len(gone) == (1 if name in NATIVE else 0)
    assert files_of_nobody_else() <= before
    attached.pull(shared_node, [7], [8])
    assert attached.result().reason == ""


@dataclass(frozen=True)
class _Traces:
    """Whatever a connector could leave behind in this process."""

    threads: frozenset[str]
    files: frozenset[str]
    num_fds: int
    num_pools: int
    num_children: int

    @classmethod
    def taken(cls) -> "_Traces":
        return cls(
            threads=frozenset(thread.name for thread in threading.enumerate()),
            files=files_of_nobody_else(),
            num_fds=len(os.listdir("/proc/self/fd")),
            num_pools=Path("/proc/self/maps").read_text().count("memfd:pdmesh"),
            num_children=len(psutil.Process().children()),
        )

    def within(self, before: "_Traces") -> bool:
        """Nothing more than before; less may be, as grpc closes the warm-up's sockets in its own time."""
        return (
            self.threads <= before.threads
            and self.files <= before.files
            and self.num_fds <= before.num_fds
            and self.num_pools <= before.num_pools
            and self.num_children <= before.num_children
        )


# ---- blocks of another size, into the staging area ------------------------------------------------


@pytest.fixture(scope="module")
def unlike(name: str, shared_node: Node) -> Iterator[Consumer]:
    """A consumer whose own blocks are smaller, connected to convert."""
    with consumer(name, shape=PoolShape(num_blocks=8, block_bytes=4096), lane_bytes=5 * SHAPE.block_bytes) as made:
        layout = Layout(
            layers=(0,), window=None, num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", block_size=128
        )
        made.connector.connect(replace(shared_node.pool_for(name), layouts=(layout,)))
        yield made


def test_blocks_of_another_size_land_in_a_lane(unlike: Consumer, shared_node: Node) -> None:
    assert unlike.pool.staging is not None
    lanes = [Lane(index, SHAPE.block_bytes) for index in (1, 3)]
    pulls = [
        unlike.pull(shared_node, source, target, lane=lane)
        for lane, source, target in zip(lanes, ([7, 8, 2], [40]), ([0, 1, 4], [0]), strict=True)
    ]
    results = wait_for(unlike.connector, 2, DEADLINE_S)
    assert {result.transfer_id: (result.reason, result.num_bytes) for result in results} == {
        pull.transfer_id: ("", len(pull.source_block_ids) * SHAPE.block_bytes) for pull in pulls
    }
    for pull in pulls:
        blocks = unlike.pool.target(pull.lane).blocks[pull.target_block_ids]
        wanted = [word_of(block, word) for block, word in zip(pull.source_block_ids, pull.generations, strict=True)]
        assert (blocks.view(np.uint64) == np.asarray(wanted, dtype=np.uint64)[:, None]).all()
    # Nothing else was written to.
    assert not unlike.pool.blocks.any()
    assert not unlike.pool.target(Lane(0, SHAPE.block_bytes)).blocks.any()
    assert not unlike.pool.target(lanes[0]).blocks[[2, 3]].any()


@pytest.mark.parametrize(
    ("target", "lane", "word"),
    [
        ([0], None, "do not fit"),
        ([5], Lane(0, SHAPE.block_bytes), "outside the pool"),
        ([0], Lane(0, 4096), "do not fit"),
    ],
    ids=["pool", "behind", "size"],
)
def test_a_pull_that_does_not_fit_its_lane_is_refused(
    unlike: Consumer, shared_node: Node, target: list[int], lane: Lane | None, word: str
) -> None:
    unlike.pull(shared_node, [3], target, lane=lane)
    result = unlike.result()
    assert result.reason.startswith("error:")
    assert word in result.reason


def test_overwritten_blocks_in_a_lane_are_stale(unlike: Consumer, shared_node: Node) -> None:
    unlike.pull(shared_node, [3, 4], [0, 1], lane=Lane(2, SHAPE.block_bytes), generations=[1, 1])
    assert unlike.result().reason == "stale"
