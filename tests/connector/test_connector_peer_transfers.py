"""Owner and consumer over real gRPC: transfers from begin to end, and their leases."""

import asyncio
from typing import Any

import grpc
import pytest

from pdmesh.connector import peers as peers_module
from pdmesh.connector.owner import PoolOwner
from pdmesh.errors import Forbidden, TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc, offers
from pdmesh.protocol.capabilities import OWN, UNTOLD
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import Reason
from pdmesh.protocol.states import TransferState
from pdmesh.protocol.transfers import Ended
from pdmesh.protocol.version import PROTOCOL_VERSION
from support.kv_owner import DIGEST, SECRETS, Half, directory, owning


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
