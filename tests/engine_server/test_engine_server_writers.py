"""Who is shut out of a pool: who does not say that it stops. An owner that is slow to and says so is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.push_messages import ShutOutWriters, WritersShutOut
from pdmesh.engine.server import writers
from pdmesh.engine.server.writers import Writers
from pdmesh.protocol.transfers import Ended

OWNER = "owner@1"
STOPPED = Ended(known=False, peer_id=OWNER)
STOPPING = Ended(known=False, writing=True, stopping=True, peer_id=OWNER)
WRITING = Ended(known=False, writing=True, peer_id=OWNER)
OTHER = Ended(known=False, writing=False, peer_id="owner@2")


class Clock:
    """Goes on by the pauses only."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def asked(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[float], Ended | None],
    *,
    deadline_s: float = 60.0,
    has_ended: bool = False,
) -> tuple[bool, float]:
    """Whether the owner is shut out, and when nothing more is waited for. `answer`: what it says at a time."""
    clock = Clock()
    sent: list[Any] = []

    async def pause(seconds: float) -> None:
        clock.now_s += seconds

    async def end(*_: object) -> Ended | None:
        return answer(clock.now_s)

    async def reach(*_: object) -> Any:
        return SimpleNamespace(peer_id=OWNER)

    monkeypatch.setattr(writers, "time", clock)
    monkeypatch.setattr(writers, "asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": pause})))
    peers: Any = SimpleNamespace(end=end, reach=reach)

    async def run() -> None:
        def send(message: Any) -> None:
            sent.append(message)
            asyncio.get_running_loop().call_soon(made.shut_out, WritersShutOut(connector="nixl"))

        made = Writers(core=SimpleNamespace(send=send), peers=peers, connector="nixl")
        async with asyncio.timeout(10):
            await made.stop(OWNER, "127.0.0.1:1", "t", 0, deadline_s, has_ended=has_ended)

    asyncio.run(run())
    assert all(isinstance(each, ShutOutWriters) for each in sent)
    return bool(sent), clock.now_s


def test_an_owner_that_says_that_it_is_stopping_has_the_time_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had 5 s like a silent one, and then all pulls over the connector were cut off too."""
    is_shut_out, at_s = asked(monkeypatch, lambda now_s: STOPPING if now_s < 25 else STOPPED)
    assert not is_shut_out
    assert 25 <= at_s < 27


@pytest.mark.parametrize("deadline_s", [1.0, 20.0])
def test_it_has_no_more_than_that(monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> None:
    is_shut_out, at_s = asked(monkeypatch, lambda now_s: STOPPING, deadline_s=deadline_s)
    assert is_shut_out
    assert max(writers.ASK_FOR_S, deadline_s) <= at_s < max(writers.ASK_FOR_S, deadline_s) + 2


def test_one_that_falls_silent_has_as_long_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    is_shut_out, at_s = asked(monkeypatch, lambda now_s: STOPPING if now_s < 8 else None)
    assert is_shut_out
    assert at_s < 8 + writers.ASK_FOR_S + 2


@pytest.mark.parametrize("word", [None, WRITING], ids=["silent", "earlier_release"])
def test_who_does_not_say_so_is_shut_out_soon(monkeypatch: pytest.MonkeyPatch, word: Ended | None) -> None:
    is_shut_out, at_s = asked(monkeypatch, lambda now_s: word)
    assert is_shut_out
    assert at_s < writers.ASK_FOR_S + 2


def test_another_start_of_the_owner_is_never_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, lambda now_s: OTHER) == (True, 0.0)


def test_one_that_has_ended_and_cannot_say_that_nothing_arrives_is_never_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its core had died: blocks stayed in quarantine for as long as it was asked, and it could say nothing else."""
    assert asked(monkeypatch, lambda now_s: WRITING, has_ended=True) == (True, 0.0)


def test_one_that_has_ended_and_says_that_nothing_arrives_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, lambda now_s: STOPPED, has_ended=True) == (False, 0.0)
