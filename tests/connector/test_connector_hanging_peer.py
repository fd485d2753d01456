"""Peers that hang while they are connected, as real processes: the others are connected meanwhile."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from itertools import islice

import msgspec
import psutil
import pytest

from pdmesh.connector.pool import PoolShape
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.engine.links import Links
from pdmesh.engine.messages import ConnectPeer, PeerConnected
from pdmesh.security import MeshSecret
from support.pool_node import SECRET, Node, make_pool, pool_node

SHAPE = PoolShape(num_blocks=8, block_bytes=16 << 10)


def _order(node: Node, connector: str) -> ConnectPeer:
    pool = node.pool_for(connector)
    return ConnectPeer(
        peer_id=pool.peer_id,
        connector=connector,
        metadata=pool.metadata,
        num_blocks=pool.num_blocks,
        block_bytes=pool.block_bytes,
    )


def _answers(links: Links) -> Iterator[PeerConnected]:
    while select.select(links.descriptors, [], [], 20)[0]:
        for message in links.take_news():
            assert isinstance(message, PeerConnected)
            yield message


@pytest.mark.parametrize("connector", ["shm", "grpc"])
def test_a_frozen_peer_is_waited_for_by_nobody_else(connector: str) -> None:
    """Whoever came after it waited for its 5 s to be over, or longer, and was refused."""
    pool = make_pool(SHAPE, filled=False)
    connectors = make_worker_connectors([connector], peer_id="consumer@1", secret=MeshSecret(SECRET), on_loopback=True)
    with pool_node([connector], SHAPE, "frozen@1") as frozen, pool_node([connector], SHAPE, "well@1") as well:
        connectors[connector].register(pool)
        links = Links(connectors)
        process = psutil.Process(frozen.process.pid)
        process.send_signal(signal.SIGSTOP)
        try:
            for number, node in enumerate((frozen, well, well), start=1):
                links.connect(msgspec.structs.replace(_order(node, connector), number=number))
            answers = _answers(links)
            assert [(each.error, each.number) for each in islice(answers, 2)] == [("", 2), ("", 3)]
            process.send_signal(signal.SIGCONT)
            assert next(answers).number == 1
        finally:
            process.send_signal(signal.SIGCONT)
            links.close()
    pool.close()
