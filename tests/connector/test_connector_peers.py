"""Owner and consumer over real gRPC: handshakes, fallbacks, transfers and their leases, restarts and deaths."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from pdmesh import breaker
from pdmesh.connector import peers as peers_module
from pdmesh.connector.base import PeerPool
from pdmesh.connector.damages import Damages
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import PoolShape
from pdmesh.errors import Forbidden, HandshakeRefused, PeerUnavailable, TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc, offers
from pdmesh.protocol.capabilities import OWN, UNTOLD
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import EndedOffer, OfferTable, Reason
from pdmesh.protocol.states import TransferState
from pdmesh.protocol.transfers import Ended
from pdmesh.protocol.version import PROTOCOL_VERSION
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.old_wire import OldWireServer
from support.pool_node import SECRET, make_pool

SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
DIGEST = b"d" * 32
SECRETS = MeshSecret(SECRET)


@dataclass
class Owner:
    offers: OfferTable
    servicer: PoolOwner
    ended: list[EndedOffer]
    blocks: GroupBlocks
    port: int = 0
    num_handshakes: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def offer(self, offer_id: str = "o", **changes: object) -> None:
        self.offers.open(offer_id, request_id="r", digest=DIGEST, **changes)  # type: ignore[arg-type]
        assert self.offers.seal(offer_id, [self.blocks], 20)
        self.servicer.settle()


@asynccontextmanager
async def owning(
    peer_id: str = "owner@1",
    *,
    model: str = "model",
    layouts: tuple[str, ...] = ("layout",),
    connectors: tuple[str, ...] = ("shm", "grpc"),
    secret: MeshSecret = SECRETS,
    port: int = 0,
    is_old: bool = False,
) -> AsyncIterator[Owner]:
    """`is_old`: it speaks protocol version 1."""
    pool = make_pool(SHAPE, filled=True)
    ended: list[EndedOffer] = []
    table = OfferTable()
    servicer = PoolOwner(
        peer_id=peer_id,
        pool=pool,
        offers=table,
        connectors={name: b"metadata of " + name.encode() for name in connectors},
        model_fingerprint=model,
        layout_fingerprints=list(layouts),
        on_ended=ended.append,
    )
    blocks = GroupBlocks(group=0, block_ids=[2, 5], generations=pool.generations_of([2, 5]))
    owner = Owner(table, servicer, ended, blocks)
    reaper = asyncio.create_task(servicer.run())
    try:

        def register(server: grpc.aio.Server) -> list[str]:
            return [servicer.add_to(OldWireServer(server) if is_old else server)]  # type: ignore[arg-type]

        async with grpc_server("127.0.0.1", port, secret, register) as owner.port:
            yield owner
    finally:
        reaper.cancel()
        await asyncio.wait([reaper])
        pool.close()


@dataclass
class Half:
    """Stands where an engine's core is: notes what it is told, refuses what the test wants refused."""

    attached: list[tuple[PeerPool, str]] = field(default_factory=list)
    detached: list[str] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)

    async def attach(self, pool: PeerPool, connector: str) -> None:
        await asyncio.sleep(0.01)
        if connector in self.refuse:
            raise HandshakeRefused(f"{connector} does not reach")
        self.attached.append((pool, connector))

    def detach(self, peer_id: str) -> None:
        self.detached.append(peer_id)


def directory(
    half: Half, *, model: str = "model", layouts: tuple[str, ...] = ("layout",), secret: MeshSecret = SECRETS
) -> PeerDirectory:
    return PeerDirectory("consumer@7", secret, ["shm", "grpc"], model, list(layouts), half.attach, half.detach)


