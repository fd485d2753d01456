"""Tells an owner which of its offers are still read: one call for all transfers of this consumer."""

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from pdmesh.connector.handshake import Peer
from pdmesh.errors import MeshError
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.offers import RENEW_INTERVAL_S
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)


async def renew(peer: Peer, secret: MeshSecret, calling: Callable[[Peer], AbstractAsyncContextManager[None]]) -> None:
    """Renew a peer's running transfers once; `calling` translates what the call raises. Never raises a MeshError."""
    request = pb.RenewTransfersRequest(transfer_ids=sorted(peer.transfers))
    try:
        async with calling(peer):
            reply: pb.RenewTransfersReply = await peer.stub.RenewTransfers(
                request, timeout=RENEW_INTERVAL_S, metadata=secret.call_metadata()
            )
    except MeshError as exc:
        log.warning("transfers from %s cannot be renewed: %s", peer.peer_id, exc.message)
        return
    # The pull itself goes on: its generation check decides, and it ends in `end`.
    peer.renewed(reply.ended)
