"""The tier on the wire: rpc service KVCache, and KVPeer handed on to the arena that each call is about."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio

from pdmesh.connector.active import PullEnd
from pdmesh.connector.owner import refuse_push
from pdmesh.errors import InvalidRequest, MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.peer_bounds import MAX_KEYS_METADATA_KEY, check_end, check_handshake, check_read, check_renew
from pdmesh.protocol.wire import blocks_to_pb, error_to_pb
from pdmesh_kvcache.arena import BlockKind
from pdmesh_kvcache.arenas import ArenaSet
from pdmesh_kvcache.backing import Backing
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.host import ArenaHost
from pdmesh_kvcache.lookups import Lookups, Query
from pdmesh_kvcache.metrics import Metrics
from pdmesh_kvcache.stores import Offering, StoredBlock, Stores

log = logging.getLogger(__name__)

KEY_BYTES = 32
MAX_ID_CHARS = 256
# Below any real model's; smaller blocks would fill an arena with millions of slots, all of which are booked while others wait.
MIN_BLOCK_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 30
ANSWER_SHARE = 0.8
MAX_WAIT_S = 60.0

Context = grpc.aio.ServicerContext[Any, Any]


class TierServicer(mesh_pb2_grpc.KVCacheServicer):
    """Checks what engines send and calls `lookups` and `stores`."""

    def __init__(
        self, config: KVCacheConfig, *, arenas: ArenaSet, backing: Backing, lookups: Lookups, stores: Stores
    ) -> None:
        self._config = config
        self._arenas = arenas
        self._backing = backing
        self._lookups = lookups
        self._stores = stores

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        """Pin and return the longest run of hits from the first key on."""
        try:
            self._check(request.model_fingerprint, request.layout_fingerprint, list(request.keys))
            if len(set(request.keys)) < len(request.keys):
                raise InvalidRequest("keys: one is given twice, which no chain of hashes has", param="keys")
            _check_id("transfer_id", request.transfer_id)
            _check_id("consumer_id", request.consumer_id)
            found = await self._lookups.find(
                Query(
                    transfer_id=request.transfer_id,
                    consumer_id=request.consumer_id,
                    kind=_kind_of(request),
                    group=request.group,
                    keys=list(request.keys),
                    remaining_s=min(request.remaining_ms / 1000, _patience_s(context), MAX_WAIT_S),
                )
            )
        except InvalidRequest as exc:
            await self._refuse(exc, len(request.keys), context)
        return pb.LookupReply(
            num_hits=len(found.blocks.block_ids),
            blocks=blocks_to_pb(found.blocks),
            num_arena=found.num_arena,
            num_backing=found.num_backing,
            peer_id=found.peer_id,
        )

    async def Store(self, request: pb.StoreRequest, context: Context) -> pb.StoreReply:
        """Queue an engine's blocks to be copied."""
        try:
            accepted = await self._stores.submit(self._offering_of(request))
        except InvalidRequest as exc:
            await self._refuse(exc, len(request.keys), context)
        return pb.StoreReply(num_accepted=accepted)

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        """Tell how full it is."""
        indices = [host.index for host in self._arenas.hosts]
        return pb.StatsReply(
            num_slots=sum(index.num_slots for index in indices),
            num_used=sum(index.num_used for index in indices),
            num_pinned=sum(index.num_pinned for index in indices),
            backing_up=self._backing.up,
        )

    def _offering_of(self, request: pb.StoreRequest) -> Offering:
        keys = list(request.keys)
        self._check(request.model_fingerprint, request.layout_fingerprint, keys)
        _check_id("owner_id", request.owner_id)
        _check_id("owner_address", request.owner_address)
        if not len(keys) == len(request.block_ids) == len(request.generations):
            raise InvalidRequest("keys, block_ids and generations must be of equal length", param="keys")
        if len(request.checksums) not in (0, len(keys)):
            raise InvalidRequest("checksums: there must be one for each of keys, or none", param="checksums")
        _check_block_bytes(request.block_bytes)
        checksums: list[int | None] = [told or None for told in request.checksums] or [None] * len(keys)
        located = zip(keys, request.block_ids, request.generations, checksums, strict=True)
        return Offering(
            kind=_kind_of(request),
            owner_id=request.owner_id,
            owner_address=request.owner_address,
            blocks={key: StoredBlock(block, word, checksum) for key, block, word, checksum in located},
            block_bytes=request.block_bytes,
        )

    def _check(self, model_fingerprint: str, layout_fingerprint: str, keys: list[bytes]) -> None:
        _check_id("model_fingerprint", model_fingerprint)
        _check_id("layout_fingerprint", layout_fingerprint)
        if len(keys) > self._config.max_keys:
            raise InvalidRequest(f"keys: {len(keys)} given, at most {self._config.max_keys} are taken", param="keys")
        if any(len(key) != KEY_BYTES for key in keys):
            raise InvalidRequest(f"keys: each must have {KEY_BYTES} bytes", param="keys")

    async def _refuse(self, error: InvalidRequest, num_keys: int, context: Context) -> NoReturn:
        # An engine can ask again with fewer.
        most = self._config.max_keys
        told = ((MAX_KEYS_METADATA_KEY, str(most)),) if num_keys > most else ()
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message, trailing_metadata=told)
        raise AssertionError("abort raises")


