"""Connectors over native transports: pulls that a library in a helper process carries out, between hosts and pods as well.

The library lives in a helper process that maps the same pool (`native_process.py`); this half only passes orders on, and a
connector is no more than the name of its transport. What such a library carries is not authenticated by it: the metadata a
consumer gets is signed with the mesh secret, the handshake reads a random proof out of the owner's memory, and who may reach
the ports is the network's to decide.
"""

import importlib.util
from collections.abc import Callable
from typing import ClassVar

from pdmesh.connector.active import ActivePulls, PullEnd, fault_of
from pdmesh.connector.base import PeerPool, Pull, PullResult, ReadInPlace
from pdmesh.connector.native_agent import Transport
from pdmesh.connector.native_helper import NativeHelper
from pdmesh.connector.native_messages import CancelPull, ConnectAgent, HelperReady, StartPull
from pdmesh.connector.options import NativeOptions
from pdmesh.connector.pool import KVPool, PoolShape
from pdmesh.connector.shm import check_block_bytes
from pdmesh.connector.signed_metadata import PoolMetadata, opened, signed
from pdmesh.errors import ConfigError
from pdmesh.security import MeshSecret


class NativeMetadata(PoolMetadata, frozen=True, kw_only=True):
    """What a consumer needs to read the pool."""

    helper: HelperReady


class NativeConnector(ReadInPlace):
    """Both ends of a transport: its helper process serves reads of the registered pool and carries out pulls into it."""

    transport: ClassVar[Transport]

    def __init__(
        self, peer_id: str, secret: MeshSecret, options: NativeOptions | None = None, *, on_loopback: bool = False
    ) -> None:
        if not any(importlib.util.find_spec(package) for package in self.transport.packages):
            raise ConfigError(
                f"connector {self.name}: {self.transport.title} is not installed; {self.transport.remedy} or leave "
                f"{self.name} out"
            )
        self._peer_id = peer_id
        self._secret = secret
        self._options = options or NativeOptions()
        self._on_loopback = on_loopback
        self._pool: KVPool | None = None
        self._helper: NativeHelper | None = None
        self._peers: dict[str, PoolShape] = {}
        self._pulls = ActivePulls()

    def register(self, pool: KVPool) -> bytes:
        self._pool = pool
        self._helper = NativeHelper(
            self.transport, pool, self._peer_id, self._pulls, self._options, on_loopback=self._on_loopback
        )
        try:
            return self._metadata(pool, self._helper.ready())
        except (RuntimeError, TimeoutError) as exc:
            raise ConfigError(
                f"connector {self.name}: {self.transport.title} does not start here: {exc}; leave {self.name} out"
            ) from exc

    def watch_metadata(self, on_changed: Callable[[bytes], None]) -> None:
        pool, helper = self._registered()
        helper.watch(lambda ready: on_changed(self._metadata(pool, ready)))

    def connect(self, peer: PeerPool) -> None:
        pool, helper = self._registered()
        metadata = opened(peer, NativeMetadata, self._secret, self.name)
        shape = metadata.shape_of(peer)
        check_block_bytes(peer, pool.shape)
        # The helper gives up what it knew of a peer of this id.
        self._lose(peer.peer_id)
        helper.connect(
            ConnectAgent(
                peer_id=peer.peer_id,
                agent=metadata.helper.agent,
                base=metadata.helper.base,
                header_bytes=shape.header_bytes,
                proof_address=metadata.helper.proof_address,
                proof=metadata.helper.proof,
            )
        )
        self._peers[peer.peer_id] = shape

    def disconnect(self, peer_id: str) -> None:
        if self._peers.pop(peer_id, None) is None:
            return
        self._lose(peer_id)
        self._registered()[1].disconnect(peer_id)

    def start(self, pull: Pull) -> None:
        self._pulls.add(pull)
        pool, helper = self._registered()
        shape = self._peers.get(pull.peer_id)
        if shape is None:
            self._pulls.finish(pull.transfer_id, PullEnd.PEER_LOST)
        elif fault := fault_of(pull, shape, pool.target(pull.lane).shape):
            self._pulls.finish(pull.transfer_id, fault)
        elif not pull.source_block_ids:
            self._pulls.finish(pull.transfer_id, "")
        else:
            helper.send(
                StartPull(
                    transfer_id=pull.transfer_id,
                    peer_id=pull.peer_id,
                    source_block_ids=pull.source_block_ids,
                    generations=pull.generations,
                    target_block_ids=pull.target_block_ids,
                    deadline_s=pull.deadline_s,
                    checksums=pull.checksums,
                    lane=-1 if pull.lane is None else pull.lane.index,
                    lane_block_bytes=shape.block_bytes,
                )
            )

    def poll(self) -> list[PullResult]:
        return self._pulls.take()

    def cancel(self, transfer_id: str) -> None:
        active = self._pulls.get(transfer_id)
        if active is None:
            return
        active.cancelled = True
        active.fence_soon()
        self._registered()[1].send(CancelPull(transfer_id=transfer_id))

    def fileno(self) -> int:
        return self._pulls.fileno()

    def close(self) -> None:
        for active in self._pulls.all():
            active.cancelled = True
        if self._helper is not None:
            self._helper.close()
            self._helper = None
        for active in self._pulls.all():
            self._pulls.finish(active.pull.transfer_id, PullEnd.CANCELLED)
        self._pulls.close()

    def _lose(self, peer_id: str) -> None:
        """See that the pulls of a peer end: by themselves, as those of a living one do in milliseconds, or by force."""
        for active in self._pulls.of_peer(peer_id):
            active.peer_lost = True
            active.fence_soon()

    def _registered(self) -> tuple[KVPool, NativeHelper]:
        if self._pool is None or self._helper is None:
            raise RuntimeError("register a pool before anything is pulled")
        return self._pool, self._helper

    def _metadata(self, pool: KVPool, helper: HelperReady) -> bytes:
        metadata = NativeMetadata(
            peer_id=self._peer_id,
            num_blocks=pool.shape.num_blocks,
            block_bytes=pool.shape.block_bytes,
            helper=helper,
        )
        return signed(metadata, self._secret, self.name)
