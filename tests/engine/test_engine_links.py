"""The core's connections: nothing is kept of peers that went, and a pull that one connector fails goes on over the next."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdmesh.connector.base import Pull
from pdmesh.engine.detours import replace_way
from pdmesh.engine.links import Links
from pdmesh.engine.messages import ConnectPeer, OtherWay, Use
from support.no_threads import REFUSAL, refuse_threads
from support.scripted_connector import IdleConnector, ScriptedConnector, answers, order_of


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_peers_that_went_leave_nothing(when: str) -> None:
    connector = IdleConnector()
    links = Links({"shm": connector})
    try:
        for number in range(6):
            if when == "before":
                links.disconnect(str(number))
            links.connect(order_of(number))
            if when == "meanwhile":
                links.disconnect(str(number))
        assert len(answers(links, 6)) == 6
        if when == "before":
            assert connector.connected == {"0", "2", "4"}
        for number in range(6):
            links.disconnect(str(number))
        assert connector.connected == set()
        assert not len(links._attachments)
        assert not len(links._journeys)
    finally:
        links.close()


class Scene:
    """A peer that is connected over `nixl` and may be over `mooncake` and `grpc`, and a pull from it under way."""

    def __init__(self) -> None:
        self.nixl, self.mooncake, self.grpc = (ScriptedConnector(name) for name in ("nixl", "mooncake", "grpc"))
        self.links = Links({each.name: each for each in (self.nixl, self.mooncake, self.grpc)})
        others = [OtherWay(connector=name, metadata=name.encode()) for name in ("mooncake", "grpc")]
        self.order = ConnectPeer(
            peer_id="p", connector="nixl", metadata=b"", num_blocks=1, block_bytes=64, others=others
        )
        self.links.connect(self.order)
        assert len(answers(self.links, 1)) == 1
        self.pull = Pull(
            transfer_id="t",
            peer_id="p",
            source_block_ids=[0],
            generations=[1],
            target_block_ids=[0],
            deadline_s=20.0,
            connector="nixl",
        )
        self.links.start(self.pull)

    def fail(self, connector: ScriptedConnector, reason: str = "peer_lost") -> None:
        """End the pull so, and let the next connector be connected."""
        connector.end(reason)
        assert self.links.poll() == []
        assert len(answers(self.links, 1)) == 1

    def ended(self) -> tuple[str, str]:
        """The reason and the way of the one pull that has ended."""
        (ended,) = self.links.poll()
        assert ended.result.transfer_id == "t"
        return ended.result.reason, ended.connector


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    try:
        yield made
    finally:
        for each in (made.nixl, made.mooncake, made.grpc):
            each.may_connect.set()
        made.links.close()


@pytest.mark.parametrize("reason", ["peer_lost", "error:it broke", "corrupt"])
def test_a_pull_that_a_connector_fails_goes_on_over_the_next(scene: Scene, reason: str) -> None:
    scene.fail(scene.nixl, reason)
    (again,) = scene.mooncake.started
    assert (again.transfer_id, again.generations, again.target_block_ids) == ("t", [1], [0])
    assert 0 < again.deadline_s < 20.0
    scene.mooncake.end("")
    assert scene.ended() == ("", "mooncake:after:nixl")
    # The next one takes its own way, and this one when that fails it: it is connected by now.
    scene.links.start(scene.pull)
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    assert len(scene.mooncake.started) == 2


def test_damage_on_the_way_is_answered_by_another_way_and_told_with_the_pulls_end(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """A path that damages cost each request its pull and its prompt, although the next connector would have done."""
    scene.links.start(replace(scene.pull, transfer_id="checked", checksums=[7]))
    scene.fail(scene.nixl, "corrupt")
    (again,) = scene.mooncake.started
    # What comes is not taken at its word because it came another way.
    assert (again.checksums, again.generations, again.target_block_ids) == ([7], [1], [0])
    scene.mooncake.end("")
    (ended,) = scene.links.poll()
    assert (ended.result.reason, ended.connector, ended.result.damaged) == ("", "mooncake:after:nixl", ("nixl",))
    # Pulls are many: the server tells of them, once.
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_what_is_damaged_over_every_connector_ends_as_corrupt(scene: Scene) -> None:
    scene.fail(scene.nixl, "corrupt")
    scene.fail(scene.mooncake)
    scene.grpc.end("corrupt")
    (ended,) = scene.links.poll()
    assert (ended.result.reason, ended.result.damaged) == ("corrupt", ("nixl", "grpc"))


@pytest.mark.parametrize("then", ["lost", "refused", "late", "cancelled", "let go"])
def test_what_came_damaged_and_failed_otherwise_then_ends_as_corrupt(scene: Scene, then: str) -> None:
    """The last failure was told alone, and the request went on behind a token that its owner may have drawn from damaged KV."""
    scene.mooncake.may_connect.clear()
    if then == "refused":
        scene.mooncake.refusal = scene.grpc.refusal = "no"
    if then == "late":
        scene.links.start(replace(scene.pull, transfer_id="short", deadline_s=0.3))
    scene.nixl.end("corrupt")
    assert scene.links.poll() == []
    if then == "cancelled":
        scene.links.cancel("t")
    elif then == "let go":
        scene.links.disconnect("p")
    elif then == "late":
        assert select.select(scene.links.descriptors, [], [], 10)[0]
        assert scene.links.take_news() == []
    else:
        num = 2 if then == "refused" else 1
        scene.mooncake.may_connect.set()
        assert len(answers(scene.links, num)) == num
    if then == "lost":
        scene.fail(scene.mooncake)
        scene.grpc.end("error:it broke")
    (ended,) = scene.links.poll()
    assert (ended.result.reason, ended.result.damaged) == ("corrupt", ("nixl",))


@pytest.mark.parametrize("reason", ["stale", "timeout", "cancelled"])
def test_what_is_not_the_connectors_fault_ends_the_pull(scene: Scene, reason: str) -> None:
    scene.nixl.end(reason)
    assert scene.ended() == (reason, "nixl")
    assert scene.mooncake.started == []


def test_a_pull_that_all_connectors_fail_ends_with_the_last_ones_reason(scene: Scene) -> None:
    scene.fail(scene.nixl)
    scene.fail(scene.mooncake, "error:it broke")
    scene.grpc.end("error:this too")
    assert scene.ended() == ("error:this too", "grpc:after:mooncake")


def test_a_connector_that_cannot_be_connected_is_passed_over(scene: Scene) -> None:
    scene.mooncake.refusal = "no"
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    assert len(answers(scene.links, 2)) == 2
    scene.grpc.end("")
    assert scene.ended()[0] == ""
    assert scene.mooncake.started == []


def test_where_no_thread_can_be_started_a_failed_pull_ends_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ended with it, for want of a timer."""
    # One that is about to end would do it yet.
    for thread in threading.enumerate():
        if thread.name == "connect":
            thread.join(10)
    refuse_threads(monkeypatch)
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    assert [answer.error for answer in answers(scene.links, 2)] == [REFUSAL] * 2
    assert scene.ended() == ("peer_lost", "grpc:after:mooncake")


