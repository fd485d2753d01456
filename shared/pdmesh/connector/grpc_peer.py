"""A connection to an owner's server process, over which connector `grpc` reads its blocks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc

from pdmesh.channels import OWN_CONNECTION, open_blocking_channel
from pdmesh.connector.active import PullEnd, error_reason
from pdmesh.connector.base import PeerPool
from pdmesh.connector.pool import PoolShape
from pdmesh.errors import HandshakeRefused
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.security import MeshSecret


class ReadCall(Protocol):
    """A ReadBlocks call under way, as far as it is used here."""

    def __iter__(self) -> Iterator[pb.BlockChunk]: ...

    def cancel(self) -> bool: ...


class GrpcPeer:
    """A connection to an owner's server process."""

    def __init__(self, pool: PeerPool, secret: MeshSecret, num_threads: int) -> None:
        self.peer_id = pool.peer_id
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grpc-pull")
        """Each carries out one pull at a time."""
        self.num_pulls = 0
        """Under way or waiting for a thread."""
        self.shape = PoolShape(pool.num_blocks, pool.block_bytes)
        # A channel of its own: grpc would share a broken one between epochs of an owner.
        self._channel = open_blocking_channel(pool.metadata.decode(), secret, OWN_CONNECTION)
        self._stub = mesh_pb2_grpc.KVPeerStub(self._channel)
        self._metadata = secret.call_metadata()

    def check(self, timeout_s: float) -> None:
        """Raise HandshakeRefused unless this very owner answers, and takes our secret. Blocks."""
        try:
            # Nothing is asked for.
            for _ in self.read([], timeout_s):
                pass
        except grpc.RpcError as exc:
            raise HandshakeRefused(f"{self.peer_id} cannot be read over gRPC: {_words(exc)}") from exc

    def read(self, block_ids: list[int], timeout_s: float, *, chunk_bytes: int = 0) -> ReadCall:
        """Begin to read blocks, `chunk_bytes` of them in each message; 0: as many as the owner likes."""
        request = pb.ReadBlocksRequest(peer_id=self.peer_id, block_ids=block_ids, chunk_bytes=chunk_bytes)
        call: ReadCall = self._stub.ReadBlocks(request, timeout=timeout_s, metadata=self._metadata)
        return call

    def reason_of(self, error: Exception) -> str:
        """Say how a pull ends that met this error."""
        if not isinstance(error, grpc.RpcError):
            return error_reason(error)
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return PullEnd.TIMEOUT
        # The owner is gone, or another one answers at its address.
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED):
            return PullEnd.PEER_LOST
        return error_reason(_words(error))

    def close(self) -> None:
        """End the connection and its calls, and its threads with them."""
        self._channel.close()
        self.threads.shutdown(wait=False)


def _words(error: grpc.RpcError) -> str:
    return f"{error.code().name.lower()} {error.details()}"
