"""The owner's end of pushes, asked over gRPC: what it writes, what it refuses, what it says when it is asked again."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import msgspec
import numpy as np
import pytest

from pdmesh.connector.base import PushConnector
from pdmesh.connector.pool import PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.engine.messages import ConnectPeer, DisconnectPeer
from pdmesh.engine.push_messages import PushReport
from pdmesh.engine.server import outgoing_pushes
from pdmesh.engine.server.assembly import Engine
from pdmesh.lifecycle import Life
from pdmesh.models.source import DEMO_MODEL
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.pushes import PushOrder, PushProgress, order_to_pb, progress_from_pb
from pdmesh.protocol.ticket import request_digest
from pdmesh.protocol.transfers import Begin
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks
from support.held_engine import HeldCore, held_engine, play
from support.mesh import Service, start
from support.pool_node import make_pool

SECRET = "a-secret-for-the-tests"
BLOCK = 32
NUM_TOKENS = 5 * BLOCK + 7
PROMPT = [int(token) for token in np.random.default_rng(1).integers(1000, 40000, NUM_TOKENS)]
DIGEST = request_digest(PROMPT, cache_salt="")
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def prefill() -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="pdmesh-test-") as folder:
        service = start(
            "prefill", "--model", DEMO_MODEL, "--port", "0", "--grpc-port", "0", "--cpu-threads", "1", "--block-size",
            str(BLOCK), "--connector", "nixl", "--kv-transfer-mode", "push", "--kv-cache-memory-bytes", "256M",
            "--kv-lease-duration-s", "60", folder=Path(folder),
        ).wait_ready()  # fmt: skip
        yield service
        service.stop()


class Consumer:
    """A pool in this process, and calls to the owner."""

    def __init__(self, service: Service, peer_id: str = "consumer@1") -> None:
        self.peer_id = peer_id
        [info] = [key for key in service.metrics() if key.startswith("vllm:cache_config_info")]
        self.block_bytes = int(info.partition('block_bytes="')[2].partition('"')[0])
        connector = make_worker_connectors(["nixl"], peer_id=peer_id, secret=MeshSecret(SECRET))["nixl"]
        assert isinstance(connector, PushConnector)
        self.connector = connector
        self.pool = make_pool(PoolShape(NUM_BLOCKS, self.block_bytes), filled=True)
        self.metadata = connector.register(self.pool)
        self._address = service.grpc

    def order(self, offer_id: str, transfer_id: str, blocks: list[int], **changes: Any) -> PushOrder:
        begin = {"transfer_id": transfer_id, "consumer_id": self.peer_id, "offer_id": offer_id, "digest": DIGEST}
        fields: dict[str, Any] = {
            "begin": Begin(**(begin | {"remaining_s": 30.0} | changes.pop("begin", {}))),
            "targets": [GroupBlocks(group=0, block_ids=blocks, generations=[], first_block=changes.pop("first", 0))],
            "connector": "nixl",
            "metadata": self.metadata,
            "num_blocks": NUM_BLOCKS,
            "block_bytes": self.block_bytes,
        }
        return PushOrder(**(fields | changes))

    def push(self, order: PushOrder) -> list[PushProgress]:
        """All that the owner says."""

        async def run() -> list[PushProgress]:
            async with grpc.aio.insecure_channel(self._address) as channel:
                stub: Any = mesh_pb2_grpc.KVPeerStub(channel)
                call = stub.Push(order_to_pb(order), timeout=30, metadata=MeshSecret(SECRET).call_metadata())
                return [progress_from_pb(message) async for message in call]

        return asyncio.run(run())

    def end(self, transfer_id: str, *, committed: bool = False) -> pb.EndTransferReply:
        async def run() -> pb.EndTransferReply:
            async with grpc.aio.insecure_channel(self._address) as channel:
                stub: Any = mesh_pb2_grpc.KVPeerStub(channel)
                request = pb.EndTransferRequest(transfer_id=transfer_id, committed=committed, reason="aborted")
                reply: pb.EndTransferReply = await stub.EndTransfer(
                    request, timeout=10, metadata=MeshSecret(SECRET).call_metadata()
                )
                return reply

        return asyncio.run(run())

    def close(self) -> None:
        self.connector.close()
        self.pool.close()


@pytest.fixture(scope="module")
def consumer(prefill: Service) -> Iterator[Consumer]:
    made = Consumer(prefill)
    yield made
    made.close()


@pytest.fixture(scope="module")
def offer_id(prefill: Service) -> str:
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "kv_transfer_params": asked}
    answer = httpx.post(f"{prefill.http}/v1/completions", json=body, timeout=60).json()
    return str(answer["kv_transfer_params"]["remote_request_id"])


def test_all_full_blocks_of_a_sealed_offer_are_written_once_asked_for(
    prefill: Service, consumer: Consumer, offer_id: str
) -> None:
    before = consumer.pool.blocks.copy()
    said = consumer.push(consumer.order(offer_id, "t1", [10, 11, 12, 13, 14]))
    assert (said[-1].ended, said[-1].error, said[-1].num_blocks) == (True, None, 5)
    changed = {int(each) for each in np.flatnonzero((consumer.pool.blocks != before).any(axis=1))}
    assert changed == {10, 11, 12, 13, 14}
    assert len({consumer.pool.blocks[each].tobytes() for each in changed}) == 5
    told = [each for progress in said for each in (progress.checksums[0] if progress.checksums else [])]
    assert told == sum_blocks(consumer.pool.blocks, [10, 11, 12, 13, 14]).tolist()
    ended = consumer.end("t1")
    assert (ended.known, ended.outcome, ended.writing, ended.peer_id) == (True, "aborted", False, said[-1].peer_id)


def test_two_pushes_for_one_offer_bring_the_same(prefill: Service, consumer: Consumer, offer_id: str) -> None:
    """Any number of transfers share an offer; that of a second consumer, behind what it has already, too."""
    consumer.push(consumer.order(offer_id, "t2", [20, 21, 22, 23, 24]))
    other = Consumer(prefill, "other@1")
    try:
        said = other.push(other.order(offer_id, "t3", [30, 31, 32], first=2))
        assert (said[-1].ended, said[-1].error) == (True, None)
        assert (other.pool.blocks[[30, 31, 32]] == consumer.pool.blocks[[22, 23, 24]]).all()
    finally:
        other.close()
    assert not consumer.end("t2").writing
    assert not consumer.end("t3").writing


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"begin": {"offer_id": "f" * 32}}, "unknown"),
        ({"begin": {"digest": b"another"}}, "digest"),
        ({"connector": "shm"}, "no_push"),
        ({"block_bytes": 4096}, "mismatch"),
        ({"first": 1}, "mismatch"),
        ({"targets": []}, "mismatch"),
        ({"metadata": b"nobody's"}, "consumer@1 over nixl"),
    ],
)
def test_what_cannot_be_written_is_refused_and_not_begun(
    consumer: Consumer, offer_id: str, changes: dict[str, Any], word: str
) -> None:
    before = consumer.pool.blocks.copy()
    transfer_id = f"refused-{word}-{len(changes)}-{next(iter(changes))}"
    [said] = consumer.push(consumer.order(offer_id, transfer_id, [40, 41, 42, 43, 44], **changes))
    assert said.ended
    assert said.error is not None
    assert word in said.error.message
    assert (consumer.pool.blocks == before).all()
    assert not consumer.end(transfer_id).writing


def test_a_push_that_came_twice_or_after_its_end_writes_nothing(consumer: Consumer, offer_id: str) -> None:
    consumer.end("t4")
    before = consumer.pool.blocks.copy()
    [said] = consumer.push(consumer.order(offer_id, "t4", [50, 51, 52, 53, 54]))
    assert said.error is not None
    assert "transfer_ended" in said.error.message
    assert (consumer.pool.blocks == before).all()


def test_an_offer_that_is_over_is_pushed_no_more(prefill: Service, consumer: Consumer, offer_id: str) -> None:
    """The last test with this offer: stock offers end with the commit of a fetch."""
    consumer.push(consumer.order(offer_id, "t5", [1, 2, 3, 4, 5]))
    consumer.end("t5", committed=True)
    [said] = consumer.push(consumer.order(offer_id, "t6", [6, 7, 8, 9, 15]))
    assert said.error is not None
    assert said.error.message.partition(":")[0] in ("committed", "unknown")
    end_s = time.monotonic() + 10
    while prefill.metric("pdmesh_kv_blocks_used"):
        assert time.monotonic() < end_s, "blocks stay held for an offer that is over"
        time.sleep(0.1)


def order_of(consumer_id: str, transfer_id: str = "t", metadata: bytes = b"m") -> PushOrder:
    """An order of a consumer that is not there, to a core that is not either."""
    return PushOrder(
        begin=Begin(transfer_id=transfer_id, consumer_id=consumer_id, offer_id="o", digest=DIGEST, remaining_s=30.0),
        targets=[GroupBlocks(group=0, block_ids=[1], generations=[], first_block=0)],
        connector="shm",
        metadata=metadata,
        num_blocks=NUM_BLOCKS,
        block_bytes=4096,
    )


def test_consumers_that_were_replaced_do_not_stay_connected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decode that is started anew has another id: those before it stayed attached as long as the owner lived."""
    monkeypatch.setattr(outgoing_pushes, "NUM_ATTACHED", 2)
    monkeypatch.setattr(HeldCore, "ready", msgspec.structs.replace(HeldCore.ready, block_size=BLOCK))

    async def scene(core: HeldCore, engine: Engine) -> None:
        pushes = engine.handoff.pushes
        pushes._open_offers.opened("o", NUM_TOKENS)
        for peer_id in ("a@1", "b@1", "c@1", "a@1", "d@1", "e@1"):
            await pushes._attach(order_of(peer_id))
        # Two besides the one that is written to.
        assert list(pushes._attached) == ["a@1", "d@1", "e@1"]
        gone = [each.peer_id for each in core.sent if isinstance(each, DisconnectPeer)]
        assert gone == ["b@1", "c@1"]

    play(scene)


