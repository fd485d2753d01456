"""Owners that do not answer, or no more: what a call costs then, and whom."""

import asyncio
import socket
import time
from typing import Any

import grpc
import pytest

from pdmesh import breaker
from pdmesh.connector import peers as peers_module
from pdmesh.connector.owner import PoolOwner
from pdmesh.errors import PeerUnavailable
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.servers import grpc_server
from support.kv_owner import DIGEST, SECRETS, Half, directory, owning


class Slow(mesh_pb2_grpc.KVPeerServicer):
    """An owner whose answers to begins take long, and whose handshake answers as it is told to."""

    peer_id = "owner@1"

    async def Handshake(self, request: pb.HandshakeRequest, context: object) -> pb.HandshakeReply:
        connectors = [pb.ConnectorMetadata(connector="shm")]
        return pb.HandshakeReply(peer_id=self.peer_id, protocol=1, connectors=connectors)

    async def BeginTransfer(self, request: pb.BeginTransferRequest, context: object) -> pb.BeginTransferReply:
        await asyncio.sleep(1.0)
        return pb.BeginTransferReply(peer_id=self.peer_id)


def test_a_slow_call_costs_nobody_elses_pull_and_the_second_asks_who_is_there() -> None:
    """One request with little time left made the peer be dropped, and with it every pull that was under way from it."""

    def register(server: grpc.aio.Server) -> list[str]:
        mesh_pb2_grpc.add_KVPeerServicer_to_server(slow, server)
        return []

    slow = Slow()

    async def scenario() -> None:
        half = Half()
        async with grpc_server("127.0.0.1", 0, SECRETS, register) as port, directory(half) as peers:
            peer = await peers.reach(f"127.0.0.1:{port}", 2.0)
            for number in range(4):
                with pytest.raises(PeerUnavailable, match="deadline"):
                    await peers.begin(peer, transfer_id=f"t{number}", offer_id="o", digest=b"", remaining_s=0.05)
                await asyncio.sleep(0.05)
            assert half.detached == []
            assert peers.knows(peer)
            slow.peer_id = "owner@2"
            for number in range(2):
                with pytest.raises(PeerUnavailable):
                    await peers.begin(peer, transfer_id=f"u{number}", offer_id="o", digest=b"", remaining_s=0.05)
            async with asyncio.timeout(3.0):
                while peers.knows(peer):
                    await asyncio.sleep(0.02)
            assert half.detached == ["owner@1"]

    asyncio.run(scenario())


class Silent(mesh_pb2_grpc.KVPeerServicer):
    """A process whose handshakes end when and as the test says."""

    def __init__(self) -> None:
        self.num_handshakes = 0
        self.may_end = asyncio.Event()
        self.is_well = False

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeReply:
        self.num_handshakes += 1
        await self.may_end.wait()
        if not self.is_well:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nothing came back")
        return pb.HandshakeReply(peer_id="owner@1", protocol=1, connectors=[pb.ConnectorMetadata(connector="shm")])