def test_a_pull_waits_for_the_end_of_its_ownorder_of(scene: Scene) -> None:
    """That of an earlier one, for memory that was no more, made it pass over a connector that would have done."""
    scene.mooncake.may_connect.clear()
    scene.mooncake.refused_metadata = b"old"
    scene.links.connect(replace_way(scene.order, "mooncake", b"old"))
    scene.links.connect(scene.order)
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    scene.mooncake.may_connect.set()
    assert [answer.error for answer in answers(scene.links, 3)] == ["no such memory", "", ""]
    assert len(scene.mooncake.started) == 1
    assert scene.grpc.connected == set()


@pytest.mark.parametrize(("how", "reason"), [("cancel", "cancelled"), ("disconnect", "peer_lost")])
def test_a_pull_that_waits_for_its_next_connector_can_be_ended(scene: Scene, how: str, reason: str) -> None:
    scene.mooncake.may_connect.clear()
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    if how == "cancel":
        scene.links.cancel("t")
    else:
        scene.links.disconnect("p")
    assert scene.ended() == (reason, "nixl")
    scene.mooncake.may_connect.set()
    assert len(answers(scene.links, 1)) == 1
    assert scene.mooncake.started == []
    assert scene.links.poll() == []
    assert scene.mooncake.connected == (set() if how == "disconnect" else {"p"})


def test_a_pull_that_waits_for_its_next_connector_has_its_deadline(scene: Scene) -> None:
    """Nobody looked before the connect had ended, which may take longer, and others before it."""
    scene.mooncake.may_connect.clear()
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    scene.links.start(replace(scene.pull, transfer_id="short", deadline_s=1.0))
    scene.nixl.end("peer_lost")
    assert scene.links.poll() == []
    # As the loop does: asleep until a descriptor tells of something.
    assert select.select(scene.links.descriptors, [], [], 10)[0]
    assert scene.links.take_news() == []
    assert scene.links.has_refused
    (ended,) = scene.links.poll()
    assert (ended.result.transfer_id, ended.result.reason, ended.connector) == ("short", "timeout", "nixl")
    assert not select.select(scene.links.descriptors, [], [], 0)[0]


