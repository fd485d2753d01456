"""A better connector comes back to a peer that is used, soon after it works, and never for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from pdmesh.connector import regaining
from pdmesh.connector.regaining import FIRST_PAUSE_S, LAST_PAUSE_S, Regaining
from pdmesh.errors import PeerUnavailable

PREFERENCE = ["nixl", "shm", "grpc"]


class Peer:
    """What is looked at of a peer."""

    peer_id, address, stub = "owner@1", "127.0.0.1:1", None

    def __init__(self, connector: str) -> None:
        self.connector = connector
        self.attached = {connector}
        self.attaching = asyncio.Lock()
        self.regain_due_s: float | None = None
        self.regain_pause_s = 0.0


class World:
    """A greeter whose connectors work or do not, a clock, and who is known."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.works: set[str] = set()
        self.is_known = True
        self.answers = "owner@1"
        self.num_asked = 0
        self.detached: list[str] = []
        self.work: list[Coroutine[object, object, None]] = []
        parts: dict[str, Any] = {
            "knows": lambda peer: self.is_known,
            "in_background": lambda work, name: self.work.append(work),
            "detach": self.detached.append,
            "clock": lambda: self.now_s,
        }
        greeter: Any = self
        self.regaining = Regaining(greeter, **parts)

    def before(self, connector: str) -> list[str]:
        return PREFERENCE[: PREFERENCE.index(connector)]

    async def ask(self, stub: object, address: str) -> Any:
        self.num_asked += 1
        if not self.answers:
            raise PeerUnavailable("silent")
        return type("Greeting", (), {"reply": type("Reply", (), {"peer_id": self.answers})})

    async def attach_better(self, address: str, greeting: object, connector: str) -> str:
        return next((each for each in self.before(connector) if each in self.works), "")

    def use(self, peer: Any, at_s: float) -> None:
        """Have a peer used at a time, and what that sets off done."""
        self.now_s = at_s
        self.regaining.note_used(peer)
        work, self.work = self.work, []
        for each in work:
            asyncio.run(each)


def met(connector: str) -> tuple[World, Any]:
    world, peer = World(), Peer(connector)
    world.regaining.note_met(peer)  # type: ignore[arg-type]
    return world, peer


def test_a_connector_that_works_again_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    world, peer = met("grpc")
    world.use(peer, FIRST_PAUSE_S - 1)
    assert world.num_asked == 0
    world.use(peer, FIRST_PAUSE_S)
    assert peer.connector == "grpc"
    world.works = {"shm"}
    # Twice as long after one that was in vain.
    world.use(peer, FIRST_PAUSE_S * 3 - 1)
    assert peer.connector == "grpc"
    with caplog.at_level("INFO", regaining.__name__):
        world.use(peer, FIRST_PAUSE_S * 3)
    assert (peer.connector, peer.attached) == ("shm", {"shm", "grpc"})
    assert world.regaining.regained == {"shm": 1}
    assert len(caplog.records) == 1
    # There is a better one still.
    world.works = {"nixl"}
    world.use(peer, FIRST_PAUSE_S * 4)
    assert peer.connector == "nixl"
    num_asked = world.num_asked
    world.use(peer, 1e9)
    assert world.num_asked == num_asked


def test_one_that_never_works_is_tried_ever_more_rarely() -> None:
    world, peer = met("shm")
    for at_s in range(36_000):
        world.use(peer, float(at_s))
    assert 36_000 / LAST_PAUSE_S <= world.num_asked < 36_000 / LAST_PAUSE_S + 8
    assert world.regaining.regained == {}


def test_who_has_the_best_connector_or_is_not_used_is_not_asked() -> None:
    world, peer = met("nixl")
    world.use(peer, 1e9)
    world, peer = met("grpc")
    world.now_s = 1e9
    assert world.num_asked == 0


@pytest.mark.parametrize("answers", ["", "owner@2"])
def test_a_peer_that_is_silent_or_another_now_stays_as_it_is(answers: str) -> None:
    world, peer = met("grpc")
    world.works, world.answers = {"nixl"}, answers
    world.use(peer, FIRST_PAUSE_S)
    assert (peer.connector, world.regaining.regained) == ("grpc", {})
    world.answers = "owner@1"
    world.use(peer, FIRST_PAUSE_S * 3)
    assert peer.connector == "nixl"


def test_what_was_attached_for_a_peer_that_was_lost_meanwhile_is_let_go() -> None:
    world, peer = met("grpc")

    async def attach_better(*_: object) -> str:
        world.is_known = False
        return "nixl"

    world.attach_better = attach_better  # type: ignore[method-assign]
    world.use(peer, FIRST_PAUSE_S)
    assert (peer.connector, world.detached) == ("grpc", ["owner@1"])


def test_an_attempt_that_breaks_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """A library's own error ended the task, and the peer was never asked for a better connector again."""
    world, peer = met("grpc")
    attach_better = world.attach_better

    async def broken(*_: object) -> str:
        raise OSError("no such device")

    world.attach_better = broken  # type: ignore[method-assign]
    world.use(peer, FIRST_PAUSE_S)
    assert "could not be tried" in caplog.text
    world.attach_better = attach_better  # type: ignore[method-assign]
    world.works = {"nixl"}
    world.use(peer, FIRST_PAUSE_S * 3)
    assert peer.connector == "nixl"


def test_nobody_waits_for_an_attempt() -> None:
    """A request that needed its next connector waited for the lock of the one that did the attempt, for up to 20 s."""
    world, peer = met("grpc")
    locked: list[bool] = []

    async def attach_better(*_: object) -> str:
        locked.append(peer.attaching.locked())
        return "nixl"

    world.attach_better = attach_better  # type: ignore[method-assign]
    world.use(peer, FIRST_PAUSE_S)
    assert (locked, peer.connector) == ([False], "nixl")
