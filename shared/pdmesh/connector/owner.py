"""The owner's end of every transfer: rpc service KVPeer over an offer table and a pool that this process may read.

Engines and the kvcache service register it with their gRPC server. No call waits for an engine step; while nothing is
offered `run` sleeps.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from pdmesh.connector.active import PullEnd
from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.pool import KVPool
from pdmesh.connector.publications import Publications
from pdmesh.errors import HandshakeRefused, InvalidRequest, MeshError, TransferFailed
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.capabilities import (
    OWN,
    Capabilities,
    capabilities_from_pb,
    capabilities_to_pb,
    pool_obstacle,
)
from pdmesh.protocol.exchange import Exchange, KVDescription, KVNames, description_to_pb, exchange, names_from_pb
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import EndedOffer, OfferTable
from pdmesh.protocol.peer_bounds import (
    MAX_TRANSFERS,
    check_begin,
    check_end,
    check_handshake,
    check_push,
    check_read,
    check_renew,
)
from pdmesh.protocol.pushes import PushOrder, PushProgress, order_from_pb, progress_to_pb
from pdmesh.protocol.transfers import Begin, Begun, Ended, begin_from_pb, begun_to_pb, end_from_pb, ended_to_pb
from pdmesh.protocol.version import agree

CHUNK_BYTES = 4 << 20
"""Bytes of blocks in one message of ReadBlocks unless the reader asks for another size; a larger block travels alone."""
MAX_CHUNK_BYTES = 32 << 20
"""Most it may ask for."""
MAX_READ_BLOCKS = 1 << 16
"""Most blocks one ReadBlocks call may ask for."""

UNAVAILABLE = "unavailable"
"""First word of the refusal of an offer that can only be read over another connector."""

Context = grpc.aio.ServicerContext[Any, Any]


class PoolOwner(mesh_pb2_grpc.KVPeerServicer):
    """Servicer of KVPeer. `offers` stays the caller's: open, seal and release there, then call `settle`.

    `pool` may be a read-only map. `connectors` is what the worker halves' `register` returned; `set_metadata` replaces
    one later. `on_ended` is called on the event loop, once for every offer whose blocks must be let go. Empty fingerprints
    on either side mean "opaque blocks, whoever reads them checks their keys" (the tier) and match any. `sums` tells consumers
    what the blocks sum to; None: they check nothing.
    """

    def __init__(
        self,
        *,
        peer_id: str,
        pool: KVPool,
        offers: OfferTable,
        connectors: dict[str, bytes],
        model_fingerprint: str,
        layout_fingerprints: list[str],
        on_ended: Callable[[EndedOffer], None],
        description: KVDescription | None = None,
        sums: PoolSums | None = None,
    ) -> None:
        self.publications = Publications(connectors)
        self.offers = offers
        self.sums = sums
        self.peer_id = peer_id
        self.on_push: Callable[[PushOrder, Context], Awaitable[None]] | None = None
        """Serves the calls that want blocks written; None: they are only read."""
        self.on_await: Callable[[str, float], Awaitable[list[int]]] | None = None
        """Returns the first tokens of an offer, by its id, when it can be read, within seconds; raises TransferFailed. None:
        nothing is computed here."""
        self.on_settled: Callable[[], None] = lambda: None
        """Called after each change of `offers`."""
        self.may_arrive: Callable[[str], bool] = lambda transfer_id: False
        """Whether bytes of a transfer may come to the consumer's blocks although nothing is written for it any more."""
        self.on_corrupt: Callable[[list[GroupBlocks]], None] = lambda groups: None
        """Called with an offer's blocks when a consumer has got other bytes than they were summed to."""
        self._pool = pool
        self._connectors = dict(connectors)
        self._names = KVNames(
            model_fingerprint=model_fingerprint,
            layout_fingerprints=tuple(layout_fingerprints),
            description=description,
            capabilities=OWN,
        )
        self._on_ended = on_ended
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> str:
        """Register with a server; returns the service's full name."""
        mesh_pb2_grpc.add_KVPeerServicer_to_server(self, server)
        return pb.DESCRIPTOR.services_by_name["KVPeer"].full_name

    def set_metadata(self, connector: str, metadata: bytes) -> None:
        """Replace what later handshakes say of one connector."""
        self._connectors[connector] = metadata

    def withdraw(self, connector: str) -> None:
        """Offer a connector to nobody any more, until its metadata is set again."""
        self._connectors.pop(connector, None)

    def metadata(self, connector: str) -> bytes:
        """What handshakes say of one connector now; empty when it is not offered."""
        return self._connectors.get(connector, b"")

    def check_room(self, transfer_id: str) -> None:
        """Raise TransferFailed when a transfer that is new here is one too many."""
        is_new = self.offers.outcome_of(transfer_id) is None
        if is_new and self.offers.num_transfers >= MAX_TRANSFERS:
            raise TransferFailed(f"overloaded: {self.peer_id} has {MAX_TRANSFERS} transfers under way, its limit")

    def settle(self) -> None:
        """Report offers that ended and watch the leases that are left; call after changing `offers`."""
        for ended in self.offers.take_ended():
            self._on_ended(ended)
        self.on_settled()
        self._changed.set()

    async def run(self) -> None:
        """End leases when they are over; runs until cancelled, asleep until the next one is."""
        while True:
            self._changed.clear()
            deadline = self.offers.next_deadline()
            delay = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                self.offers.expire()
                self.settle()

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeReply:
        """Agree on a protocol version and tell what the pool is; refuses whom its KV is of no use to."""
        check_handshake(request)
        try:
            version = agree(request.protocol_min, request.protocol_max, peer=request.peer_id)
            check_pools(OWN, capabilities_from_pb(request.capabilities), request.peer_id)
            check_names((self.peer_id, self._names), (request.peer_id, names_from_pb(request)))
        except HandshakeRefused as exc:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, exc.message)
        return pb.HandshakeReply(
            peer_id=self.peer_id,
            protocol=version,
            layout_fingerprints=self._names.layout_fingerprints,
            model_fingerprint=self._names.model_fingerprint,
            kv=description_to_pb(self._names.description),
            num_blocks=self._pool.shape.num_blocks,
            block_bytes=self._pool.shape.block_bytes,
            connectors=[
                pb.ConnectorMetadata(connector=name, metadata=metadata) for name, metadata in self._connectors.items()
            ],
            capabilities=capabilities_to_pb(OWN),
        )

    async def BeginTransfer(self, request: pb.BeginTransferRequest, context: Context) -> pb.BeginTransferReply:
        """Let a consumer read an offer's blocks; a refusal is an ErrorInfo in the reply."""
        check_begin(request, self._pool.shape.num_blocks)
        begin = begin_from_pb(request)
        first_tokens: list[int] = []
        try:
            # Of one that has ended, the table says why.
            if begin.awaits and (self.offers.is_live(begin.offer_id) or not self.offers.knows(begin.offer_id)):
                first_tokens, waited_s = await self._first_tokens(begin)
                begin = replace(begin, remaining_s=max(0.0, begin.remaining_s - waited_s))
            why_not = await self.publications.wait(begin.offer_id, begin.connector, begin.remaining_s)
            if why_not:
                raise TransferFailed(f"{UNAVAILABLE}: {begin.connector}: {why_not}")
            self.check_room(begin.transfer_id)
            view = self.offers.begin(
                begin.transfer_id,
                begin.consumer_id,
                begin.offer_id,
                begin.digest,
                begin.groups or None,
                remaining_s=begin.remaining_s,
                heeds_marks=begin.heeds_marks,
            )
        except MeshError as exc:
            return begun_to_pb(Begun(peer_id=self.peer_id, error=exc))
        finally:
            self.settle()
        if self.sums is not None:
            view = replace(view, groups=await self.sums.of(view.groups, view.num_tokens))
        return begun_to_pb(Begun(peer_id=self.peer_id, view=view, first_tokens=first_tokens))

    async def _first_tokens(self, begin: Begin) -> tuple[list[int], float]:
        """Wait for an offer's first tokens; return them, and for how many seconds."""
        if self.on_await is None:
            raise TransferFailed("no_await: nothing is computed here")
        began_s = time.monotonic()
        return await self.on_await(begin.offer_id, begin.remaining_s), time.monotonic() - began_s

    async def RenewTransfers(self, request: pb.RenewTransfersRequest, context: Context) -> pb.RenewTransfersReply:
        """Extend the leases of running transfers; answers with those that have ended."""
        check_renew(request)
        ended = [each for each in request.transfer_ids if not self.offers.renew_transfer(each)]
        self.settle()
        return pb.RenewTransfersReply(ended=ended)

    async def EndTransfer(self, request: pb.EndTransferRequest, context: Context) -> pb.EndTransferReply:
        """Take note of a transfer's outcome; say how it has ended here, which is another when its lease was over first."""
        check_end(request)
        end = end_from_pb(request)
        suspects = self.offers.read_by(end.transfer_id) if is_corrupt(end.committed, end.reason) else []
        known = self.offers.end(end.transfer_id, end.committed, end.reason)
        if suspects and known:
            self.on_corrupt(suspects)
        if end.release_offer:
            self.offers.release(end.release_offer, unread=True, digest=end.release_digest)
        self.settle()
        is_at_work, may_arrive = self.offers.is_writing(end.transfer_id), self.may_arrive(end.transfer_id)
        ended = Ended(
            known=known,
            outcome=self.offers.outcome_of(end.transfer_id),
            writing=is_at_work or may_arrive,
            stopping=is_at_work and not may_arrive,
            peer_id=self.peer_id,
        )
        return ended_to_pb(ended)

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Context) -> AsyncIterator[pb.BlockChunk]:
        """Stream blocks, and with each chunk the generation words read after its data were copied."""
        check_read(request)
        try:
            chunks = read_chunks(self._pool, self.peer_id, request)
        except TransferFailed as exc:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, exc.message)
        except InvalidRequest as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, exc.message)
        for chunk in chunks:
            yield chunk

    async def Push(self, request: pb.PushRequest, context: Context) -> None:  # type: ignore[override]
        """Write an offer's blocks into the consumer's as they are computed, and say how far that is."""
        check_push(request)
        if self.on_push is None:
            await refuse_push(self.peer_id, context)
        else:
            await self.on_push(order_from_pb(request), context)


