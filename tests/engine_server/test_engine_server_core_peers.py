"""What the server has the core connect: each order has its own answer, and what nobody waits for any more is let go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.connector.base import PeerPool
from pdmesh.engine.links import Links
from pdmesh.engine.messages import ConnectPeer, DisconnectPeer, PeerConnected, Use
from pdmesh.engine.server import core_peers
from pdmesh.errors import HandshakeRefused, PeerUnavailable
from support.scripted_connector import ScriptedConnector, answers


def test_a_peer_whose_connect_took_too_long_for_the_server_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core went on and connected it, and nobody knew of it any more: its memory stayed mapped."""
    monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 0.05)
    connector = ScriptedConnector("shm")
    connector.may_connect.clear()
    links = Links({"shm": connector})

    class Core:
        def send(self, message: object) -> None:
            if isinstance(message, ConnectPeer):
                links.connect(message)
            elif isinstance(message, DisconnectPeer):
                links.disconnect(message.peer_id, message.use, message.connector)

    async def attach() -> None:
        pool = PeerPool(peer_id="2", metadata=b"", num_blocks=1, block_bytes=1)
        with pytest.raises(PeerUnavailable, match="in time"):
            await core_peers.CorePeers(Core()).attach(pool, "shm")

    try:
        asyncio.run(attach())
        connector.may_connect.set()
        assert len(answers(links, 1)) == 1
        assert connector.connected == set()
    finally:
        links.close()


class Asked:
    """A core's end: what was sent to it."""

    def __init__(self) -> None:
        self.sent: list[ConnectPeer | DisconnectPeer] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def given_up(self) -> list[DisconnectPeer]:
        return [each for each in self.sent if isinstance(each, DisconnectPeer)]


POOL = PeerPool(peer_id="2", metadata=b"", num_blocks=1, block_bytes=1)


@pytest.mark.parametrize("use", list(Use))
@pytest.mark.parametrize("how", ["late", "cancelled"])
def test_what_nobody_waits_for_any_more_is_given_up_alone_and_for_its_own_use(
    monkeypatch: pytest.MonkeyPatch, use: Use, how: str
) -> None:
    """All that the peer was attached for was cut off; of a push it was its pulls, and the late connection stayed for ever."""
    monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 0.05 if how == "late" else 60.0)

    async def attach() -> list[DisconnectPeer]:
        core = Asked()
        attaching = asyncio.create_task(core_peers.CorePeers(core).attach(POOL, "shm", use))
        if how == "cancelled":
            await asyncio.sleep(0)
            attaching.cancel()
        with pytest.raises(PeerUnavailable if how == "late" else asyncio.CancelledError):
            await attaching
        return core.given_up()

    assert asyncio.run(attach()) == [DisconnectPeer(peer_id="2", use=use, connector="shm")]


def test_one_that_has_waited_long_enough_spoils_it_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was for the first to ask alone: whoever asked a moment later never heard it, and gave up what was connected."""

    async def attach() -> None:
        core = Asked()
        peers = core_peers.CorePeers(core)
        monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 0.05)
        first = asyncio.create_task(peers.attach(POOL, "shm"))
        await asyncio.sleep(0)
        monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 10.0)
        second = asyncio.create_task(peers.attach(POOL, "shm"))
        with pytest.raises(PeerUnavailable, match="in time"):
            await first
        peers.connected(PeerConnected(peer_id="2", connector="shm", number=2))
        await second
        assert core.given_up() == []
        assert not peers._waiting

    asyncio.run(attach())


def test_the_answer_to_an_order_is_none_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came late of an order that had been given up refused a peer that the next order was about to connect; or it told that
    this was connected before it was."""

    async def attach() -> None:
        peers = core_peers.CorePeers(Asked())
        monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 0.05)
        with pytest.raises(PeerUnavailable, match="in time"):
            await peers.attach(POOL, "shm")
        monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 10.0)
        again = asyncio.create_task(peers.attach(replace(POOL, metadata=b"new"), "shm"))
        await asyncio.sleep(0)
        peers.connected(PeerConnected(peer_id="2", connector="shm", error="it is not there", number=1))
        await asyncio.sleep(0)
        assert not again.done()
        peers.connected(PeerConnected(peer_id="2", connector="shm", number=2))
        await again
        assert not peers._waiting
        assert not peers._answers

    asyncio.run(attach())


@pytest.mark.parametrize("end", ["refused", "detached"])
def test_what_one_gave_up_is_let_go_by_the_last_who_waits(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Of the first order the core may have made a connection that nobody else has heard of."""

    async def attach() -> list[DisconnectPeer]:
        core = Asked()
        peers = core_peers.CorePeers(core)
        attached = asyncio.create_task(peers.attach(POOL, "shm"))
        await asyncio.sleep(0)
        monkeypatch.setattr(core_peers, "CONNECT_TIMEOUT_S", 0.05)
        given_up = asyncio.create_task(peers.attach(POOL, "shm"))
        await asyncio.sleep(0)
        if end == "refused":
            with pytest.raises(PeerUnavailable, match="in time"):
                await given_up
            peers.connected(PeerConnected(peer_id="2", connector="shm", error="no", number=1))
            with pytest.raises(HandshakeRefused):
                await attached
        else:
            peers.connected(PeerConnected(peer_id="2", connector="shm", number=1))
            await attached
            peers.detach("2")
            with pytest.raises(PeerUnavailable, match="in time"):
                await given_up
            del core.sent[core.sent.index(DisconnectPeer(peer_id="2"))]
        return core.given_up()

    assert asyncio.run(attach()) == [DisconnectPeer(peer_id="2", connector="shm")]
