"""The consumer's end of pushes, between a core that is played and an owner that is: nothing ends it but its own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc.aio
import pytest

from pdmesh.connector.handshake import Peer
from pdmesh.engine.push_messages import EndPush, ExpectPush, PushArrived, PushExpected
from pdmesh.engine.server.expectations import Expectations
from pdmesh.engine.server.writers import ABORTED
from pdmesh.errors import TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.exchange import Exchange
from pdmesh.protocol.pushes import Expectation, PushProgress, progress_to_pb
from pdmesh.protocol.transfers import Ended
from pdmesh.security import MeshSecret

OFFER = "0" * 32
EXPECTATION = Expectation(
    offer_id=OFFER, owner_id="owner@1", owner_address="127.0.0.1:1", token_ids=[1] * 8, cache_salt="", remaining_s=30.0
)


class Call:
    """What an owner's stream brings."""

    def __init__(self, said: list[PushProgress], error: BaseException | None, is_endless: bool = False) -> None:
        self.said = said
        self.error = error
        self.is_endless = is_endless

    async def __aiter__(self) -> AsyncIterator[pb.PushProgress]:
        for each in self.said:
            yield progress_to_pb(each)
        if self.error is not None:
            raise self.error
        if self.is_endless:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        pass


class World:
    def __init__(self, tasks: asyncio.TaskGroup, push: Callable[..., Any]) -> None:
        self.sent: list[Any] = []
        self.metrics = MagicMock()
        peer = MagicMock(spec=Peer, peer_id="owner@1", exchange=Exchange.BYTES, address="127.0.0.1:1")
        peer.stub = SimpleNamespace(Push=push)
        peers = self.peers = MagicMock()

        async def reach(*_: object) -> Peer:
            return peer

        async def done(*_: object) -> None:
            pass

        peers.reach, peers.end = reach, done
        ready = SimpleNamespace(
            push_connectors=["nixl"], vocab_size=10, max_model_len=100, block_size=4, num_blocks=8, block_bytes=1,
            layout_fingerprints=["one"],
        )  # fmt: skip
        parts: dict[str, Any] = {
            "identity": SimpleNamespace(engine_id="d", peer_id="d@1"),
            "ready": ready,
            "secret": MeshSecret("a-secret-for-the-tests"),
            "core": SimpleNamespace(send=self._send),
            "peers": peers,
            "owner": SimpleNamespace(metadata=lambda _: b"pool"),
            "tasks": tasks,
            "metrics": self.metrics,
            "pool": SimpleNamespace(blocks=None),
            "is_enabled": True,
        }
        self.expectations = Expectations(**parts)
        writers: Any = self.expectations.writers
        writers.stop = done

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, ExpectPush):
            planned = PushExpected(transfer_id=message.transfer_id, first_block=0, blocks=[[1, 2]])
            asyncio.get_running_loop().call_soon(self.expectations.planned, planned)

    async def ended(self) -> None:
        async with asyncio.timeout(10):
            while not any(isinstance(each, EndPush) and each.is_stopped for each in self.sent):
                await asyncio.sleep(0.01)


def progress(**fields: Any) -> PushProgress:
    return PushProgress(**({"peer_id": "owner@1", "num_blocks": 0} | fields))


def closed(*_: object, **__: object) -> Call:
    raise grpc.aio.UsageError("Channel is closed.")


@pytest.mark.parametrize(
    ("push", "reason"),
    [
        (lambda *_, **__: Call([], asyncio.CancelledError()), "peer_lost"),
        (closed, "peer_unavailable"),
        (lambda *_, **__: Call([progress(num_blocks=2, checksums=[[1, 2], [3, 4]])], None), "malformed"),
        (lambda *_, **__: Call([], RuntimeError("a bug")), "internal"),
    ],
    ids=["cut_off", "closed", "groups", "bug"],
)
def test_whatever_ends_a_stream_ends_one_push_and_what_it_brought_is_forgotten(
    push: Callable[..., Call], reason: str
) -> None:
    async def run() -> World:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, push)
            world.expectations.expect(EXPECTATION, MagicMock())
            await world.ended()
        return world

    world = asyncio.run(run())
    world.metrics.pushes_received.inc.assert_called_once_with("failed", reason)
    assert [each.is_broken for each in world.sent if isinstance(each, EndPush) and each.is_unwanted] == [True]
    assert len(world.expectations) == 0