def is_corrupt(committed: bool, reason: str) -> bool:
    """Whether a consumer's word on its transfer is that the bytes were not what they were summed to."""
    return not committed and reason.partition(":")[0] == PullEnd.CORRUPT


async def refuse_push(peer_id: str, context: Context) -> None:
    """Answer a push to an owner whose blocks are only read."""
    error = TransferFailed("no_push: the blocks here are only read")
    await context.write(progress_to_pb(PushProgress(peer_id=peer_id, ended=True, error=error)))


def check_names(source: tuple[str, KVNames], target: tuple[str, KVNames]) -> Exchange:
    """Say how blocks get from one (peer id, names) to another. Raises HandshakeRefused, naming both sides' values."""
    (source_id, ours), (target_id, theirs) = source, target
    if not (ours.model_fingerprint and theirs.model_fingerprint):
        theirs = replace(theirs, model_fingerprint=ours.model_fingerprint)
    if not (ours.layout_fingerprints and theirs.layout_fingerprints):
        theirs = replace(theirs, layout_fingerprints=ours.layout_fingerprints)
    try:
        return exchange(ours, theirs)
    except HandshakeRefused as exc:
        raise HandshakeRefused(f"{target_id} cannot use KV of {source_id}: {exc.message}") from exc


def check_pools(owner: Capabilities, reader: Capabilities, peer_id: str) -> None:
    """Raise HandshakeRefused when the one cannot read the other's pool; `peer_id` names the one that is not this process."""
    if obstacle := pool_obstacle(owner, reader):
        raise HandshakeRefused(f"KV cannot be exchanged with {peer_id}: {obstacle}")


