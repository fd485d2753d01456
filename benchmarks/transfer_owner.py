"""The owner of `transfer.py`: a process with a pool of filled blocks, lent out over every connector, by bare NIXL and bare UCX.

Started by it with the connectors' names, the pool's shape and the mesh secret; says what consumers need as one line of JSON and
serves until its standard input closes.
"""

import asyncio
import json
import os
import secrets
import sys

import numpy as np

from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.native_agent import AgentSettings
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.connector.registry import make_worker_connectors
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OfferTable
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server

PEER_ID = "owner@1"


def make_pool(shape: PoolShape, *, fill: bool) -> KVPool:
    """A pool whose pages are all there."""
    fd = create_pool_file("benchmark")
    size_pool_file(fd, shape)
    pool = KVPool(fd, shape, writable=True)
    os.close(fd)
    pool.blocks[:] = 1
    if fill:
        source = np.random.default_rng(1)
        for block in pool.blocks:
            block[:] = source.integers(0, 256, shape.block_bytes, dtype=np.uint8)
    return pool


def address_of(pool: KVPool) -> int:
    """Where a pool's file is mapped."""
    return int(pool.generations.ctypes.data)


async def serve(names: list[str], shape: PoolShape, secret: MeshSecret) -> None:
    """Lend the pool out until there is nothing more on standard input."""
    pool = make_pool(shape, fill=True)
    connectors = make_worker_connectors(names, peer_id=PEER_ID, secret=secret, on_loopback=True)
    metadata = {name: connector.register(pool) for name, connector in connectors.items()}
    ids = list(range(shape.num_blocks))
    blocks = GroupBlocks(group=0, block_ids=ids, generations=pool.generations_of(ids))
    with PoolSums(pool) as sums:
        [blocks] = await sums.of([blocks], 0)
    owner = PoolOwner(
        peer_id=PEER_ID,
        pool=pool,
        offers=OfferTable(),
        connectors=metadata,
        model_fingerprint="model",
        layout_fingerprints=["layout"],
        on_ended=lambda ended: None,
    )
    agent, ucx_address, ucx_key, ucx_version = b"", b"", b"", ""
    if "nixl" in names:
        from pdmesh.connector.nixl_agent import NixlAgent
        from transfer_ucx import UcxOwner

        bare = NixlAgent(AgentSettings(name=f"bare-{secrets.token_hex(4)}", on_loopback=True))
        bare.register(address_of(pool), shape.total_bytes)
        agent = bare.metadata()
        ucx = UcxOwner(address_of(pool), shape.total_bytes)
        ucx_address, ucx_key, ucx_version = ucx.worker_address(), ucx.memory_key(), ucx.version
    async with grpc_server("127.0.0.1", 0, secret, lambda server: [owner.add_to(server)]) as port:
        hello = {
            "address": f"127.0.0.1:{port}",
            "connectors": {name: value.hex() for name, value in metadata.items()},
            "generations": blocks.generations,
            "checksums": blocks.checksums,
            "agent": agent.hex(),
            "ucx_address": ucx_address.hex(),
            "ucx_key": ucx_key.hex(),
            "ucx_version": ucx_version,
            "base": address_of(pool),
        }
        print(json.dumps(hello), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    for connector in connectors.values():
        connector.close()
    # Without destructors: NIXL's may wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1]), PoolShape(int(sys.argv[2]), int(sys.argv[3])), MeshSecret(sys.argv[4])))