def test_a_consumer_that_cannot_be_connected_holds_up_its_own_pushes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was written to that was not connected yet while one consumer hung, 15 s for each of its pushes."""
    monkeypatch.setattr(HeldCore, "ready", msgspec.structs.replace(HeldCore.ready, block_size=BLOCK))

    class Deaf(HeldCore):
        def send(self, message: Any) -> None:
            if isinstance(message, ConnectPeer) and message.peer_id.startswith("hangs@"):
                self.sent.append(message)
            else:
                super().send(message)

    async def go() -> None:
        core = Deaf()
        async with held_engine(core) as engine:
            pushes = engine.handoff.pushes
            pushes._open_offers.opened("o", NUM_TOKENS)
            hanging = [asyncio.create_task(pushes._attach(order_of(f"hangs@{start}"))) for start in (1, 1, 2)]
            await asyncio.sleep(0)
            async with asyncio.timeout(5):
                await pushes._attach(order_of("a@1"))
            # Of those that hang one is asked for at a time, and nothing is kept of them.
            assert [each.peer_id for each in core.sent if isinstance(each, ConnectPeer)] == ["hangs@1", "a@1"]
            for each in hanging:
                each.cancel()
            await asyncio.wait(hanging, timeout=5)
            assert (list(pushes._attached), len(pushes._attaching)) == (["a@1"], 0)

    asyncio.run(go())


def test_a_push_that_ends_late_does_not_cost_its_consumer_the_connection_that_was_made_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stopped what was written over the new one."""
    monkeypatch.setattr(HeldCore, "ready", msgspec.structs.replace(HeldCore.ready, block_size=BLOCK))

    async def scene(core: HeldCore, engine: Engine) -> None:
        pushes = engine.handoff.pushes
        pushes._open_offers.opened("o", NUM_TOKENS)
        before = await pushes._attach(order_of("a@1"))
        # It is reached in another way now.
        since = await pushes._attach(order_of("a@1", metadata=b"new"))
        for transfer_id, attached in (("late", before), ("t", since)):
            pushes._active[transfer_id] = outgoing_pushes._Outgoing(
                transfer_id=transfer_id, offer_id="o", consumer_id="a@1", attached=attached
            )

        def num_gone() -> int:
            return sum(isinstance(each, DisconnectPeer) for each in core.sent)

        assert num_gone() == 1
        pushes.report(PushReport(transfer_id="late", num_blocks=0, ended=True, reason="peer_lost"))
        assert (num_gone(), list(pushes._attached)) == (1, ["a@1"])
        pushes.report(PushReport(transfer_id="t", num_blocks=0, ended=True, reason="peer_lost"))
        assert (num_gone(), list(pushes._attached)) == (2, [])

    play(scene)


