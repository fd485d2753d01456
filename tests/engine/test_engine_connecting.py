"""Peers are connected aside: who hangs in it holds up nobody else, and takes no threads without end."""

from __future__ import annotations

import threading

import msgspec
import pytest

from pdmesh.connector.base import PeerPool
from pdmesh.engine.connecting import MAX_THREADS
from pdmesh.engine.links import Links
from support.no_threads import REFUSAL, refuse_threads
from support.scripted_connector import IdleConnector, answers, order_of


class Hanging(IdleConnector):
    """Connecting peer 0 takes until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.num_hanging = 0

    def connect(self, peer: PeerPool) -> None:
        if peer.peer_id != "2":
            self.num_hanging += 1
            assert self.may_go_on.wait(20)
        super().connect(peer)


def test_a_peer_that_hangs_in_connect_holds_up_its_own_orders_only() -> None:
    """Each such peer cost all others 5 s: with three of them, or at the fourth attempt, peers that were well were refused."""
    connector = Hanging()
    links = Links({"shm": connector})
    try:
        hanging = [msgspec.structs.replace(order_of(0), number=number) for number in (1, 2)]
        for order in hanging:
            links.connect(order)
        links.connect(order_of(2))
        assert [answer.peer_id for answer in answers(links, 1)] == ["2"]
        assert connector.num_hanging == 1
        connector.may_go_on.set()
        assert [answer.number for answer in answers(links, 2)] == [1, 2]
    finally:
        connector.may_go_on.set()
        links.close()


def test_peers_that_hang_take_no_threads_without_end() -> None:
    connector = Hanging()
    links = Links({"shm": connector})
    try:
        numbers = [number for number in range(0, 100, 2) if number != 2]
        for number in numbers:
            links.connect(order_of(number))
        threads = [thread for thread in threading.enumerate() if thread.name == "connect"]
        assert len(threads) == MAX_THREADS
        connector.may_go_on.set()
        assert {answer.peer_id for answer in answers(links, len(numbers))} == set(map(str, numbers))
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
    finally:
        connector.may_go_on.set()
        links.close()


def test_where_no_thread_can_be_started_the_peer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links({"shm": IdleConnector()})
    try:
        with monkeypatch.context() as patched:
            refuse_threads(patched)
            links.connect(order_of(2))
            assert [answer.error for answer in answers(links, 1)] == [REFUSAL]
        links.connect(order_of(2))
        assert [answer.error for answer in answers(links, 1)] == [""]
    finally:
        links.close()
