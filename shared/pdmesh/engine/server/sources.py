"""Where a request's KV may be pulled from before it is computed: its ticket's owner, the peer in vLLM's parameters, or the tier.

What cannot be fetched ends in the failure policy here, before the core has seen the request; what fails later ends in the
same policy there. A ticket or parameters that nobody of this mesh made are refused outright.
"""

import ipaddress
import secrets
import time
from dataclasses import dataclass

from pdmesh.config import LOOPBACK_HOSTS, EngineConfig
from pdmesh.connector.peers import Peer, PeerDirectory
from pdmesh.engine.server.fetches import Fetch, Fetches, Origin
from pdmesh.engine.server.identity import Identity, engine_id_of
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.requests import RunningRequest
from pdmesh.engine.server.tier_client import TierClient
from pdmesh.engine.server.transfer_params import RemoteKV
from pdmesh.errors import Forbidden, HandshakeRefused, MeshError, PeerError, PeerUnavailable, TransferFailed
from pdmesh.protocol.messages import GroupBlocks, KVSource
from pdmesh.protocol.ticket import request_digest, unseal
from pdmesh.security import MeshSecret

# A pull of a whole context takes seconds at most; a peer that takes longer is better replaced by computing.
FETCH_TIMEOUT_S = 30.0
RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """An offer to begin, however the request named it."""

    origin: Origin
    offer_id: str
    groups: list[GroupBlocks]


class Sources:
    """Finds the KV of one request at a time."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        identity: Identity,
        secret: MeshSecret,
        peers: PeerDirectory,
        fetches: Fetches,
        tier: TierClient | None,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._identity = identity
        self._secret = secret
        self._peers = peers
        self._fetches = fetches
        self._tier = tier
        self._metrics = metrics

    def needs_calls(self, running: RunningRequest, remote: RemoteKV | None, keys: list[bytes]) -> bool:
        """Whether finding the KV takes calls to other services."""
        return bool(running.request.ticket or remote or (self._tier and keys))

    async def find(self, running: RunningRequest, remote: RemoteKV | None, keys: list[bytes]) -> KVSource | None:
        """Begin the best pull there is; None to compute everything.

        Raises Forbidden for what is not this mesh's, and TransferFailed or another PeerError under the `fail` policy.
        """
        try:
            if running.request.ticket:
                return await self._from_ticket(running)
            if remote is not None:
                return await self._from_peer(running, remote)
        except PeerError as exc:
            if self._config.kv_load_failure_policy != RECOMPUTE:
                raise
            running.fetch_failure = reason_of(exc)
            self._metrics.fallbacks.inc(running.fetch_failure)
        return await self._from_tier(running, keys)

    async def _from_ticket(self, running: RunningRequest) -> KVSource:
        ticket = unseal(running.request.ticket, self._secret)
        if ticket.digest != _digest(running):
            raise TransferFailed("digest: the ticket was made for another request")
        peer = await self._peers.reach(ticket.address, _remaining_s(running))
        if peer.peer_id != ticket.peer_id:
            # What was known of the address may be of an earlier start.
            self._peers.forget(peer.peer_id)
            peer = await self._peers.reach(ticket.address, _remaining_s(running))
        if peer.peer_id != ticket.peer_id:
            raise TransferFailed(f"restarted: {ticket.peer_id} is now {peer.peer_id}")
        wanted = _Wanted(origin=Origin.TICKET, offer_id=ticket.offer_id, groups=ticket.groups)
        return await self._begin(running, peer, wanted)

    async def _from_peer(self, running: RunningRequest, remote: RemoteKV) -> KVSource:
        self._check_allowed(remote)
        peer = await self._peers.reach(remote.address, _remaining_s(running))
        if engine_id_of(peer.peer_id) != remote.engine_id:
            raise TransferFailed(f"restarted: {remote.address} is {peer.peer_id}, not {remote.engine_id}")
        wanted = _Wanted(origin=Origin.STOCK, offer_id=remote.offer_id, groups=remote.groups)
        return await self._begin(running, peer, wanted)

    async def _begin(self, running: RunningRequest, peer: Peer, wanted: _Wanted) -> KVSource:
        deadline_s = min(FETCH_TIMEOUT_S, _remaining_s(running))
        fetch = Fetch(
            transfer_id=self._mint(),
            peer_id=peer.peer_id,
            connector=peer.connector,
            origin=wanted.origin,
            running=running,
        )
        # Noted first: when this task is cancelled during the call, the owner may have begun.
        self._fetches.begun(fetch, deadline_s)
        try:
            view = await self._peers.begin(
                peer,
                transfer_id=fetch.transfer_id,
                offer_id=wanted.offer_id,
                digest=_digest(running),
                groups=wanted.groups,
                remaining_s=deadline_s,
            )
        except MeshError as exc:
            self._fetches.failed(fetch, reason_of(exc))
            raise
        return KVSource(
            transfer_id=fetch.transfer_id,
            peer_id=peer.peer_id,
            groups=view.groups,
            num_tokens=view.num_tokens,
            fail_policy=self._config.kv_load_failure_policy,
            deadline_s=deadline_s,
        )

    async def _from_tier(self, running: RunningRequest, keys: list[bytes]) -> KVSource | None:
        if self._tier is None or not keys:
            return None
        deadline_s = min(FETCH_TIMEOUT_S, _remaining_s(running))
        hit = await self._tier.lookup(self._mint(), keys, deadline_s)
        if hit is None:
            return None
        fetch = Fetch(
            transfer_id=hit.transfer_id,
            peer_id=hit.peer_id,
            connector=hit.connector,
            origin=Origin.TIER,
            running=running,
        )
        self._fetches.begun(fetch, deadline_s)
        return KVSource(
            transfer_id=hit.transfer_id,
            peer_id=hit.peer_id,
            groups=[hit.blocks],
            num_tokens=hit.num_tokens,
            # A lost tier costs time, never the answer.
            fail_policy=RECOMPUTE,
            deadline_s=deadline_s,
        )

    def _check_allowed(self, remote: RemoteKV) -> None:
        """Keep clients from making this engine call an address of their choice."""
        if remote.address in self._config.kv_peers or (self._config.on_loopback and _is_loopback(remote.host)):
            return
        raise Forbidden(
            f"{remote.address} is not a peer of this engine: list it in kv-peers to fetch KV from it",
            param="kv_transfer_params.remote_host",
        )

    def _mint(self) -> str:
        return f"{self._identity.engine_id}-{secrets.token_hex(8)}"


def reason_of(error: MeshError) -> str:
    """One word for metrics and the debug header."""
    if isinstance(error, PeerUnavailable):
        return "peer_unavailable"
    if isinstance(error, HandshakeRefused):
        return "handshake_refused"
    word = error.message.partition(":")[0]
    return word if word.isidentifier() else "transfer_failed"


def _digest(running: RunningRequest) -> bytes:
    return request_digest(running.request.token_ids, cache_salt=running.request.cache_salt)


def _remaining_s(running: RunningRequest) -> float:
    return max(0.0, running.request.deadline_s - (time.monotonic() - running.arrived_s))


def _is_loopback(host: str) -> bool:
    try:
        return host in LOOPBACK_HOSTS or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