def test_a_cancelled_pull_takes_no_other_way(scene: Scene) -> None:
    scene.links.cancel("t")
    assert scene.nixl.cancelled == ["t"]
    scene.nixl.end("peer_lost")
    assert scene.ended() == ("peer_lost", "nixl")


def test_a_peer_that_was_let_go_is_not_sought_elsewhere(scene: Scene) -> None:
    scene.links.disconnect("p")
    scene.nixl.end("peer_lost")
    assert scene.ended() == ("peer_lost", "nixl")
    assert scene.mooncake.connected == set()


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_connector_that_is_given_up_costs_no_pull_over_another(scene: Scene, is_answered: bool) -> None:
    """The pulls over the one that works were cut off for a better one that was late."""
    if not is_answered:
        scene.mooncake.may_connect.clear()
    scene.links.connect(replace_way(scene.order, "mooncake", b""))
    if is_answered:
        assert len(answers(scene.links, 1)) == 1
    scene.links.disconnect("p", Use.PULL, "mooncake")
    scene.mooncake.may_connect.set()
    if not is_answered:
        assert len(answers(scene.links, 1)) == 1
    assert scene.mooncake.connected == set()
    scene.links.start(replace(scene.pull, transfer_id="u"))
    assert scene.links.poll() == []
    assert [each.transfer_id for each in scene.nixl.started] == ["t", "u"]
    assert scene.nixl.connected == {"p"}
    scene.links.disconnect("p")
    assert not len(scene.links._attachments)


@pytest.mark.parametrize("is_given_up_first", [True, False])
def test_a_connector_that_is_given_up_stays_for_the_pull_that_goes_on_over_it(
    scene: Scene, is_given_up_first: bool
) -> None:
    scene.mooncake.may_connect.clear()
    scene.links.connect(replace_way(scene.order, "mooncake", b""))
    scene.links.connect(scene.order)
    scene.nixl.end("peer_lost")
    if is_given_up_first:
        scene.links.disconnect("p", Use.PULL, "mooncake")
    assert scene.links.poll() == []
    if not is_given_up_first:
        scene.links.disconnect("p", Use.PULL, "mooncake")
    scene.mooncake.may_connect.set()
    assert len(answers(scene.links, 3)) == 3
    assert len(scene.mooncake.started) == 1
    assert scene.mooncake.connected == {"p"}
    scene.mooncake.end("")
    assert scene.ended() == ("", "mooncake:after:nixl")
    scene.links.disconnect("p")
    assert scene.mooncake.connected == set()
    assert not len(scene.links._attachments)


@pytest.mark.parametrize("is_wanted_again", [True, False])
def test_of_several_orders_the_last_word_counts(scene: Scene, is_wanted_again: bool) -> None:
    """What one of them connects is not kept for want of another giving up, nor let go under one that came later."""
    order = replace_way(scene.order, "mooncake", b"")
    scene.mooncake.may_connect.clear()
    scene.links.connect(order)
    if not is_wanted_again:
        scene.links.connect(order)
    scene.links.disconnect("p", Use.PULL, "mooncake")
    if is_wanted_again:
        scene.links.connect(order)
    scene.mooncake.may_connect.set()
    assert len(answers(scene.links, 2)) == 2
    assert scene.mooncake.connected == ({"p"} if is_wanted_again else set())
    scene.links.disconnect("p")
    assert not len(scene.links._attachments)


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_lost_peers_pull_that_is_yet_to_end_keeps_no_connection(scene: Scene, is_lost_first: bool) -> None:
    scene.nixl.may_connect.clear()
    again = replace_way(scene.order, "nixl", b"another")
    if is_lost_first:
        scene.links.disconnect("p")
        scene.links.connect(again)
        scene.links.disconnect("p", Use.PULL, "nixl")
    else:
        scene.links.connect(again)
        scene.links.disconnect("p")
    scene.nixl.may_connect.set()
    assert len(answers(scene.links, 1)) == 1
    assert scene.nixl.connected == set()
    scene.nixl.end("cancelled")
    assert scene.ended() == ("peer_lost", "nixl")
    assert not len(scene.links._attachments)
    assert not scene.links._lost