def test_a_transfer_from_handshake_to_commit() -> None:
    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            assert (peer.peer_id, peer.connector, peer.num_blocks, peer.block_bytes) == ("owner@1", "shm", 8, 4096)
            assert half.attached[0][0].metadata == b"metadata of shm"
            begun = await peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=5.0)
            assert begun.peer_id == "owner@1"
            assert begun.view == offers.OfferView(groups=[owner.blocks], num_tokens=20)
            owner.offers.release("o")
            owner.servicer.settle()
            assert owner.ended == []
            assert await peers.end("owner@1", "t", True) == Ended(
                known=True, outcome=TransferState.COMMITTED, peer_id="owner@1"
            )
            assert [each.reason for each in owner.ended] == [Reason.RELEASED]
            assert owner.offers.transfers_ended[TransferState.COMMITTED] == 1
            assert await peers.end("owner@1", "t", False) == Ended(
                known=False, outcome=TransferState.COMMITTED, peer_id="owner@1"
            )
            assert await peers.end("nobody@1", "t", True) is None
        assert half.detached == ["owner@1"]

    asyncio.run(scenario())


def test_what_the_owner_refuses_arrives_as_the_same_error() -> None:
    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            foreign = [GroupBlocks(group=0, block_ids=[3], generations=[])]
            for transfer_id, offer_id, digest, groups, error, says in (
                ("t1", "o", DIGEST, foreign, Forbidden, "foreign_blocks"),
                ("t2", "p", DIGEST, None, TransferFailed, "unknown"),
                ("t3", "o", b"", None, TransferFailed, "digest"),
            ):
                begun = await peers.begin(
                    peer, transfer_id=transfer_id, offer_id=offer_id, digest=digest, groups=groups, remaining_s=5.0
                )
                assert type(begun.error) is error
                assert says in str(begun.error)
                # Also a refusal says whose it is.
                assert begun.peer_id == "owner@1"
            assert peers.lost == 0
            assert await peers.reach(owner.address, 2.0) is peer

    asyncio.run(scenario())


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


@pytest.mark.parametrize("reason", ["peer_lost", "error:it broke"])
def test_what_ends_late_of_a_peer_does_not_cost_it_that_was_met_again(reason: str) -> None:
    """Its pulls over the connection that was made since were cut off for it."""

    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            before = await peers.reach(owner.address, 2.0)
            peers.forget(before.peer_id, met=before)
            again = await peers.reach(owner.address, 2.0)
            assert again is not before
            assert await peers.end(before.peer_id, "t", False, reason, met=before) is not None
            peers.forget(before.peer_id, met=before)
            assert (peers.knows(again), len(half.detached)) == (True, 1)
            # What began with it since says something of it.
            await peers.end(again.peer_id, "u", False, reason, met=again)
            assert (peers.knows(again), len(half.detached)) == (False, 2)

    asyncio.run(scenario())


def test_a_restarted_owner_replaces_its_predecessor() -> None:
    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning("owner@1") as owner:
                old = await peers.reach(owner.address, 2.0)
                port = owner.port
            async with owning("owner@2", port=port) as owner:
                owner.offer()
                # gRPC connects to the new process by itself, so the call succeeds: only its answer tells who that is.
                begun = await peers.begin(old, transfer_id="t1", offer_id="o", digest=DIGEST, remaining_s=5.0)
                assert begun.peer_id == "owner@2"
                assert await peers.end("owner@1", "t1", False, "aborted") == Ended(
                    known=True, outcome=TransferState.ABORTED, peer_id="owner@2"
                )
                new = await peers.confirm(old, 2.0)
                assert new.peer_id == "owner@2"
                assert half.detached == ["owner@1"]
                assert not peers.knows(old)
                assert await peers.confirm(new, 2.0) is new
                begun = await peers.begin(new, transfer_id="t2", offer_id="o", digest=DIGEST, remaining_s=5.0)
                assert begun.view is not None
                assert half.detached == ["owner@1"]

    asyncio.run(scenario())


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