def test_an_owner_that_does_not_answer_is_asked_by_one_and_the_others_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request that came after a handshake had failed waited for a handshake of its own."""
    monkeypatch.setattr(breaker, "FIRST_BACKOFF_S", 60.0)

    async def scenario() -> None:
        silent = Silent()

        def register(server: grpc.aio.Server) -> list[str]:
            mesh_pb2_grpc.add_KVPeerServicer_to_server(silent, server)
            return []

        async with grpc_server("127.0.0.1", 0, SECRETS, register) as port, directory(Half()) as peers:
            address = f"127.0.0.1:{port}"
            # Nothing is known of it yet: all wait for one handshake.
            silent.may_end.set()
            outcomes = await asyncio.gather(*(peers.reach(address, 30.0) for _ in range(5)), return_exceptions=True)
            assert all(isinstance(each, PeerUnavailable) for each in outcomes)
            assert silent.num_handshakes == 1
            with pytest.raises(PeerUnavailable, match="does not answer"):
                await peers.reach(address, 30.0)
            # Its time has come.
            peers._silences[address]._not_before_s = 0.0
            silent.may_end.clear()
            silent.is_well = True
            probe = asyncio.create_task(peers.reach(address, 30.0))
            await asyncio.sleep(0)
            with pytest.raises(PeerUnavailable, match="does not answer"):
                await peers.reach(address, 30.0)
            silent.may_end.set()
            peer = await probe
            assert silent.num_handshakes == 2
            # Silence was not why it is forgotten now: all may ask at once.
            peers.forget(peer.peer_id)
            again = await asyncio.gather(*(peers.reach(address, 30.0) for _ in range(5)))
            assert len({id(each) for each in again}) == 1
            assert not peers._silences

    asyncio.run(scenario())


def test_a_ticket_of_another_start_is_not_refused_for_the_silence_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a prefill was killed and had come back, decode refused its tickets unasked: for as long as the breaker of its
    address rested, and as gRPC's own back-off of the dead connection, which a new channel had inherited."""
    monkeypatch.setattr(breaker, "FIRST_BACKOFF_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def scenario() -> None:
        address = f"127.0.0.1:{port}"
        async with directory(Half()) as peers:
            async with owning("owner@1", port=port):
                peers.forget((await peers.reach(address, 2.0, owner="owner@1")).peer_id)
            for _ in range(2):
                with pytest.raises(PeerUnavailable):
                    await peers.reach(address, 2.0, owner="owner@1")
            async with owning("owner@2", port=port):
                with pytest.raises(PeerUnavailable, match="does not answer"):
                    await peers.reach(address, 2.0, owner="owner@1")
                assert (await peers.reach(address, 2.0, owner="owner@2")).peer_id == "owner@2"

    asyncio.run(scenario())


def test_a_dead_owner_costs_at_most_the_deadline() -> None:
    async def scenario() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            async with directory(Half()) as peers:
                for address in (f"127.0.0.1:{silent.getsockname()[1]}", "127.0.0.1:1"):
                    started_s = time.monotonic()
                    with pytest.raises(PeerUnavailable, match=address):
                        await peers.reach(address, 0.4)
                    assert time.monotonic() - started_s < 2.0

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["begin", "confirm"])
def test_a_call_that_outlasts_its_lost_peers_channel_fails(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """It looked like the cancellation of whoever waited for it: a request that had asked for KV was never heard of again."""
    monkeypatch.setattr(peers_module, "CALL_TIMEOUT_S", 0.3)
    # As over `file`, where an offer may still be written.
    monkeypatch.setattr(peers_module, "PUBLISHING", ["shm"])
    asked: list[str] = []

    def stuck(name: str) -> Any:
        answer = getattr(PoolOwner, name)

        async def stand_still(self: PoolOwner, request: Any, context: Any) -> Any:
            asked.append(name)
            if name == "BeginTransfer" or len(asked) > 1:
                await asyncio.sleep(60)
            return await answer(self, request, context)

        return stand_still

    for name in ("Handshake", "BeginTransfer"):
        monkeypatch.setattr(PoolOwner, name, stuck(name))

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            if call == "begin":
                begin = peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=20.0)
                waiting: asyncio.Task[object] = asyncio.create_task(begin)
            else:
                waiting = asyncio.create_task(peers.confirm(peer, 20.0))
            async with asyncio.timeout(5.0):
                while len(asked) < 2:
                    await asyncio.sleep(0.01)
            peers.forget(peer.peer_id)
            await asyncio.wait([waiting], timeout=4.0)
            assert waiting.done()
            assert not waiting.cancelled()
            assert isinstance(waiting.exception(), PeerUnavailable)

    asyncio.run(scenario())


def test_a_dead_owner_is_let_go_though_nobody_calls_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that is replaced by one with another name and address left its memory mapped for ever."""
    monkeypatch.setattr(peers_module, "DISCONNECTED_PAUSE_S", 0.05)

    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning("old@1") as owner:
                await peers.reach(owner.address, 5)
            async with asyncio.timeout(10):
                while half.detached != ["old@1"]:
                    await asyncio.sleep(0.02)
            assert peers.lost == 1

    asyncio.run(scenario())


def test_a_successor_is_not_taken_for_silent_because_nobody_listened_before_it() -> None:
    """gRPC answers for a connection that is backing off: the probe heard of a port where the next start listened already."""

    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning("owner@1") as owner:
                old = await peers.reach(owner.address, 5)
            while old.channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await asyncio.sleep(0.01)
            async with owning("owner@2", port=owner.port):
                await peers._probe(old)
                assert not peers.knows(old)
                assert (await peers.reach(old.address, 5, owner="owner@1")).peer_id == "owner@2"

    asyncio.run(scenario())
