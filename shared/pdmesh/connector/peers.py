"""The consumer's end between server processes: who the owners are, which connector reaches each, and their transfers' leases.

One handshake per address at a time, its result kept until a call to that peer fails; the next request then starts afresh, so
a restarted owner (new epoch) replaces the old. The worker half of the chosen connector is attached through the caller's
`attach` (an engine's lives in its core process). Whether an address may be dialled at all is the caller's to decide first.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from pdmesh.connector.active import ERROR_PREFIX, PullEnd
from pdmesh.connector.base import PeerPool
from pdmesh.connector.owner import check_fingerprints
from pdmesh.errors import HandshakeRefused, MeshError, PeerUnavailable
from pdmesh.lifecycle import GRPC_OPTIONS
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import RENEW_INTERVAL_S, OfferView
from pdmesh.protocol.version import PROTOCOL_MAX, PROTOCOL_MIN, agree
from pdmesh.protocol.wire import blocks_from_pb, blocks_to_pb, error_from_pb, to_ms
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

GRPC_CONNECTOR = "grpc"
# A healthy owner answers in milliseconds: these bound what a dead one costs.
HANDSHAKE_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 5.0
END_TIMEOUT_S = 2.0

Attach = Callable[[PeerPool, str], Awaitable[None]]
"""Connects the named connector's worker half to a pool; raises HandshakeRefused or PeerUnavailable when it cannot."""
Detach = Callable[[str], None]
"""Disconnects the worker half from a peer id; never blocks."""


@dataclass(slots=True, kw_only=True, eq=False)
class Peer:
    """An owner that this process has shaken hands with and attached to."""

    peer_id: str
    address: str
    connector: str
    """The one in use."""
    protocol: int
    num_blocks: int
    block_bytes: int
    channel: grpc.aio.Channel
    stub: "mesh_pb2_grpc.KVPeerAsyncStub"
    transfers: set[str] = field(default_factory=set)
    """Running ones, renewed until they end."""


