"""A peer that belongs to the mesh and is out of its mind: what it says over a real socket is answered or refused by name, and
costs neither the owner nor anyone else anything that stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.pool import PoolShape
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import EndedOffer, OfferTable
from pdmesh.protocol.peer_bounds import MAX_ID_CHARS, MAX_REASON_CHARS, MAX_TRANSFERS
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.pool_node import SECRET, make_pool

SHAPE = PoolShape(num_blocks=8, block_bytes=4096)
DIGEST = b"d" * 32
METADATA = MeshSecret(SECRET).call_metadata()
# Refusals of what makes no sense, and of what does not belong here.
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
# What gRPC itself lets a client see of an error.
MAX_DETAILS_CHARS = 4096


@dataclass
class Owner:
    table: OfferTable
    stub: Any
    servicer: PoolOwner
    ended: list[EndedOffer]
    now_s: float = 1000.0

    def offer(self, offer_id: str) -> None:
        blocks = GroupBlocks(group=0, block_ids=[2, 5], generations=[1, 1])
        self.table.open(offer_id, request_id="r", digest=DIGEST)
        assert self.table.seal(offer_id, [blocks], 20)
        self.servicer.settle()

    async def call(self, request: Any) -> Any:
        """The reply, the whole stream of them, or the status of a refusal."""
        name = METHODS[type(request)]
        call = getattr(self.stub, name)(request, metadata=METADATA, timeout=20)
        try:
            if name == "ReadBlocks":
                return [chunk async for chunk in call]
            return await call
        except grpc.aio.AioRpcError as exc:
            refusal = exc
        assert refusal.code() in REFUSALS, f"{name}: {refusal}"
        assert 0 < len(refusal.details() or "") < MAX_DETAILS_CHARS
        return refusal


METHODS = {
    pb.HandshakeRequest: "Handshake",
    pb.BeginTransferRequest: "BeginTransfer",
    pb.RenewTransfersRequest: "RenewTransfers",
    pb.EndTransferRequest: "EndTransfer",
    pb.ReadBlocksRequest: "ReadBlocks",
}


@asynccontextmanager
async def owning() -> AsyncIterator[Owner]:
    pool = make_pool(SHAPE, filled=True)
    ended: list[EndedOffer] = []
    table = OfferTable(clock=lambda: owner.now_s)
    servicer = PoolOwner(
        peer_id="owner@1",
        pool=pool,
        offers=table,
        connectors={"grpc": b""},
        model_fingerprint="model",
        layout_fingerprints=["layout"],
        on_ended=ended.append,
    )
    owner = Owner(table, None, servicer, ended)
    try:
        async with (
            grpc_server("127.0.0.1", 0, MeshSecret(SECRET), lambda server: [servicer.add_to(server)]) as port,
            grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", 64 << 20)]
            ) as channel,
        ):
            owner.stub = mesh_pb2_grpc.KVPeerStub(channel)
            yield owner
    finally:
        pool.close()


texts = st.one_of(
    st.sampled_from(["", "o-1", "o-2", "t-1", "t-2", "owner@1", "model", "layout"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.sampled_from(["x" * 257, "é" * 5000, "y" * (1 << 20)]),
)
numbers = st.one_of(st.integers(0, 9), st.sampled_from([1 << 31, (1 << 32) - 1]), st.integers(0, (1 << 32) - 1))
long_numbers = st.one_of(numbers, st.sampled_from([(1 << 63) - 1, (1 << 64) - 1]))
blobs = st.one_of(st.just(DIGEST), st.binary(max_size=70), st.just(b"z" * (1 << 16)))
lists = st.lists(numbers, max_size=12)
groups = st.builds(
    pb.BlockList, group=numbers, block_ids=lists, generations=st.lists(long_numbers, max_size=12), first_block=numbers
)
capabilities = st.builds(pb.Capability, name=texts, oldest=numbers, newest=numbers)
requests = st.one_of(
    st.builds(
        pb.HandshakeRequest,
        peer_id=texts,
        protocol_min=numbers,
        protocol_max=numbers,
        layout_fingerprints=st.lists(texts, max_size=3),
        model_fingerprint=texts,
        block_bytes=st.lists(long_numbers, max_size=3),
        capabilities=st.lists(capabilities, max_size=3),
    ),
    st.builds(
        pb.BeginTransferRequest,
        transfer_id=texts,
        consumer_id=texts,
        offer_id=texts,
        digest=blobs,
        groups=st.lists(groups, max_size=3),
        remaining_ms=long_numbers,
    ),
    st.builds(pb.RenewTransfersRequest, transfer_ids=st.lists(texts, max_size=5)),
    st.builds(
        pb.EndTransferRequest,
        transfer_id=texts,
        committed=st.booleans(),
        reason=texts,
        peer_id=texts,
        release_offer=texts,
    ),
    st.builds(pb.ReadBlocksRequest, peer_id=texts, block_ids=lists),
)


@settings(max_examples=40)
@given(st.lists(requests, max_size=15))
def test_any_calls_in_any_order_leave_nothing_behind(calls: list[Any]) -> None:
    async def scenario() -> None:
        async with owning() as owner:
            owner.offer("o-1")
            owner.offer("o-2")
            for request in calls:
                await owner.call(request)
            # It still does for others what it is there for.
            view = await owner.call(
                pb.BeginTransferRequest(
                    transfer_id="sane", consumer_id="c@1", offer_id="o-1", digest=DIGEST, remaining_ms=5000
                )
            )
            assert not view.error.code, view.error
            assert list(view.groups[0].block_ids) == [2, 5]
            remembered = [*owner.table._past_transfers, *owner.table._past_offers, *owner.table._transfers]
            assert all(len(each) <= MAX_ID_CHARS for each in remembered)
            # A lease later nothing is held, whatever it began and never ended.
            owner.now_s += 3600
            owner.table.expire()
            owner.servicer.settle()
            assert (owner.table.num_open, owner.table.num_transfers) == (0, 0)
            assert sorted(each.offer_id for each in owner.ended) == ["o-1", "o-2"]

    asyncio.run(scenario())


LONG = "x" * (MAX_ID_CHARS + 1)


def _describing(**said: Any) -> pb.HandshakeRequest:
    return pb.HandshakeRequest(peer_id="c@1", kv=pb.KVDescription(**said))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pb.BeginTransferRequest(consumer_id="c", offer_id="o"), "transfer_id must have 1 to 256 characters, got 0"),
        (pb.BeginTransferRequest(transfer_id="t", consumer_id="c", offer_id=LONG), "offer_id must have"),
        (pb.BeginTransferRequest(transfer_id="t", consumer_id=LONG, offer_id="o"), "consumer_id must have"),
        (
            pb.BeginTransferRequest(transfer_id="t", consumer_id="c", offer_id="o", digest=b"d" * 65),
            "digest: 65 given, at most 64 bytes are taken",
        ),
        (
            pb.BeginTransferRequest(
                transfer_id="t", consumer_id="c", offer_id="o", groups=[pb.BlockList(block_ids=range(9))]
            ),
            "groups.block_ids: 9 given, at most 8 are taken",
        ),
        (
            pb.BeginTransferRequest(
                transfer_id="t",
                consumer_id="c",
                offer_id="o",
                groups=[pb.BlockList(block_ids=[1, 2], generations=[1])],
            ),
            "groups.generations: 1 given for 2 blocks",
        ),
        (
            pb.BeginTransferRequest(transfer_id="t", consumer_id="c", offer_id="o", groups=[pb.BlockList()] * 257),
            "groups: 257 given",
        ),
        (pb.EndTransferRequest(transfer_id="t", reason="y" * (MAX_REASON_CHARS + 1)), "reason: 1025 given"),
        (pb.EndTransferRequest(transfer_id="t", release_offer=LONG), "release_offer: 257 given"),
        (pb.EndTransferRequest(transfer_id="t", release_offer_of="o"), "release_offer_of needs release_digest"),
        (pb.EndTransferRequest(transfer_id="t", release_digest=bytes(65)), "release_digest: 65 given"),
        (pb.RenewTransfersRequest(transfer_ids=["t"] * (MAX_TRANSFERS + 1)), "transfer_ids: 65537 given"),
        (pb.RenewTransfersRequest(transfer_ids=["t", LONG]), "transfer_ids must have"),
        (pb.HandshakeRequest(peer_id=LONG), "peer_id: 257 given"),
        (pb.HandshakeRequest(layout_fingerprints=[LONG]), "layout_fingerprints: 257 given"),
        (pb.HandshakeRequest(model_fingerprint="m" * (8 << 20)), "model_fingerprint: 8388608 given"),
        (_describing(layouts=[pb.KVLayout()] * 257), "kv.layouts: 257 given, at most 256 are taken"),
        (_describing(layouts=[pb.KVLayout(layers=range(1 << 20))]), "kv.layouts.layers: 1048576 given"),
        (_describing(layouts=[pb.KVLayout(dtype=LONG)]), "kv.layouts.dtype: 257 given"),
        (_describing(layouts=[pb.KVLayout(packing=LONG)]), "kv.layouts.packing: 257 given"),
        (_describing(weights_fingerprint=LONG), "kv.weights_fingerprint: 257 given"),
        (pb.ReadBlocksRequest(peer_id="owner@1", block_ids=[8]), "block_ids: at most"),
        (pb.ReadBlocksRequest(peer_id="owner@1", block_ids=[1] * ((1 << 16) + 1)), "block_ids: at most 65536"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:24],
)
def test_what_is_out_of_bounds_is_refused_with_field_and_limit(request_: Any, says: str) -> None:
    async def scenario() -> None:
        async with owning() as owner:
            refusal = await owner.call(request_)
            assert isinstance(refusal, grpc.aio.AioRpcError)
            assert says in (refusal.details() or "")
            assert not owner.table._past_transfers

    asyncio.run(scenario())


def test_transfers_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with owning() as owner:
            owner.offer("o-1")

            def begin(number: int) -> pb.BeginTransferRequest:
                return pb.BeginTransferRequest(
                    transfer_id=f"t-{number}", consumer_id="c", offer_id="o-1", digest=DIGEST, remaining_ms=5000
                )

            for number in range(3):
                assert not (await owner.call(begin(number))).error.code
            refused = (await owner.call(begin(3))).error
            assert refused.code == "TransferFailed"
            assert refused.message.startswith("overloaded: ")
            assert "3 transfers under way" in refused.message
            # One that runs may be begun again: its answer was lost.
            assert not (await owner.call(begin(2))).error.code

    monkeypatch.setattr("pdmesh.connector.owner.MAX_TRANSFERS", 3)
    asyncio.run(scenario())
