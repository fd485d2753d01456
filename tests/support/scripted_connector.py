"""A connector as a test wants it: no memory moves, and connecting and pulls end when and how the test says."""

from __future__ import annotations

import os
import select
import threading
import time

from pdmesh.connector.base import FixedMetadata, PeerPool, Pull, PullResult, ReadInPlace
from pdmesh.connector.pool import KVPool
from pdmesh.engine.links import Links
from pdmesh.engine.messages import ConnectPeer, PeerConnected
from pdmesh.errors import HandshakeRefused


class IdleConnector(FixedMetadata, ReadInPlace):
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


class ScriptedConnector(IdleConnector):
    """Ends pulls as the test says; connecting waits for `may_connect` and fails with `refusal`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.started: list[Pull] = []
        self.cancelled: list[str] = []
        self.may_connect = threading.Event()
        self.may_connect.set()
        self.refusal = ""
        self.refused_metadata: bytes | None = None
        self._results: list[PullResult] = []

    def connect(self, peer: PeerPool) -> None:
        assert self.may_connect.wait(10)
        if self.refusal:
            raise HandshakeRefused(self.refusal)
        if peer.metadata == self.refused_metadata:
            raise HandshakeRefused("no such memory")
        self.connected.add(peer.peer_id)

    def start(self, pull: Pull) -> None:
        self.started.append(pull)

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def poll(self) -> list[PullResult]:
        results, self._results = self._results, []
        return results

    def end(self, reason: str) -> None:
        """End the pull that was started last."""
        num_bytes = 0 if reason else 64
        pull = self.started[-1]
        self._results.append(
            PullResult(transfer_id=pull.transfer_id, reason=reason, num_bytes=num_bytes, duration_s=0.1)
        )


def order_of(number: int) -> ConnectPeer:
    """The order to connect a peer of that name."""
    return ConnectPeer(peer_id=str(number), connector="shm", metadata=b"", num_blocks=1, block_bytes=1)


def answers(links: Links, num: int) -> list[PeerConnected]:
    """Wait for the ends of so many orders; fewer when they do not come."""
    news: list[PeerConnected] = []
    end_s = time.monotonic() + 10
    while len(news) < num and select.select(links.descriptors, [], [], max(0.0, end_s - time.monotonic()))[0]:
        news += [each for each in links.take_news() if isinstance(each, PeerConnected)]
    return news