def test_an_end_that_was_not_heard_in_time_is_told_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner held the blocks of a consumer that was done with them for as long as the lease."""
    monkeypatch.setattr(peers_module, "END_TIMEOUT_S", 0.1)
    end_transfer = PoolOwner.EndTransfer
    num_told = 0

    async def deaf_at_first(owner: PoolOwner, request: pb.EndTransferRequest, context: Any) -> pb.EndTransferReply:
        nonlocal num_told
        num_told += 1
        if num_told == 1:
            await asyncio.sleep(0.3)
            return pb.EndTransferReply()
        return await end_transfer(owner, request, context)

    monkeypatch.setattr(PoolOwner, "EndTransfer", deaf_at_first)

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            await peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=5.0)
            assert await peers.end("owner@1", "t", True) is None
            async with asyncio.timeout(2.0):
                while not owner.offers.transfers_ended[TransferState.COMMITTED]:
                    await asyncio.sleep(0.01)
            assert peers.knows(peer)

    asyncio.run(scenario())
    assert num_told == 2


def test_nothing_is_kept_of_peers_that_went() -> None:
    async def scenario() -> None:
        half = Half(refuse={"shm"})
        async with directory(half) as peers:
            for number in range(5):
                async with owning(f"owner-{number}@1") as owner:
                    await peers.reach(owner.address, 2.0)
                    peers.forget(f"owner-{number}@1")
                with pytest.raises(PeerUnavailable):
                    await peers.reach(owner.address, 2.0)
            assert not peers._known
            assert not peers._meeting

    asyncio.run(scenario())


def test_a_process_that_is_met_under_two_names_at_once_is_one_peer() -> None:
    """Each name had a peer of its own under the same id: whichever was lost, the other's pulls went with it."""

    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            names = (owner.address, f"localhost:{owner.port}")
            first, second = await asyncio.gather(*(peers.reach(name, 2.0) for name in names))
            assert first is second
            assert [name for _, name in half.attached] == ["shm"]
            peers.forget("owner@1")
            assert not peers.knows(first)
            assert half.detached == ["owner@1"]
            assert not len(peers._greeter.turns)

    asyncio.run(scenario())


def test_a_second_name_reveals_a_restart() -> None:
    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning("owner@1") as owner:
                await peers.reach(owner.address, 2.0)
            async with owning("owner@2") as owner:
                await peers.reach(owner.address, 2.0)
                assert half.detached == ["owner@1"]

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


def test_a_peer_that_is_gone_is_dropped_at_the_first_call() -> None:
    async def scenario() -> None:
        half = Half()
        async with directory(half) as peers:
            async with owning() as owner:
                peer = await peers.reach(owner.address, 2.0)
            with pytest.raises(PeerUnavailable):
                await peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=1.0)
            assert half.detached == ["owner@1"]
            assert peers.lost == 1

    asyncio.run(scenario())


def test_dropping_a_peer_cancels_nobody() -> None:
    """A channel that is closed under a call makes grpc raise CancelledError, which ends the wrong task."""

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            begins = [
                asyncio.create_task(
                    peers.begin(peer, transfer_id=f"t{index}", offer_id="o", digest=DIGEST, remaining_s=5.0)
                )
                for index in range(20)
            ]
            await asyncio.sleep(0)
            peers.forget(peer.peer_id)
            outcomes = await asyncio.gather(*begins, return_exceptions=True)
            assert not [each for each in outcomes if isinstance(each, asyncio.CancelledError)]

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


def test_a_pull_that_lost_its_peer_drops_it() -> None:
    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            for transfer_id, reason in (("t1", "stale"), ("t2", "cancelled"), ("t3", "peer_lost")):
                assert half.detached == []
                await peers.begin(peer, transfer_id=transfer_id, offer_id="o", digest=DIGEST, remaining_s=5.0)
                ended = await peers.end("owner@1", transfer_id, False, reason)
                assert ended is not None
                assert ended.known
            assert half.detached == ["owner@1"]
            outcomes = owner.offers.transfers_ended
            assert (outcomes[TransferState.FAILED], outcomes[TransferState.ABORTED]) == (2, 1)

    asyncio.run(scenario())