class TierPeer(mesh_pb2_grpc.KVPeerServicer):
    """KVPeer of a service with several pools: a consumer sees the arena of its own layout as the only one."""

    def __init__(self, arenas: ArenaSet, metrics: Metrics) -> None:
        self._arenas = arenas
        self._metrics = metrics

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeReply:
        """Introduce the arena of the caller's model and layout, made now if the caller says how large its blocks are."""
        check_handshake(request)
        try:
            host = await self._host_of(request)
        except InvalidRequest as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, exc.message)
        if host is None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"there is no arena for layout {request.layout_fingerprints[0]} of model {request.model_fingerprint}: "
                "its block_bytes differ, or other layouts have the memory (see --max-layouts, --arena-bytes)",
            )
        assert host is not None, "abort raises"
        reply: pb.HandshakeReply = await host.owner.Handshake(request, context)
        return reply

    async def _host_of(self, request: pb.HandshakeRequest) -> ArenaHost | None:
        if len(request.layout_fingerprints) != 1:
            raise InvalidRequest("the tier keeps blocks of one layout per consumer", param="layout_fingerprints")
        layout = request.layout_fingerprints[0]
        _check_id("layout_fingerprint", layout)
        _check_id("model_fingerprint", request.model_fingerprint)
        kind = BlockKind(model_fingerprint=request.model_fingerprint, layout_fingerprint=layout)
        if not request.block_bytes:
            return self._arenas.get(kind)
        _check_block_bytes(request.block_bytes[0])
        return await self._arenas.open(kind, request.block_bytes[0])

    async def BeginTransfer(self, request: pb.BeginTransferRequest, context: Context) -> pb.BeginTransferReply:
        """Repeat what a lookup began: in the tier, transfers begin with their lookup."""
        host = self._arenas.of_lookup(request.offer_id)
        if host is None:
            error: MeshError = InvalidRequest("transfers from the tier begin with a lookup", param="offer_id")
            return pb.BeginTransferReply(error=error_to_pb(error))
        reply: pb.BeginTransferReply = await host.owner.BeginTransfer(request, context)
        return reply

    async def RenewTransfers(self, request: pb.RenewTransfersRequest, context: Context) -> pb.RenewTransfersReply:
        """Extend the pins of lookups; answers with those that have ended."""
        check_renew(request)
        ended = []
        for transfer_id in request.transfer_ids:
            host = self._arenas.of_lookup(transfer_id)
            if host is None or not host.offers.renew_transfer(transfer_id):
                ended.append(transfer_id)
        for host in self._arenas.hosts:
            host.owner.settle()
        return pb.RenewTransfersReply(ended=ended)

    async def EndTransfer(self, request: pb.EndTransferRequest, context: Context) -> pb.EndTransferReply:
        """Let go of a lookup's pins, whether its blocks were read or not."""
        check_end(request)
        host = self._arenas.of_end(request.transfer_id, request.peer_id)
        if host is None:
            return pb.EndTransferReply(known=False, peer_id=self._arenas.peer_id)
        # Also of a lookup that is not there: it may be under way, and finds then that nobody waits for it.
        reply: pb.EndTransferReply = await host.owner.EndTransfer(request, context)
        if request.reason == PullEnd.CORRUPT and not request.committed:
            await self._discard_damaged(host, request.transfer_id)
        host.end_lookup(request.transfer_id)
        return reply

    async def _discard_damaged(self, host: ArenaHost, transfer_id: str) -> None:
        """Somebody got other bytes than were summed here: if they are damaged in the arena, nobody else shall get them."""
        num = await host.discard_damaged(transfer_id)
        if num:
            self._metrics.blocks_damaged.inc(num)
            log.error("%d blocks in memory are not what they were when they arrived, and are discarded", num)

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Context) -> AsyncIterator[pb.BlockChunk]:
        """Stream blocks of the arena that the caller shook hands with."""
        check_read(request)
        host = self._arenas.of_peer_id(request.peer_id)
        if host is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"peer_lost: {request.peer_id} is gone")
        assert host is not None, "abort raises"
        with host.in_use():
            async for chunk in host.owner.ReadBlocks(request, context):
                yield chunk
                # Copies of megabytes: let others have the loop between them.
                await asyncio.sleep(0)

    async def Push(self, request: pb.PushRequest, context: Context) -> None:  # type: ignore[override]
        """Refuse: what is in an arena is there to be read."""
        await refuse_push("", context)


def _patience_s(context: Context) -> float:
    """How long the caller can be kept waiting: most of the call's own deadline, as the answer must travel too."""
    remaining_s = context.time_remaining()
    return math.inf if remaining_s is None else ANSWER_SHARE * remaining_s


def _kind_of(request: pb.LookupRequest | pb.StoreRequest) -> BlockKind:
    return BlockKind(model_fingerprint=request.model_fingerprint, layout_fingerprint=request.layout_fingerprint)


def _check_id(field: str, value: str) -> None:
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise InvalidRequest(f"{field} must have 1 to {MAX_ID_CHARS} characters", param=field)


def _check_block_bytes(block_bytes: int) -> None:
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES:
        raise InvalidRequest(
            f"block_bytes must be {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}, got {block_bytes}", param="block_bytes"
        )
