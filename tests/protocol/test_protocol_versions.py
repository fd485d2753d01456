"""Two adjacent versions work together: nothing of version 1's wire has changed its meaning, and each side serves the other."""

from __future__ import annotations

import itertools

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from pdmesh.connector.owner import check_pools
from pdmesh.errors import HandshakeRefused
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.capabilities import (
    OWN,
    UNTOLD,
    Capabilities,
    Versions,
    capabilities_from_pb,
    capabilities_to_pb,
    handoff_obstacle,
)
from pdmesh.protocol.messages import KVMarks
from pdmesh.protocol.transfers import Begun, OfferView, begun_from_pb, begun_to_pb
from pdmesh.protocol.version import PROTOCOL_VERSION, agree
from support.old_wire import frozen, old_class, through_old_wire

MARKS = KVMarks(num_exact_tokens=0, before_reset=True)


def described(message: Descriptor) -> dict[int, tuple[object, ...]]:
    """What of a message decides its bytes, and the names that the code uses."""
    return {
        field.number: (
            field.name,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.name if field.type == FieldDescriptor.TYPE_MESSAGE else None,
        )
        for field in message.fields
    }


@pytest.mark.parametrize("name", sorted(frozen().message_types_by_name))
def test_no_field_of_the_old_wire_has_changed(name: str) -> None:
    old = described(frozen().message_types_by_name[name])
    new = described(pb.DESCRIPTOR.message_types_by_name[name])
    assert {number: new.get(number) for number in old} == old


@pytest.mark.parametrize("name", sorted(frozen().services_by_name))
def test_no_call_of_the_old_wire_has_changed(name: str) -> None:
    new = pb.DESCRIPTOR.services_by_name[name].methods_by_name
    for method in frozen().services_by_name[name].methods:
        same = new[method.name]
        assert (same.input_type.name, same.output_type.name) == (method.input_type.name, method.output_type.name)
        assert (same.client_streaming, same.server_streaming) == (method.client_streaming, method.server_streaming)


def test_the_old_wire_loses_what_is_new() -> None:
    """Or the tests that speak it would prove nothing."""
    reply = pb.EndTransferReply(known=True, outcome="expired", peer_id="p@1")
    aged = pb.EndTransferReply.FromString(through_old_wire("EndTransferReply", reply.SerializeToString()))
    assert aged == pb.EndTransferReply(known=True)
    begun = begun_to_pb(Begun(peer_id="p@1", view=OfferView(groups=[], num_tokens=9, marks=MARKS)))
    assert begun_from_pb(begun).view == OfferView(groups=[], num_tokens=9, marks=MARKS)
    aged_begun = pb.BeginTransferReply.FromString(through_old_wire("BeginTransferReply", begun.SerializeToString()))
    assert begun_from_pb(aged_begun).view == OfferView(groups=[], num_tokens=9)
    info = pb.EngineInfo(engine_id="e", protocol_min=1, protocol_max=PROTOCOL_VERSION)
    info.capabilities.extend(capabilities_to_pb(OWN))
    aged_info = pb.EngineInfo.FromString(through_old_wire("EngineInfo", info.SerializeToString()))
    assert aged_info == pb.EngineInfo(engine_id="e", protocol_min=1, protocol_max=1)
    assert len(old_class("EngineInfo")().DESCRIPTOR.fields) < len(pb.EngineInfo.DESCRIPTOR.fields)


def test_this_release_speaks_the_version_before() -> None:
    assert agree(PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1) == PROTOCOL_VERSION - 1
    with pytest.raises(HandshakeRefused, match="ranges meet"):
        agree(PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2)


def test_capabilities_survive_and_the_unknown_are_ignored() -> None:
    wide = Capabilities(ticket_write=Versions(1, 1), ticket_read=Versions(1, 2), pool=Versions(2, 4))
    told = capabilities_to_pb(wide)
    assert capabilities_from_pb([*told, pb.Capability(name="telepathy", oldest=1, newest=9)]) == wide
    assert capabilities_from_pb([]) == UNTOLD
    assert capabilities_from_pb(told[:2]) == Capabilities(ticket_write=Versions(1, 1), ticket_read=Versions(1, 2))


@pytest.mark.parametrize(
    ("one", "other", "met"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 1), (2, 2), None), ((3, 2), (1, 9), None)],
)
def test_ranges_meet_in_their_newest_common_version(
    one: tuple[int, int], other: tuple[int, int], met: int | None
) -> None:
    assert Versions(*one).meet(Versions(*other)) == met


def test_a_new_version_that_comes_in_three_releases_never_parts_two_that_follow_each_other() -> None:
    old, new = Versions(1, 1), Versions(2, 2)
    releases = [
        Capabilities(ticket_write=old, ticket_read=old),
        Capabilities(ticket_write=old, ticket_read=Versions(1, 2)),
        Capabilities(ticket_write=new, ticket_read=Versions(1, 2)),
        Capabilities(ticket_write=new, ticket_read=new),
    ]
    for before, after in itertools.pairwise(releases):
        assert handoff_obstacle(before, after) == handoff_obstacle(after, before) == ""
    assert handoff_obstacle(releases[0], releases[3]) == "tickets are written in version 1 and read in 2"


def test_pools_that_cannot_be_read_are_refused_with_both_ranges() -> None:
    check_pools(OWN, UNTOLD, "p@1")
    with pytest.raises(HandshakeRefused, match=r"p@1: the pool's memory has layout version 2 to 3, the reader knows 1"):
        check_pools(Capabilities(pool=Versions(2, 3)), UNTOLD, "p@1")


def test_a_ticket_has_one_version_and_of_a_range_any_may_come() -> None:
    """Ranges that met in one version were paired, although the writer, whom nobody asks, wrote the other."""
    assert OWN.ticket_write.oldest == OWN.ticket_write.newest
    either = Capabilities(ticket_write=Versions(1, 2))
    assert handoff_obstacle(either, Capabilities(ticket_read=Versions(1, 3))) == ""
    for read in (Versions(1, 1), Versions(2, 2)):
        obstacle = handoff_obstacle(either, Capabilities(ticket_read=read))
        assert obstacle == f"tickets are written in version 1 to 2 and read in {read}"
