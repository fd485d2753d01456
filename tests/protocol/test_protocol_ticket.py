"""Tickets: only ours, only whole, only of this version; and a digest that two requests never share."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import Forbidden, MeshError, TransferFailed
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.ticket import MAC_PURPOSE, Ticket, request_digest, seal, unseal
from pdmesh.security import MeshSecret

OURS = MeshSecret("our own mesh's secret")
TICKET = Ticket(
    offer_id="offer-1",
    engine_id="prefill-3f9a",
    epoch=(1 << 63) - 1,
    address="127.0.0.1:8101",
    digest=request_digest([1, 2, 3], cache_salt="tenant"),
    groups=[GroupBlocks(group=0, block_ids=[5, 6], generations=[1 << 63, 9])],
    num_tokens=40,
    layout_fingerprints=["layout"],
    model_fingerprint="model",
    first_tokens={0: [17], 2: [99]},
)


def test_what_was_sealed_is_unsealed() -> None:
    ticket = unseal(seal(TICKET, OURS), OURS)
    assert ticket == TICKET
    assert ticket.peer_id == f"prefill-3f9a@{(1 << 63) - 1}"


def test_another_meshs_ticket_is_forbidden() -> None:
    with pytest.raises(Forbidden):
        unseal(seal(TICKET, MeshSecret("another mesh's secret")), OURS)


def test_a_mac_made_for_something_else_does_not_pass() -> None:
    body = seal(TICKET, OURS)[33:]
    with pytest.raises(Forbidden):
        unseal(b"\x01" + OURS.mac("grpc", b"\x01" + body) + body, OURS)


def test_any_cut_ticket_is_refused() -> None:
    data = seal(TICKET, OURS)
    for length in range(len(data)):
        with pytest.raises(Forbidden):
            unseal(data[:length], OURS)
    with pytest.raises(Forbidden):
        unseal(data + b"\0", OURS)


@given(position=st.integers(0, len(seal(TICKET, OURS)) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, flip: int) -> None:
    data = bytearray(seal(TICKET, OURS))
    data[position] ^= flip
    with pytest.raises(MeshError) as caught:
        unseal(bytes(data), OURS)
    assert type(caught.value) is (TransferFailed if position == 0 else Forbidden)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises((Forbidden, TransferFailed)):
        unseal(noise, OURS)


def test_another_releases_ticket_fails_the_transfer() -> None:
    with pytest.raises(TransferFailed, match="version"):
        unseal(seal(msgspec.structs.replace(TICKET, version=2), OURS), OURS)


def test_a_signed_body_of_another_shape_fails_the_transfer() -> None:
    body = msgspec.msgpack.encode({"offer_id": 7})
    with pytest.raises(TransferFailed, match="version"):
        unseal(b"\x01" + OURS.mac(MAC_PURPOSE, b"\x01" + body) + body, OURS)


def test_the_digest_tells_every_part_apart() -> None:
    made = [
        request_digest([1, 2], cache_salt=""),
        request_digest([1, 2, 0], cache_salt=""),
        request_digest([2, 1], cache_salt=""),
        request_digest([], cache_salt=""),
        request_digest([1, 2], cache_salt="a"),
        request_digest([1, 2], cache_salt="", lora="a"),
        request_digest([1, 2], cache_salt="", template="a"),
        request_digest([1, 2], cache_salt="ab", lora="c"),
        request_digest([1, 2], cache_salt="a", lora="bc"),
        request_digest([1, 2], cache_salt="a\0lora\0b"),
    ]
    assert all(a != b for a, b in itertools.combinations(made, 2))
    assert request_digest([1, 2], cache_salt="a") == request_digest([1, 2], cache_salt="a")
    assert request_digest(np.asarray([1, 2]), cache_salt="a") == request_digest([1, 2], cache_salt="a")
    assert {len(each) for each in made} == {32}


@pytest.mark.parametrize(
    "wrong",
    [
        GroupBlocks(group=0, block_ids=[1 << 40], generations=[1]),
        GroupBlocks(group=0, block_ids=[-1], generations=[1]),
        GroupBlocks(group=0, block_ids=[1], generations=[-1]),
        GroupBlocks(group=0, block_ids=[1, 2], generations=[1]),
        GroupBlocks(group=-1, block_ids=[1], generations=[1]),
    ],
)
def test_blocks_that_cannot_be_are_a_failed_transfer(wrong: GroupBlocks) -> None:
    """Once, they went on to the wire's encoder, whose ValueError ended the request as an InternalError."""
    sealed = seal(msgspec.structs.replace(TICKET, groups=[wrong]), OURS)
    with pytest.raises(TransferFailed, match="groups"):
        unseal(sealed, OURS)
