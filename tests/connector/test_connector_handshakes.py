"""Owner and consumer over real gRPC: whom a handshake refuses, and which connector it agrees on."""

import asyncio
import time

import grpc
import pytest

from pdmesh.connector.damages import Damages
from pdmesh.errors import HandshakeRefused, TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret
from support.kv_owner import SECRETS, Half, directory, owning


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "other model"}, ("[other model]", "[model]", "dtype, quantization and kv-cache-dtype")),
        ({"layouts": ("other layout",)}, ("[other layout]", "[layout]", "backend, dtype and block size")),
    ],
)
def test_different_fingerprints_are_refused_and_both_named(changes: dict[str, object], named: tuple[str, ...]) -> None:
    async def scenario() -> str:
        async with owning() as owner, directory(Half(), **changes) as peers:  # type: ignore[arg-type]
            with pytest.raises(HandshakeRefused) as caught:
                await peers.reach(owner.address, 2.0)
            return caught.value.message

    message = asyncio.run(scenario())
    assert all(name in message for name in named)


def test_opaque_pools_match_any_fingerprint() -> None:
    async def scenario() -> None:
        async with owning(model="", layouts=()) as owner, directory(Half()) as peers:
            assert (await peers.reach(owner.address, 2.0)).peer_id == "owner@1"

    asyncio.run(scenario())


def test_protocol_ranges_that_do_not_meet_are_refused() -> None:
    async def scenario() -> None:
        async with owning() as owner, grpc.aio.insecure_channel(owner.address) as channel:
            stub = mesh_pb2_grpc.KVPeerStub(channel)
            request = pb.HandshakeRequest(peer_id="future@1", protocol_min=7, protocol_max=9)
            with pytest.raises(grpc.aio.AioRpcError, match="7 to 9") as caught:
                await stub.Handshake(request, timeout=2, metadata=SECRETS.call_metadata())
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    asyncio.run(scenario())


def test_another_secret_is_refused() -> None:
    async def scenario() -> None:
        async with owning() as owner, directory(Half(), secret=MeshSecret("of another mesh")) as peers:
            with pytest.raises(HandshakeRefused, match="secret"):
                await peers.reach(owner.address, 2.0)

    asyncio.run(scenario())


def test_a_connector_that_gives_way_says_why_and_not_that_the_peer_cannot_be_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The disk was full, the peer well within reach."""

    async def scenario() -> None:
        async with directory(Half()) as peers:
            peers._greeter.count_fallback("file", "h:1", TransferFailed("unavailable: file: No space left on device"))

    asyncio.run(scenario())
    (line,) = [message for message in caplog.messages if message.startswith("connector file")]
    assert "reach" not in line
    assert line.endswith(": unavailable: file: No space left on device")


def test_a_connector_that_does_not_reach_falls_back_and_is_counted() -> None:
    async def scenario() -> None:
        half = Half(refuse={"shm"})
        async with owning() as owner, directory(half) as peers:
            peer = await peers.reach(owner.address, 2.0)
            assert peer.connector == "grpc"
            # Where grpc reads from is where the handshake was answered.
            assert half.attached[0][0].metadata == owner.address.encode()
            assert peers.fallbacks == {"shm": 1}

    asyncio.run(scenario())


def test_a_better_connector_is_used_again_once_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair stayed with the lesser one until it lost each other."""
    monkeypatch.setattr("pdmesh.connector.regaining.FIRST_PAUSE_S", 0.0)

    async def scenario() -> None:
        half = Half(refuse={"shm"})
        async with owning() as owner, directory(half) as peers:
            peer = await peers.reach(owner.address, 2.0)
            assert peer.connector == "grpc"
            half.refuse.clear()
            async with asyncio.timeout(10):
                while peer.connector == "grpc":
                    assert await peers.reach(owner.address, 2.0) is peer
                    await asyncio.sleep(0.01)
            assert peer.connector == "shm"
            # Beside the one that was in use, which pulls may be under way over.
            assert [name for _, name in half.attached][-1] == "shm"
            assert not half.detached
            assert (peers.fallbacks, peers.regained) == ({"shm": 1}, {"shm": 1})
            num_attached = len(half.attached)
            await peers.reach(owner.address, 2.0)
            await asyncio.sleep(0.05)
            assert len(half.attached) == num_attached

    asyncio.run(scenario())


def test_a_connector_that_damages_is_given_up_under_running_transfers_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It passes each handshake, as most of what comes over it is right: each pull paid for two, or was for nothing."""
    monkeypatch.setattr("pdmesh.connector.regaining.FIRST_PAUSE_S", 0.0)
    leap_s = 0.0

    async def scenario() -> None:
        nonlocal leap_s
        half = Half()
        async with owning() as owner, directory(half) as peers:
            peers._greeter.damages = Damages(lambda: time.monotonic() + leap_s)
            peer = await peers.reach(owner.address, 2.0)
            peers.came_whole(peer, "grpc", after=["shm"])
            assert peer.connector == "shm"
            peers.came_whole(peer, "grpc", after=["shm"])
            assert (peer.connector, half.detached) == ("grpc", [])
            # What comes later of a pull that began before.
            peers.came_whole(peer, "grpc", after=["shm"])
            for _ in range(3):
                assert await peers.reach(owner.address, 2.0) is peer
                await asyncio.sleep(0.03)
            assert peer.connector == "grpc"
            peers.forget(peer.peer_id)
            peer = await peers.reach(owner.address, 2.0)
            assert peer.connector == "grpc"
            leap_s = 1000.0
            async with asyncio.timeout(10):
                while peer.connector == "grpc":
                    assert await peers.reach(owner.address, 2.0) is peer
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_no_common_connector_is_an_error_that_names_each() -> None:
    async def scenario() -> None:
        async with owning(connectors=("shm", "nixl")) as owner, directory(Half(refuse={"shm"})) as peers:
            with pytest.raises(HandshakeRefused, match=r"shm: shm does not reach; grpc: the peer does not offer it"):
                await peers.reach(owner.address, 2.0)

    asyncio.run(scenario())


def test_requests_that_come_together_shake_hands_once() -> None:
    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            reached = await asyncio.gather(*(peers.reach(owner.address, 2.0) for _ in range(20)))
            assert len({id(peer) for peer in reached}) == len(half.attached) == 1
            # Another name of the same process is the same peer.
            assert await peers.reach(f"localhost:{owner.port}", 2.0) is reached[0]
            assert len(half.attached) == 1
            peers.forget("owner@1")
            assert half.detached == ["owner@1"]
            await peers.reach(owner.address, 2.0)
            assert len(half.attached) == 2

    asyncio.run(scenario())
