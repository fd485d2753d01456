"""A peer that is pulled from and pushed to: each of the two lives and ends by itself, also over one connection."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from pdmesh.connector.base import FixedMetadata, PeerPool, Pull, PullResult, Push, PushConnector, ReadInPlace
from pdmesh.connector.pool import KVPool
from pdmesh.engine.links import Links
from pdmesh.engine.messages import ConnectPeer, Use
from pdmesh.errors import HandshakeRefused
from support.scripted_connector import answers

PULL = Pull(
    transfer_id="t", peer_id="p", source_block_ids=[0], generations=[1], target_block_ids=[0], deadline_s=20.0, connector="nixl"
)  # fmt: skip
PUSH = Push(transfer_id="w", peer_id="p", source_block_ids=[0], target_block_ids=[0], deadline_s=20.0)


class Connector(FixedMetadata, ReadInPlace, PushConnector):
    """Reads and writes; ends what the test says, and what is under way when its peer is connected anew or let go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connected: dict[str, bytes] = {}
        self.num_connects = 0
        self.refusal = ""
        self.is_connecting = threading.Event()
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.running: set[str] = set()
        self._results: list[PullResult] = []
        self._fd = os.eventfd(0)

    def register(self, pool: KVPool) -> bytes:
        return b""

    def connect(self, peer: PeerPool) -> None:
        self.num_connects += 1
        self._end_all()
        self.is_connecting.set()
        assert self.may_connect.wait(10)
        if self.refusal:
            self.connected.pop(peer.peer_id, None)
            raise HandshakeRefused(self.refusal)
        self.connected[peer.peer_id] = peer.metadata

    def disconnect(self, peer_id: str) -> None:
        if self.connected.pop(peer_id, None) is not None:
            self._end_all()

    def start(self, pull: Pull) -> None:
        self.running.add(pull.transfer_id)

    def push(self, push: Push) -> None:
        self.running.add(push.transfer_id)

    def shut_out(self, on_done: Callable[[], None]) -> None:
        on_done()

    def cancel(self, transfer_id: str) -> None:
        self.end(transfer_id, "cancelled")

    def end(self, transfer_id: str, reason: str = "") -> None:
        self.running.remove(transfer_id)
        self._results.append(PullResult(transfer_id=transfer_id, reason=reason, num_bytes=1, duration_s=0.1))

    def poll(self) -> list[PullResult]:
        results, self._results = self._results, []
        return results

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def _end_all(self) -> None:
        for transfer_id in list(self.running):
            self.end(transfer_id, "peer_lost")


class Scene:
    def __init__(self) -> None:
        self.nixl, self.grpc = Connector("nixl"), Connector("grpc")
        self.links = Links({"nixl": self.nixl, "grpc": self.grpc})

    def connect(self, use: Use, connector: str = "nixl", metadata: bytes = b"m") -> str:
        self.links.connect(
            ConnectPeer(peer_id="p", connector=connector, metadata=metadata, num_blocks=1, block_bytes=64, use=use)
        )
        return self.answer(use)

    def connect_slowly(self, use: Use, metadata: bytes) -> None:
        """Have it begun; the connector goes on when `may_connect` is set."""
        self.nixl.may_connect.clear()
        self.nixl.is_connecting.clear()
        self.links.connect(
            ConnectPeer(peer_id="p", connector="nixl", metadata=metadata, num_blocks=1, block_bytes=64, use=use)
        )
        assert self.nixl.is_connecting.wait(10)

    def answer(self, use: Use) -> str:
        [answer] = answers(self.links, 1)
        assert answer.use is use
        return answer.error

    def begin(self) -> None:
        self.links.start(PULL)
        self.links.start(PUSH)
        assert self.nixl.running == {"t", "w"}

    def ended(self) -> dict[str, str]:
        return {each.result.transfer_id: each.result.reason for each in self.links.poll()}


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.nixl.may_connect.set()
    made.links.close()


@pytest.mark.parametrize("first", list(Use))
@pytest.mark.parametrize("lost", list(Use))
def test_the_loss_of_one_leaves_the_other_alone(scene: Scene, first: Use, lost: Use) -> None:
    """Either end of the two cut off both, for they are one connection."""
    other = next(each for each in Use if each is not lost)
    for use in (first, next(each for each in Use if each is not first)):
        assert scene.connect(use) == ""
    scene.begin()
    scene.links.disconnect("p", lost)
    assert scene.ended() == {("t" if lost is Use.PULL else "w"): "peer_lost"}
    [survivor] = scene.nixl.running
    assert survivor == ("t" if other is Use.PULL else "w")
    scene.nixl.end(survivor)
    assert scene.ended() == {survivor: ""}
    # Nothing more begins for the one that was let go.
    scene.links.start(PULL if lost is Use.PULL else PUSH)
    assert list(scene.ended().values()) == ["peer_lost"]
    assert scene.nixl.connected == {"p": b"m"}
    scene.links.disconnect("p", other)
    assert scene.nixl.connected == {}
    assert not len(scene.links._attachments)