def test_a_dead_core_writes_no_more_and_its_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offers were kept for what it wrote, and the server waited for its word on that as long as it may drain."""
    monkeypatch.setattr(HeldCore, "ready", msgspec.structs.replace(HeldCore.ready, block_size=BLOCK))

    async def scene(core: HeldCore, engine: Engine) -> None:
        pushes, offers = engine.handoff.pushes, engine.offers
        for transfer_id, is_told in (("running", False), ("stopping", True)):
            offers.open(f"o-{transfer_id}", request_id="r", digest=DIGEST)
            offers.begin(transfer_id, "a@1", f"o-{transfer_id}", DIGEST, written=True)
            pushes._active[transfer_id] = outgoing_pushes._Outgoing(
                transfer_id=transfer_id,
                offer_id=f"o-{transfer_id}",
                consumer_id="a@1",
                attached=outgoing_pushes._Attached(b"m"),
                is_told_to_stop=is_told,
            )
        written = list(pushes._active.values())
        engine.core_died("killed by signal 9")
        assert (offers.num_open, offers.num_transfers, pushes._active) == (0, 0, {})
        for push in written:
            report = push.reports.get_nowait()
            assert (report.ended, report.reason, report.num_blocks) == (True, "peer_lost", 0)
            # Bytes that had left are the consumer's to keep out: it waits for nothing, and takes no word for that.
            end = pb.EndTransferRequest(transfer_id=push.transfer_id, committed=False, reason="aborted")
            ended = await engine.handoff.owner.EndTransfer(end, Any)  # type: ignore[arg-type]
            assert (ended.writing, ended.stopping) == (True, False)
        # What the core had said before is read after its death.
        await core.say(pushes=[PushReport(transfer_id="running", num_blocks=0, ended=True)])
        async with asyncio.timeout(5):
            await engine.drain(60.0, Life())

    play(scene)
