"""Lets go of the offers that a stock router's decode leg named and that this engine will not read: the leg was refused, its
client left, or the prompt was computed here. Else prefill would keep their blocks until a lease ends that nobody needs.

A leg that may be tried at another decode with the same parameters keeps its offer: one that failed because of the KV itself
(502), or found this engine full or about to end (503).
"""

import logging
import secrets

import grpc.aio

from pdmesh.connector.peers import END_TIMEOUT_S, PeerDirectory
from pdmesh.engine.server.fetches import ABORTED, Tasks
from pdmesh.engine.server.identity import Identity, engine_id_of
from pdmesh.engine.server.kv_peers import KVPeers
from pdmesh.engine.server.transfer_params import RemoteKV
from pdmesh.errors import Forbidden, MeshError
from pdmesh.protocol.pushes import is_offer_id
from pdmesh.protocol.states import Reason
from pdmesh.protocol.transfers import End, end_to_pb
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

RECOMPUTE = "recompute"
# Nobody waits for it, and an owner that is slower than this has more to do than to free blocks.
REACH_TIMEOUT_S = 10.0


class UnreadOffers:
    """Tells owners. They forget offers with their lease, so that what cannot be told is left to that."""

    def __init__(
        self, *, identity: Identity, secret: MeshSecret, allowed: KVPeers, peers: PeerDirectory, tasks: Tasks
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._allowed = allowed
        self._peers = peers
        self._tasks = tasks

    def leg_ended(self, remote: RemoteKV, error: BaseException, digest: bytes) -> None:
        """A leg ended without a token; `digest` is that of its request."""
        if not _may_be_tried_elsewhere(error):
            self._let_go(remote, digest, is_evident=not isinstance(error, Forbidden))

    def leg_answered(self, remote: RemoteKV, kv_source: str, digest: bytes) -> None:
        """A leg has its first token, and its KV from `kv_source`; `digest` is that of its request."""
        source, _, reason = kv_source.partition(":")
        # An offer for another prompt is another leg's, which this one's router has mistaken.
        if source == RECOMPUTE and reason != Reason.DIGEST:
            self._let_go(remote, digest, is_evident=True)

    def let_go(self, remote: RemoteKV) -> None:
        """Have the owner end the offer of a leg that nothing more is known of; never blocks."""
        self._let_go(remote, b"", is_evident=True)

    def _let_go(self, remote: RemoteKV, digest: bytes, *, is_evident: bool) -> None:
        """Have the owner end the offer soon. Where the leg is not evidently its own, as blocks or engine are another's, the owner
        compares the request: whoever has heard of an offer's id must not end it."""
        if is_offer_id(remote.offer_id):
            self._tasks.create_task(self._tell(remote, digest, is_evident=is_evident))

    async def _tell(self, remote: RemoteKV, digest: bytes, *, is_evident: bool) -> None:
        try:
            peer = await self._peers.reach(await self._allowed.admit(remote.host, remote.port), REACH_TIMEOUT_S)
            is_evident &= engine_id_of(peer.peer_id) == remote.engine_id
            if not is_evident and not digest:
                return
            end = End(
                # No transfer of this name was begun: the owner takes note of that, and of the offer.
                transfer_id=f"{self._identity.engine_id}-{secrets.token_hex(8)}",
                committed=False,
                reason=ABORTED,
                peer_id=peer.peer_id,
                release_offer=remote.offer_id,
                release_digest=b"" if is_evident else digest,
            )
            metadata = self._secret.call_metadata()
            await peer.stub.EndTransfer(end_to_pb(end), timeout=END_TIMEOUT_S, metadata=metadata)
        except (MeshError, grpc.aio.AioRpcError, grpc.aio.UsageError) as exc:
            log.debug("offer %s is left to its lease: %s", remote.offer_id, exc)
        except Exception:
            log.warning("offer %s is left to its lease", remote.offer_id, exc_info=True)


def _may_be_tried_elsewhere(error: BaseException) -> bool:
    return isinstance(error, MeshError) and error.retryable