def test_what_stands_is_not_connected_anew_under_the_other(scene: Scene) -> None:
    scene.connect(Use.PULL)
    scene.links.start(PULL)
    scene.connect(Use.PUSH)
    assert scene.nixl.num_connects == 1
    assert scene.nixl.running == {"t"}
    # The peer is reached in another way now: what was under way is over anyhow.
    scene.connect(Use.PUSH, metadata=b"new")
    assert scene.nixl.connected == {"p": b"new"}
    assert scene.ended() == {"t": "peer_lost"}


@pytest.mark.parametrize("reason", ["peer_lost", "error:it broke"])
def test_a_connection_that_something_failed_over_is_made_anew(scene: Scene, reason: str) -> None:
    scene.connect(Use.PULL)
    scene.connect(Use.PUSH)
    scene.begin()
    scene.nixl.end("w", reason)
    assert scene.ended() == {"w": reason}
    scene.links.disconnect("p", Use.PUSH)
    scene.connect(Use.PUSH)
    assert scene.nixl.num_connects == 2


def test_one_that_cannot_be_made_anew_is_no_ones(scene: Scene) -> None:
    scene.connect(Use.PULL)
    scene.nixl.refusal = "no"
    assert scene.connect(Use.PUSH, metadata=b"new") == "no"
    scene.nixl.refusal = ""
    # It does not stand: the next one is made.
    scene.connect(Use.PUSH)
    assert scene.nixl.connected == {"p": b"m"}
    for use in Use:
        scene.links.disconnect("p", use)
    assert scene.nixl.connected == {}
    assert not len(scene.links._attachments)


def test_connectors_of_one_use_only_go_with_it(scene: Scene) -> None:
    scene.connect(Use.PULL)
    scene.connect(Use.PULL, "grpc")
    scene.connect(Use.PUSH)
    scene.links.disconnect("p", Use.PULL)
    assert (scene.grpc.connected, scene.nixl.connected) == ({}, {"p": b"m"})


@pytest.mark.parametrize("first", list(Use))
def test_what_is_heard_late_of_a_connection_is_not_said_of_the_next(scene: Scene, first: Use) -> None:
    """One failure made the two uses cut each other's connection in turn for as long as there was traffic: what a new connection
    had cut reported late, the new one was taken for broken, and made anew for the other use."""
    other = next(each for each in Use if each is not first)
    scene.connect(Use.PULL)
    scene.connect(Use.PUSH)
    scene.begin()
    failed, cut = ("t", "w") if first is Use.PULL else ("w", "t")
    scene.nixl.end(failed, "peer_lost")
    assert scene.ended() == {failed: "peer_lost"}
    scene.links.disconnect("p", first)
    # What that cuts off is heard of when it stands.
    scene.connect(first)
    assert scene.nixl.num_connects == 2
    scene.links.start(PULL if first is Use.PULL else PUSH)
    assert scene.ended() == {cut: "peer_lost"}
    scene.links.disconnect("p", other)
    scene.connect(other)
    assert (scene.nixl.num_connects, scene.nixl.running) == (2, {failed})
    # The new one breaks as well: that is heard.
    scene.nixl.end(failed, "error:it broke")
    assert scene.ended() == {failed: "error:it broke"}
    scene.connect(other)
    assert scene.nixl.num_connects == 3
    for use in Use:
        scene.links.disconnect("p", use)
    assert not len(scene.links._attachments)


def test_a_pull_that_begins_while_its_connection_is_made_anew_is_one_of_the_new_one(scene: Scene) -> None:
    """It passed for one of the connection before: that the new one had broken under it was not heard, the next order found it to
    stand, and the next pull failed as well."""
    scene.connect(Use.PULL)
    scene.connect_slowly(Use.PUSH, b"new")
    scene.links.start(PULL)
    assert scene.ended() == {}
    assert scene.nixl.running == set()
    scene.nixl.may_connect.set()
    assert scene.answer(Use.PUSH) == ""
    assert scene.nixl.running == {"t"}
    scene.nixl.end("t", "error:it broke")
    assert scene.ended() == {"t": "error:it broke"}
    scene.links.disconnect("p", Use.PULL)
    scene.connect(Use.PULL, metadata=b"new")
    assert scene.nixl.num_connects == 3
    for use in Use:
        scene.links.disconnect("p", use)
    assert not len(scene.links._attachments)
    assert not len(scene.links._journeys)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("refused", "peer_lost"), ("cancelled", "cancelled"), ("let go", "peer_lost"), ("late", "timeout")],
)
def test_a_pull_that_waits_for_its_connection_ends_without_it(scene: Scene, how: str, reason: str) -> None:
    scene.connect(Use.PULL)
    scene.connect_slowly(Use.PUSH, b"new")
    scene.links.start(replace(PULL, deadline_s=0.05) if how == "late" else PULL)
    if how == "refused":
        scene.nixl.refusal = "no"
        scene.nixl.may_connect.set()
        assert scene.answer(Use.PUSH) == "no"
    elif how == "cancelled":
        scene.links.cancel("t")
    elif how == "let go":
        scene.links.disconnect("p", Use.PULL)
    else:
        # As the loop does: asleep until a descriptor tells of something.
        assert select.select(scene.links.descriptors, [], [], 10)[0]
        assert scene.links.take_news() == []
    assert scene.ended() == {"t": reason}
    scene.nixl.may_connect.set()
    if how != "refused":
        assert scene.answer(Use.PUSH) == ""
    assert scene.nixl.running == set()