@pytest.mark.parametrize("ended", [True, False])
def test_only_what_the_owner_vouches_for_stays_findable_when_nobody_comes(ended: bool) -> None:
    async def run() -> World:
        call = Call([progress(num_blocks=2, ended=ended)], None, is_endless=not ended)
        async with asyncio.TaskGroup() as tasks:
            world, sink = World(tasks, lambda *_, **__: call), MagicMock()
            world.expectations.expect(EXPECTATION, sink)
            while not any(isinstance(each, PushArrived) for each in world.sent):
                await asyncio.sleep(0.01)
            if ended:
                await world.ended()
            world.expectations.withdraw(sink, OFFER)
            await world.ended()
        return world

    world = asyncio.run(run())
    assert [each.is_broken for each in world.sent if isinstance(each, EndPush) and each.is_unwanted] == [not ended]


@pytest.mark.parametrize("is_shut_out", [False, True])
def test_the_owner_of_a_push_that_broke_is_told_that_it_is_over(is_shut_out: bool) -> None:
    """Not where all writers had been shut out meanwhile for another's silence: it was renewed for as long as both lived."""
    told: list[tuple[object, ...]] = []

    async def end(*args: object) -> Ended:
        told.append(args)
        return Ended(known=False, peer_id="owner@1")

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:

            def push(*_: object, **__: object) -> Call:
                world.expectations.writers.num_shut_out += is_shut_out
                return Call([], None)

            world = World(tasks, push)
            world.peers.end = end
            # The real one, of its class.
            del world.expectations.writers.stop
            world.expectations.expect(EXPECTATION, MagicMock())
            [transfer_id] = world.expectations._by_transfer
            await world.ended()
        assert told == [("owner@1", transfer_id, False, ABORTED)]

    asyncio.run(run())


@pytest.mark.parametrize("is_settling", [False, True])
def test_a_server_that_shuts_down_waits_for_no_push_and_no_writer(is_settling: bool) -> None:
    """Whether it shut down was read off a task that had been cancelled, by whomever."""

    async def run() -> World:
        call = Call([progress(num_blocks=2)], None, is_endless=not is_settling)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            world = World(tasks, lambda *_, **__: call)
            asking = asyncio.Event()

            async def silent(*_: object) -> None:
                asking.set()
                await asyncio.Event().wait()

            writers: Any = world.expectations.writers
            writers.stop = silent
            world.expectations.expect(EXPECTATION, MagicMock())
            while not any(isinstance(each, PushArrived) for each in world.sent):
                await asyncio.sleep(0.01)
            if is_settling:
                await asking.wait()
            num_sent = len(world.sent)
            world.expectations.close()
            world.expectations.expect(EXPECTATION, MagicMock())
        assert len(world.sent) == num_sent
        return world

    world = asyncio.run(run())
    assert world.metrics.pushes_received.inc.call_args.args == ("skipped", "closed")


def test_an_error_that_ends_the_server_is_not_covered_by_what_pushes_make_of_it() -> None:
    """A writer's word was asked for in a group of tasks that was ending: the error of that was nobody's."""
    unheard: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        call = Call([progress(num_blocks=2)], None, is_endless=True)
        async with asyncio.TaskGroup() as tasks:
            world, sink = World(tasks, lambda *_, **__: call), MagicMock()
            world.expectations.expect(EXPECTATION, sink)
            while not any(isinstance(each, PushArrived) for each in world.sent):
                await asyncio.sleep(0.01)
            world.expectations.withdraw(sink, OFFER)
            raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup):
        asyncio.run(run())
    assert unheard == []


def test_a_withdrawal_that_comes_first_takes_its_expectation_back() -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            world, sink = World(tasks, closed), MagicMock()
            world.expectations.withdraw(sink, OFFER)
            world.expectations.expect(EXPECTATION, sink)
            assert len(world.expectations) == 0
            assert not world.sent
            world.expectations.expect(EXPECTATION, sink)
            assert len(world.expectations) == 1
            await world.ended()

    asyncio.run(run())


@pytest.mark.parametrize("ended", [True, False])
def test_the_writer_of_a_push_that_failed_is_known_to_have_ended_where_it_said_so(ended: bool) -> None:
    """It was asked for seconds whether it had, and blocks stayed in quarantine meanwhile."""
    known: list[bool] = []

    async def stop(*arguments: Any) -> bool:
        known.append(arguments[-1])
        return True

    async def run() -> None:
        said = [progress(num_blocks=1), progress(num_blocks=1, ended=True, error=TransferFailed("peer_lost: its core"))]
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, lambda *_, **__: Call(said if ended else said[:1], None))
            writers: Any = world.expectations.writers
            writers.stop = stop
            world.expectations.expect(EXPECTATION, MagicMock())
            await world.ended()

    asyncio.run(run())
    assert known == [ended]
