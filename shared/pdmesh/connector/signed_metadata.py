"""What a consumer needs to reach a pool over a transport that authenticates nobody, behind a MAC of the mesh's secret."""

from typing import TypeVar

import msgspec

from pdmesh.connector.base import PeerPool
from pdmesh.connector.pool import PoolShape
from pdmesh.errors import HandshakeRefused
from pdmesh.security import MeshSecret

MAC_BYTES = 32


class PoolMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What every such connector tells of its pool."""

    peer_id: str
    num_blocks: int
    block_bytes: int

    def shape_of(self, peer: PeerPool) -> PoolShape:
        """Return the pool's shape. Raises HandshakeRefused when the handshake has told another."""
        shape = PoolShape(self.num_blocks, self.block_bytes)
        if shape != PoolShape(peer.num_blocks, peer.block_bytes):
            raise HandshakeRefused(
                f"the pool of {peer.peer_id} has {shape.num_blocks} blocks of {shape.block_bytes} bytes, "
                f"not {peer.num_blocks} of {peer.block_bytes}"
            )
        return shape


MetadataT = TypeVar("MetadataT", bound=PoolMetadata)


def signed(metadata: PoolMetadata, secret: MeshSecret, connector: str) -> bytes:
    """Encode a connector's metadata behind its MAC."""
    body = msgspec.msgpack.encode(metadata)
    return secret.mac(_purpose(connector), body) + body


def opened(peer: PeerPool, kind: type[MetadataT], secret: MeshSecret, connector: str) -> MetadataT:
    """Decode a peer's metadata. Raises HandshakeRefused when it isn't this mesh's, isn't readable, or is another peer's."""
    mac, body = peer.metadata[:MAC_BYTES], peer.metadata[MAC_BYTES:]
    if not secret.check(_purpose(connector), body, mac):
        raise HandshakeRefused(f"the {connector} metadata of {peer.peer_id} was not made with this mesh's secret")
    try:
        metadata = msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as exc:
        raise HandshakeRefused(f"the {connector} metadata of {peer.peer_id} cannot be read: {exc}") from exc
    if metadata.peer_id != peer.peer_id:
        raise HandshakeRefused(f"the {connector} metadata is of {metadata.peer_id}, not of {peer.peer_id}")
    return metadata


def _purpose(connector: str) -> str:
    return f"{connector}-metadata"