def test_an_owner_that_still_writes_says_whether_it_will_know_when_it_has_stopped() -> None:
    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            await peers.reach(owner.address, 2.0)
            owner.offers.begin("t", "me", "o", DIGEST, written=True)
            ended = await peers.end("owner@1", "t", False, "aborted")
            assert ended is not None
            assert (ended.known, ended.writing, ended.stopping) == (True, True, True)
            owner.servicer.may_arrive = lambda transfer_id: True
            ended = await peers.end("owner@1", "t", False, "aborted")
            assert ended is not None
            assert (ended.writing, ended.stopping) == (True, False)
            owner.offers.stopped("t")
            owner.servicer.may_arrive = lambda transfer_id: False
            assert await peers.end("owner@1", "t", False, "aborted") == Ended(
                known=False, outcome=TransferState.ABORTED, peer_id="owner@1"
            )

    asyncio.run(scenario())


def test_one_transfers_fault_does_not_cost_the_others_of_its_peer() -> None:
    """A damaged file was enough: the peer was dropped, and every pull from it ended with `peer_lost`."""

    async def scenario() -> None:
        half = Half()
        async with owning() as owner, directory(half) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)

            async def run(transfer_id: str) -> None:
                await peers.begin(peer, transfer_id=transfer_id, offer_id="o", digest=DIGEST, remaining_s=5.0)

            for transfer_id in ("t1", "t2", "t3", "t4", "t5"):
                await run(transfer_id)
            await peers.end("owner@1", "t1", False, "error:a block is not what its owner wrote")
            ended = await peers.end("owner@1", "t2", True)
            assert ended is not None
            assert ended.outcome is TransferState.COMMITTED
            await peers.end("owner@1", "t3", False, "error:a block is not what its owner wrote")
            assert half.detached == []
            # Twice in a row it is not the transfer's fault.
            await peers.end("owner@1", "t4", False, "error:the connector is broken")
            assert half.detached == ["owner@1"]
            # Nor is anybody harmed when there is nobody else.
            peer = await peers.reach(owner.address, 2.0)
            await run("t6")
            await peers.end("owner@1", "t6", False, "error:the connector is broken")
            assert half.detached == ["owner@1", "owner@1"]

    asyncio.run(scenario())


def test_an_owner_and_a_consumer_of_adjacent_versions_exchange_kv() -> None:
    """What the newer side adds is lost on the way, in either direction; what both know is enough."""

    async def scenario() -> None:
        async with owning(is_old=True) as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            assert (peer.protocol, peer.capabilities) == (1, UNTOLD)
            begun = await peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=5.0)
            assert begun.view == offers.OfferView(groups=[owner.blocks], num_tokens=20)
            refused = await peers.begin(peer, transfer_id="t2", offer_id="o", digest=b"x" * 32, remaining_s=5.0)
            assert type(refused.error) is TransferFailed
            assert await peers.end("owner@1", "t", True) == Ended(known=True)
            assert owner.offers.transfers_ended[TransferState.COMMITTED] == 1
        async with owning() as owner, directory(Half()) as peers:
            peer = await peers.reach(owner.address, 2.0)
            assert (peer.protocol, peer.capabilities) == (PROTOCOL_VERSION, OWN)

    asyncio.run(scenario())


def test_running_transfers_are_renewed_and_left_ones_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "RENEW_INTERVAL_S", 0.1)
    monkeypatch.setattr(offers, "TRANSFER_LEASE_S", 0.5)

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer(lease_s=0.5)
            peer = await peers.reach(owner.address, 2.0)
            for transfer_id in ("kept", "also kept"):
                await peers.begin(peer, transfer_id=transfer_id, offer_id="o", digest=DIGEST, remaining_s=9.0)
            await asyncio.sleep(1.2)
            assert owner.offers.num_transfers == 2
            assert owner.ended == []
            # A consumer that vanishes stops renewing.
            peer.transfers.clear()
            async with asyncio.timeout(3.0):
                while not owner.ended:
                    await asyncio.sleep(0.05)
            assert owner.offers.num_transfers == owner.offers.num_open == 0
            assert owner.offers.transfers_ended[TransferState.EXPIRED] == 2
            assert [each.reason for each in owner.ended] == [Reason.EXPIRED]

    asyncio.run(scenario())


