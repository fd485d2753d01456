"""What is said of pushes, to the wire and back; and who may push to whom."""

from __future__ import annotations

import dataclasses

import pytest

from pdmesh.errors import InvalidRequest, TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import pushes
from pdmesh.protocol.capabilities import (
    FIRST,
    OWN,
    Capabilities,
    Versions,
    can_push,
    capabilities_from_pb,
    capabilities_to_pb,
)
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.peer_bounds import check_push
from pdmesh.protocol.transfers import Begin
from support.old_wire import through_old_wire

OFFER_ID = "0123456789abcdef" * 2
EXPECTATION = pushes.Expectation(
    offer_id=OFFER_ID,
    owner_id="prefill-1@7",
    owner_address="host:8101",
    token_ids=[1, 2, 1 << 31],
    cache_salt="salt",
    remaining_s=12.5,
)
BEGIN = Begin(transfer_id="t", consumer_id="decode-1@8", offer_id=OFFER_ID, digest=b"d" * 32, remaining_s=3.25)
ORDER = pushes.PushOrder(
    begin=BEGIN,
    targets=[GroupBlocks(group=0, block_ids=[4, 5], generations=[], first_block=3)],
    connector="nixl",
    metadata=b"how",
    num_blocks=64,
    block_bytes=4096,
)
PROGRESS = pushes.PushProgress(peer_id="prefill-1@7", num_blocks=5, checksums=[[7, (1 << 64) - 1]], ended=True)


def test_all_that_is_said_comes_back_as_it_was() -> None:
    assert pushes.expectation_from_pb(pushes.expectation_to_pb(EXPECTATION)) == EXPECTATION
    assert pushes.order_from_pb(pushes.order_to_pb(ORDER)) == ORDER
    assert pushes.progress_from_pb(pushes.progress_to_pb(PROGRESS)) == PROGRESS


def test_an_owners_error_is_still_one() -> None:
    said = dataclasses.replace(PROGRESS, error=TransferFailed("released: it is over", param="offer_id"))
    heard = pushes.progress_from_pb(pushes.progress_to_pb(said))
    assert isinstance(heard.error, TransferFailed)
    assert (heard.error.message, heard.error.param) == ("released: it is over", "offer_id")


@pytest.mark.parametrize("text", ["", OFFER_ID[1:], OFFER_ID + "0", "G" * 32, OFFER_ID.upper(), "٣" * 32])
def test_only_what_a_proxy_mints_is_an_offers_id(text: str) -> None:
    assert pushes.is_offer_id(OFFER_ID)
    assert not pushes.is_offer_id(text)


def test_both_sides_must_say_that_they_push() -> None:
    pushing, later = Capabilities(push=FIRST), Capabilities(push=Versions(2, 3))
    assert can_push(pushing, pushing)
    assert not can_push(OWN, pushing)
    assert not can_push(pushing, OWN)
    assert not can_push(pushing, later)
    told = [pb.Capability.FromString(each.SerializeToString()) for each in capabilities_to_pb(pushing)]
    assert can_push(capabilities_from_pb(told), pushing)


def test_an_engine_of_the_first_version_is_never_pushed_to() -> None:
    info = pb.EngineInfo(capabilities=capabilities_to_pb(Capabilities(push=FIRST)))
    heard = pb.EngineInfo.FromString(through_old_wire("EngineInfo", info.SerializeToString()))
    assert not can_push(capabilities_from_pb(heard.capabilities), Capabilities(push=FIRST))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.PushRequest(), "transfer_id"),
        (pb.PushRequest(targets=[pb.BlockList(group=each) for each in range(257)]), "targets"),
        (pb.PushRequest(num_blocks=1, targets=[pb.BlockList(block_ids=[0, 1])]), "targets.block_ids"),
        (pb.PushRequest(pool=pb.ConnectorMetadata(connector="n" * 257)), "pool.connector"),
        (pb.PushRequest(pool=pb.ConnectorMetadata(metadata=bytes((1 << 20) + 1))), "pool.metadata"),
    ],
)
def test_more_than_any_consumer_needs_is_refused(message: pb.PushRequest, field: str) -> None:
    if field != "transfer_id":
        message.begin.CopyFrom(pushes.order_to_pb(ORDER).begin)
    with pytest.raises(InvalidRequest, match=field):
        check_push(message)
    check_push(pushes.order_to_pb(ORDER))
