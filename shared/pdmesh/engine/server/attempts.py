"""How a pull begins, whoever the owner is and however the request named it: reach, begin, compare, and once more.

What is known of an owner may be of an earlier start of it. gRPC reconnects to whoever listens at the address now, so every
begin is answered with the owner's own id: when that is not the one whose memory is attached, the begin is taken back, the
old peer forgotten, and the attempt made again with the new one. Stock parameters, which name no epoch, need this; so does
the tier; a ticket learns from it that its owner has restarted.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.connector.active import PullEnd
from pdmesh.connector.owner import UNAVAILABLE
from pdmesh.connector.peers import Ask, Peer, PeerDirectory
from pdmesh.engine.server.fetches import ABORTED, Fetch, Fetches, Origin
from pdmesh.engine.server.identity import Identity, engine_id_of
from pdmesh.engine.server.requests import RunningRequest
from pdmesh.engine.server.transfer_params import FIELD
from pdmesh.errors import Forbidden, HandshakeRefused, MeshError, PeerError, PeerUnavailable, TransferFailed
from pdmesh.protocol.states import Reason
from pdmesh.protocol.transfers import OfferView

RESTARTED = "restarted"
OTHER_ENGINE = "other_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an attempt is for."""

    running: RunningRequest
    origin: Origin
    address: str
    """gRPC `host:port` of the owner."""
    reach_s: float
    """Seconds for a handshake with the owner."""
    is_owner: Callable[[str], bool] = lambda peer_id: True
    """Whether the process with this peer id is the one the request means."""
    owner_start: str = ""
    """Peer id of the start of the owner that a ticket names."""
    owner_name: str = ""
    """Who is meant, for the error's text."""


class Attempts:
    """Begins pulls and enters them in the table of fetches."""

    def __init__(self, *, identity: Identity, peers: PeerDirectory, fetches: Fetches) -> None:
        self._identity = identity
        self._peers = peers
        self._fetches = fetches

    async def begin(self, target: Target, ask: Ask) -> tuple[Fetch, OfferView] | None:
        """Begin a pull at its owner; None when the owner answers that it holds nothing of use.

        Raises TransferFailed, Forbidden, HandshakeRefused or PeerUnavailable. The fetch is in the table from before the call:
        its owner hears of its end also when this task is cancelled meanwhile.
        """
        is_last, failed_over = False, ""
        why: MeshError | None = None
        while True:
            peer = await self._owner(target)
            connector = peer.connector
            if why is not None:
                connector = await self._peers.attach_after(peer, failed_over, why)
            fetch = self._new_fetch(target, peer, connector, instead_of=failed_over)
            try:
                begun = await ask(peer, fetch.transfer_id, connector)
            except PeerUnavailable as exc:
                self._fetches.failed(fetch, reason_of(exc))
                if is_last or self._peers.knows(peer):
                    raise
                is_last = True
                continue
            except BaseException as exc:
                self._fetches.failed(fetch, reason_of(exc))
                raise
            if begun.peer_id not in ("", peer.peer_id):
                # Over the connection that the successor answered on, before it is closed.
                await self._fetches.give_up(fetch, RESTARTED)
                self._peers.forget(peer.peer_id)
                if is_last or not target.is_owner(begun.peer_id):
                    raise _restarted(target, begun.peer_id)
                is_last = True
                continue
            if begun.error is not None:
                self._fetches.failed(fetch, reason_of(begun.error))
                if reason_of(begun.error) != UNAVAILABLE:
                    raise _of_peer(begun.error, target.origin)
                # Each connector comes after the one before, so that this ends.
                failed_over, why = connector, begun.error
                continue
            if begun.view is None:
                self._fetches.discard(fetch)
                return None
            self._fetches.begun(fetch, sum(len(group.block_ids) for group in begun.view.groups))
            return fetch, begun.view

    def _new_fetch(self, target: Target, peer: Peer, connector: str, *, instead_of: str) -> Fetch:
        fetch = Fetch(
            transfer_id=f"{self._identity.engine_id}-{secrets.token_hex(8)}",
            peer=peer,
            connector=connector,
            instead_of=instead_of,
            origin=target.origin,
            running=target.running,
            block_bytes=peer.block_bytes,
            exchange=peer.exchange,
            layouts=peer.layouts,
        )
        self._fetches.open(fetch)
        return fetch

    async def _owner(self, target: Target) -> Peer:
        peer = await self._peers.reach(target.address, target.reach_s, owner=target.owner_start)
        if not target.is_owner(peer.peer_id):
            # Either side may be behind: the peer known here, or who named the owner. A live peer is not dropped for that.
            peer = await self._peers.confirm(peer, target.reach_s)
        if not target.is_owner(peer.peer_id):
            raise _restarted(target, peer.peer_id)
        return peer


def reason_of(error: BaseException) -> str:
    """One word for metrics and the debug header."""
    if isinstance(error, PeerUnavailable):
        return "peer_unavailable"
    if isinstance(error, HandshakeRefused):
        return "handshake_refused"
    if isinstance(error, TimeoutError):
        return PullEnd.TIMEOUT
    if not isinstance(error, MeshError):
        return ABORTED
    word = error.message.partition(":")[0]
    return word if word.isidentifier() else "transfer_failed"


def _of_peer(error: MeshError, origin: Origin) -> MeshError:
    """What an owner refuses a transfer with, as an error that the failure policy is for: it is none of this engine's."""
    if isinstance(error, Forbidden) and origin is Origin.STOCK and reason_of(error) == Reason.FOREIGN_BLOCKS:
        # The owner does not know in which of a client's fields they came.
        error.param = f"{FIELD}.remote_block_ids"
    if isinstance(error, (PeerError, Forbidden)):
        return error
    return TransferFailed(f"{error.code}: {error.message}")


def _restarted(target: Target, peer_id: str) -> TransferFailed:
    owner = target.owner_name
    if owner and engine_id_of(peer_id) != (engine_id_of(owner) or owner):
        return TransferFailed(f"{OTHER_ENGINE}: {target.address} is another engine's, {peer_id}, not that of {owner}")
    return TransferFailed(f"{RESTARTED}: {target.address} is {peer_id}, not {owner or 'who it was'}")
