"""The core's connections: nothing is kept of peers that went, however their connecting ended."""

from __future__ import annotations

import os
import time

import pytest

from pdmesh.connector.base import FixedMetadata, PeerPool, Pull, PullResult, ReadInPlace
from pdmesh.connector.pool import KVPool
from pdmesh.engine.links import Links
from pdmesh.engine.messages import ConnectPeer, PeerConnected
from pdmesh.errors import HandshakeRefused


class Connector(FixedMetadata, ReadInPlace):
    """Connects to peers with even numbers."""

    name = "shm"

    def __init__(self) -> None:
        self.connected: set[str] = set()
        self._fd = os.eventfd(0)

    def register(self, pool: KVPool) -> bytes:
        return b""

    def connect(self, peer: PeerPool) -> None:
        if int(peer.peer_id) % 2:
            raise HandshakeRefused("odd")
        self.connected.add(peer.peer_id)

    def disconnect(self, peer_id: str) -> None:
        self.connected.discard(peer_id)

    def start(self, pull: Pull) -> None:
        return

    def poll(self) -> list[PullResult]:
        return []

    def cancel(self, transfer_id: str) -> None:
        return

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def _order(number: int) -> ConnectPeer:
    return ConnectPeer(peer_id=str(number), connector="shm", metadata=b"", num_blocks=1, block_bytes=1)


def _answers(links: Links, num: int) -> list[PeerConnected]:
    news: list[PeerConnected] = []
    end_s = time.monotonic() + 5
    while len(news) < num and time.monotonic() < end_s:
        news += [each for each in links.take_news() if isinstance(each, PeerConnected)]
    return news


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_peers_that_went_leave_nothing(when: str) -> None:
    connector = Connector()
    links = Links({"shm": connector})
    try:
        for number in range(6):
            if when == "before":
                links.disconnect(str(number))
            links.connect(_order(number))
            if when == "meanwhile":
                links.disconnect(str(number))
        assert len(_answers(links, 6)) == 6
        if when == "before":
            assert connector.connected == {"0", "2", "4"}
        for number in range(6):
            links.disconnect(str(number))
        assert connector.connected == set()
        assert not links._unwanted
        assert not links._connecting
        assert not links._connectors_of
    finally:
        links.close()