def test_a_transfer_that_its_owner_begins_late_is_renewed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push: a renewal that came before its begin found nothing, and it was never renewed again."""
    monkeypatch.setattr(peers_module, "RENEW_INTERVAL_S", 0.05)
    monkeypatch.setattr(offers, "TRANSFER_LEASE_S", 0.5)

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            asked: list[str] = []
            renew = owner.offers.renew_transfer
            owner.offers.renew_transfer = lambda each: asked.append(each) or renew(each)  # type: ignore[method-assign, func-returns-value]
            owner.offer(lease_s=60.0)
            peer = await peers.reach(owner.address, 2.0)
            peers.track(peer, "push", is_coming=True)

            async def renewed(times: int) -> None:
                async with asyncio.timeout(10):
                    while len(asked) < times:
                        await asyncio.sleep(0.01)

            await renewed(2)
            owner.offers.begin("push", "c", "o", DIGEST, written=True)
            owner.servicer.settle()
            asked.clear()
            await renewed(2)
            await asyncio.sleep(1.0)
            assert owner.offers.outcome_of("push") is TransferState.READING
            await peers.end(peer.peer_id, "push", True)
            assert not peer.transfers
            assert not peer.coming

    asyncio.run(scenario())


def test_nothing_runs_while_nothing_is_transferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "RENEW_INTERVAL_S", 0.05)

    async def scenario() -> None:
        async with owning() as owner, directory(Half()) as peers:
            owner.offer()
            peer = await peers.reach(owner.address, 2.0)
            await peers.begin(peer, transfer_id="t", offer_id="o", digest=DIGEST, remaining_s=5.0)
            await peers.end("owner@1", "t", True)
            await asyncio.sleep(0.2)
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "renew-transfers"]

    asyncio.run(scenario())


def test_blocks_are_read_only_from_the_owner_they_were_promised_by() -> None:
    async def scenario() -> None:
        async with owning() as owner, grpc.aio.insecure_channel(owner.address) as channel:
            stub = mesh_pb2_grpc.KVPeerStub(channel)
            for request, code in (
                (pb.ReadBlocksRequest(peer_id="owner@0", block_ids=[1]), grpc.StatusCode.FAILED_PRECONDITION),
                (pb.ReadBlocksRequest(peer_id="owner@1", block_ids=[8]), grpc.StatusCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.ReadBlocks(request, timeout=2, metadata=SECRETS.call_metadata()):
                        pass
                assert caught.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.EndTransfer(pb.EndTransferRequest(transfer_id="t"), timeout=2)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

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


class Relay:
    """Passes TCP on to a port, until its connections are cut."""

    def __init__(self, port: int) -> None:
        self.num_connections = 0
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()


def test_an_owner_whose_connection_broke_is_kept_when_it_still_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "DISCONNECTED_PAUSE_S", 0.05)

    async def scenario() -> None:
        half = Half()
        async with owning("owner@1") as owner, directory(half) as peers:
            relay = Relay(owner.port)
            async with await asyncio.start_server(relay.serve, "127.0.0.1", 0) as server:
                peer = await peers.reach(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 5)
                relay.cut()
                async with asyncio.timeout(10):
                    while relay.num_connections < 2:
                        await asyncio.sleep(0.02)
                assert await peers.confirm(peer, 5) is peer
                assert half.detached == []
                relay.cut()

    asyncio.run(scenario())


def test_a_peer_that_is_lost_before_the_question_who_it_is_costs_its_successor_nothing() -> None:
    """The question met a closed channel: a traceback in the log, and in a request that had asked."""

    async def scenario() -> None:
        half = Half()
        async with owning("owner@1") as owner, directory(half) as peers:
            peer = await peers.reach(owner.address, 5)
            peers.forget(peer.peer_id)
            await asyncio.sleep(0.1)
            await peers._probe(peer)
            again = await peers.confirm(peer, 5)
            assert again is not peer
            assert again.peer_id == "owner@1"

    asyncio.run(scenario())