def read_chunks(pool: KVPool, peer_id: str, request: pb.ReadBlocksRequest) -> Iterator[pb.BlockChunk]:
    """Cut the blocks asked for into messages. Raises TransferFailed for another owner, InvalidRequest for wrong ids."""
    if request.peer_id != peer_id:
        raise TransferFailed(f"peer_lost: the owner is now {peer_id}, not {request.peer_id}")
    block_ids = list(request.block_ids)
    if len(block_ids) > MAX_READ_BLOCKS or any(block_id >= pool.shape.num_blocks for block_id in block_ids):
        raise InvalidRequest(
            f"block_ids: at most {MAX_READ_BLOCKS} ids below {pool.shape.num_blocks} may be read at once"
        )
    chunk_bytes = min(request.chunk_bytes or CHUNK_BYTES, MAX_CHUNK_BYTES)
    return (_chunk(pool, ids) for ids in _split(block_ids, max(1, chunk_bytes // pool.shape.block_bytes)))


def _chunk(pool: KVPool, block_ids: list[int]) -> pb.BlockChunk:
    data = pool.blocks[block_ids].tobytes()
    # After the data: a block that got new content while it was copied shows a new word here.
    return pb.BlockChunk(data=data, generations=pool.generations_of(block_ids))


def _split(block_ids: list[int], most: int) -> Iterable[list[int]]:
    return (block_ids[begin : begin + most] for begin in range(0, len(block_ids), most))