@dataclass(slots=True)
class _Entry:
    """What is known of one address."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    peer: Peer | None = None


class PeerDirectory:
    """Owners by address. An async context manager: leaving it detaches and closes all. Lives on one event loop.

    `block_bytes`, one per layout, lets the tier make its arena for that layout at the handshake.
    """

    def __init__(
        self,
        peer_id: str,
        secret: MeshSecret,
        connectors: list[str],
        model_fingerprint: str,
        layout_fingerprints: list[str],
        attach: Attach,
        detach: Detach,
        *,
        block_bytes: list[int] | None = None,
    ) -> None:
        self.fallbacks: Counter[str] = Counter()
        """Times a connector could not be used and the next one was, by the name of the one that could not."""
        self.lost: int = 0
        """Peers dropped because a call to them failed or they came back under a new epoch."""
        self._peer_id = peer_id
        self._secret = secret
        self._connectors = connectors
        self._model_fingerprint = model_fingerprint
        self._layout_fingerprints = layout_fingerprints
        self._attach = attach
        self._detach = detach
        self._block_bytes = block_bytes or []
        self._entries: dict[str, _Entry] = {}
        self._logged: set[tuple[str, str]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        for peer in self._peers():
            self._drop(peer)
        if self._closing:
            await asyncio.wait(self._closing)

    async def reach(self, address: str, deadline_s: float) -> Peer:
        """Return the attached peer at a gRPC address, shaking hands first when needed; at most `deadline_s`.

        Raises HandshakeRefused (protocol, model or layout differ, no common connector works) or PeerUnavailable.
        """
        entry = self._entries.setdefault(address, _Entry())
        if entry.peer is not None:
            return entry.peer
        try:
            async with asyncio.timeout(deadline_s), entry.lock:
                if entry.peer is None:
                    entry.peer = await self._meet(address, deadline_s)
                return entry.peer
        except TimeoutError:
            raise PeerUnavailable(f"{address} did not finish the handshake within {deadline_s:.1f} s") from None

    async def begin(
        self,
        peer: Peer,
        *,
        transfer_id: str,
        offer_id: str,
        digest: bytes,
        groups: list[GroupBlocks] | None = None,
        remaining_s: float,
    ) -> OfferView:
        """Announce a transfer to the owner; it is renewed from now on until `end`.

        Raises what the owner said (TransferFailed, Forbidden) or PeerUnavailable.
        """
        request = pb.BeginTransferRequest(
            transfer_id=transfer_id,
            consumer_id=self._peer_id,
            offer_id=offer_id,
            digest=digest,
            groups=[blocks_to_pb(group) for group in groups or []],
            remaining_ms=to_ms(remaining_s),
        )
        async with self._translating(peer):
            reply: pb.BeginTransferReply = await peer.stub.BeginTransfer(
                request, timeout=min(CALL_TIMEOUT_S, remaining_s), metadata=self._secret.call_metadata()
            )
        if reply.HasField("error"):
            raise error_from_pb(reply.error)
        self.track(peer, transfer_id)
        return OfferView(groups=[blocks_from_pb(group) for group in reply.groups], num_tokens=reply.num_tokens)

    def track(self, peer: Peer, transfer_id: str) -> None:
        """Renew a transfer that the owner knows already (a tier lookup's) until `end`."""
        peer.transfers.add(transfer_id)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="renew-transfers")

    async def end(self, peer_id: str, transfer_id: str, committed: bool, reason: str = "") -> bool:
        """Tell the owner how a transfer ended. False when it no longer knows it or cannot be told (its lease ends it).

        A peer whose memory could not be read is dropped, so that the next `reach` shakes hands anew.
        """
        peer = self._by_id(peer_id)
        if peer is None:
            return False
        peer.transfers.discard(transfer_id)
        request = pb.EndTransferRequest(transfer_id=transfer_id, committed=committed, reason=reason)
        try:
            async with self._translating(peer):
                reply: pb.EndTransferReply = await peer.stub.EndTransfer(
                    request, timeout=END_TIMEOUT_S, metadata=self._secret.call_metadata()
                )
        except MeshError:
            return False
        if not committed and reason.startswith((PullEnd.PEER_LOST, ERROR_PREFIX)):
            self.forget(peer_id)
        return reply.known

    def forget(self, peer_id: str) -> None:
        """Drop a peer, as after a pull that ended with `peer_lost`; the next `reach` shakes hands anew."""
        peer = self._by_id(peer_id)
        if peer is not None:
            self.lost += 1
            self._drop(peer)

    def _forget_epochs_before(self, peer_id: str) -> None:
        """A process that came back under a new epoch is not its predecessor."""
        engine_id = peer_id.rpartition("@")[0]
        for peer in self._peers():
            if peer.peer_id.rpartition("@")[0] == engine_id:
                self.forget(peer.peer_id)

    async def _meet(self, address: str, deadline_s: float) -> Peer:
        channel = grpc.aio.insecure_channel(address, options=GRPC_OPTIONS)
        try:
            stub = _stub(channel)
            reply = await self._handshake(stub, address, deadline_s)
            if (known := self._by_id(reply.peer_id)) is not None:
                # The same process under a second name.
                await channel.close(None)
                return known
            self._forget_epochs_before(reply.peer_id)
            connector = await self._attach_first(address, reply)
        except BaseException:
            await channel.close(None)
            raise
        return Peer(
            peer_id=reply.peer_id,
            address=address,
            connector=connector,
            protocol=reply.protocol,
            num_blocks=reply.num_blocks,
            block_bytes=reply.block_bytes,
            channel=channel,
            stub=stub,
        )

    async def _handshake(
        self, stub: "mesh_pb2_grpc.KVPeerAsyncStub", address: str, deadline_s: float
    ) -> pb.HandshakeReply:
        request = pb.HandshakeRequest(
            peer_id=self._peer_id,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            layout_fingerprints=self._layout_fingerprints,
            model_fingerprint=self._model_fingerprint,
            block_bytes=self._block_bytes,
        )
        try:
            reply: pb.HandshakeReply = await stub.Handshake(
                request, timeout=min(HANDSHAKE_TIMEOUT_S, deadline_s), metadata=self._secret.call_metadata()
            )
        except grpc.aio.AioRpcError as exc:
            raise _translated(exc, address) from exc
        agree(reply.protocol, reply.protocol, peer=reply.peer_id)
        check_fingerprints(
            (self._peer_id, self._model_fingerprint, self._layout_fingerprints),
            (reply.peer_id, reply.model_fingerprint, list(reply.layout_fingerprints)),
        )
        return reply

    async def _attach_first(self, address: str, reply: pb.HandshakeReply) -> str:
        """Attach by the first connector that both sides have and that works."""
        offered = {each.connector: each.metadata for each in reply.connectors}
        failures = []
        for name in self._connectors:
            try:
                if name not in offered:
                    raise HandshakeRefused("the peer does not offer it")
                # The grpc connector reads from where this handshake was answered.
                metadata = offered[name] if name != GRPC_CONNECTOR else address.encode()
                pool = PeerPool(
                    peer_id=reply.peer_id,
                    metadata=metadata,
                    num_blocks=reply.num_blocks,
                    block_bytes=reply.block_bytes,
                )
                await self._attach(pool, name)
            except (HandshakeRefused, PeerUnavailable) as exc:
                failures.append(f"{name}: {exc.message}")
                self._count_fallback(name, address, exc)
            else:
                return name
        raise HandshakeRefused(f"no connector reaches {reply.peer_id} at {address} ({'; '.join(failures)})")

    def _count_fallback(self, name: str, address: str, error: MeshError) -> None:
        self.fallbacks[name] += 1
        if (name, address) not in self._logged:
            self._logged.add((name, address))
            log.warning("connector %s cannot reach %s, trying the next: %s", name, address, error.message)

    def _drop(self, peer: Peer) -> None:
        for entry in self._entries.values():
            if entry.peer is peer:
                entry.peer = None
        self._detach(peer.peer_id)
        # Calls under way end by themselves: cut off, they would look like their task's cancellation.
        task = asyncio.create_task(peer.channel.close(CALL_TIMEOUT_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _peers(self) -> list[Peer]:
        return list({entry.peer.peer_id: entry.peer for entry in self._entries.values() if entry.peer}.values())

    def _by_id(self, peer_id: str) -> Peer | None:
        return next((peer for peer in self._peers() if peer.peer_id == peer_id), None)

    @asynccontextmanager
    async def _translating(self, peer: Peer) -> AsyncIterator[None]:
        """Turn a failed call into an error of ours; the peer is dropped at its first."""
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            self.forget(peer.peer_id)
            raise _translated(exc, peer.address) from exc

    async def _renew(self) -> None:
        """Renew running transfers while there are any."""
        while True:
            await asyncio.sleep(RENEW_INTERVAL_S)
            busy = [peer for peer in self._peers() if peer.transfers]
            if not busy:
                return
            await asyncio.gather(*(self._renew_at(peer) for peer in busy))

    async def _renew_at(self, peer: Peer) -> None:
        request = pb.RenewTransfersRequest(transfer_ids=sorted(peer.transfers))
        try:
            async with self._translating(peer):
                reply: pb.RenewTransfersReply = await peer.stub.RenewTransfers(
                    request, timeout=RENEW_INTERVAL_S, metadata=self._secret.call_metadata()
                )
        except MeshError as exc:
            log.warning("transfers from %s cannot be renewed: %s", peer.peer_id, exc.message)
            return
        # The pull itself goes on: its generation check decides, and it ends in `end`.
        peer.transfers.difference_update(reply.ended)


def _stub(channel: grpc.aio.Channel) -> "mesh_pb2_grpc.KVPeerAsyncStub":
    return mesh_pb2_grpc.KVPeerStub(channel)


def _translated(error: grpc.aio.AioRpcError, address: str) -> MeshError:
    """Say in our terms why a call to a peer failed."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return HandshakeRefused(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return HandshakeRefused(f"{address} refused this service: {details}")
    return PeerUnavailable(f"{address} failed: {code.name.lower()} {details}".rstrip())
