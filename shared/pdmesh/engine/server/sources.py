"""Where a request's KV may be pulled from before it is computed: its ticket's owner, the peer in vLLM's parameters, or the tier.

What cannot be fetched ends in the failure policy here, before the core has seen the request; what fails later ends in the
same policy there. A ticket or parameters that nobody of this mesh made are refused outright.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from pdmesh.config import EngineConfig
from pdmesh.connector.notices import GIVING_NOTICE
from pdmesh.connector.peers import Peer, PeerDirectory
from pdmesh.engine.messages import CoreReady, NeedsSource
from pdmesh.engine.server.attempts import Attempts, Target, reason_of
from pdmesh.engine.server.fetches import ABORTED, Fetch, Fetches, Origin, lifetime_s
from pdmesh.engine.server.identity import engine_id_of
from pdmesh.engine.server.kv_peers import KVPeers
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.prefix_cache_reset import PrefixCacheResets
from pdmesh.engine.server.pull_time import MOST_S, PullTimes
from pdmesh.engine.server.requests import RunningRequest
from pdmesh.engine.server.tier_client import TierClient
from pdmesh.engine.server.transfer_params import RemoteKV
from pdmesh.errors import PeerError, PeerUnavailable, TransferFailed
from pdmesh.protocol.exchange import Exchange, KVNames
from pdmesh.protocol.messages import AwaitedOffer, GenerateRequest, GroupBlocks, KVSource
from pdmesh.protocol.ticket import Ticket, unseal
from pdmesh.protocol.transfers import Begun, OfferView
from pdmesh.security import MeshSecret

log = logging.getLogger(__name__)

Hold = Callable[[KVSource | None], None]
"""Has the core hold a request with a source that names no blocks yet; None: it is to be dropped there, if it is held."""

RECOMPUTE = "recompute"
TIER, OFFER = "tier", "offer"
"""Kinds of sources of a preempted request, in the order in which they are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a preempted request's KV may be pulled from; by default from nowhere."""

    source: KVSource | None = None
    kind: str = ""


class Sources:
    """Finds the KV of one request at a time."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        ready: CoreReady,
        secret: MeshSecret,
        peers: PeerDirectory,
        allowed: KVPeers,
        attempts: Attempts,
        fetches: Fetches,
        tier: TierClient | None,
        metrics: EngineMetrics,
        resets: PrefixCacheResets,
    ) -> None:
        self._config = config
        self._ready = ready
        self._secret = secret
        self._peers = peers
        self._attempts = attempts
        self._fetches = fetches
        self._times = PullTimes(config.connector_options)
        self._allowed = allowed
        self._tier = tier
        self._metrics = metrics
        self._resets = resets

    def needs_calls(self, running: RunningRequest, remote: RemoteKV | None, keys: list[bytes]) -> bool:
        """Whether finding the KV takes calls to other services."""
        return bool(running.request.is_handed_over or remote or (self._tier and keys))

    async def find(
        self, running: RunningRequest, remote: RemoteKV | None, keys: list[bytes], hold: Hold = lambda source: None
    ) -> KVSource | None:
        """Begin the best pull there is; None to compute everything.

        Raises Forbidden for what is not this mesh's, and TransferFailed or HandshakeRefused under the `fail` policy; both under
        any for an offer that is awaited: whoever computes it may go on to, and its ticket come.
        """
        if running.request.awaits is not None:
            try:
                return await self._from_awaited(running, running.request.awaits, hold)
            except PeerError as exc:
                raise _as_transfer_failure(exc) from exc
        try:
            if running.request.ticket:
                return await self._from_ticket(running)
            if remote is not None:
                return await self._from_peer(running, remote)
        except PeerError as exc:
            if self._config.kv_load_failure_policy != RECOMPUTE:
                raise _as_transfer_failure(exc) from exc
            running.fetch_failure = reason_of(exc)
            self._metrics.fallbacks.inc(running.fetch_failure)
        return await self._from_tier(running, keys)

    def may_find_again(self, running: RunningRequest) -> bool:
        """Whether a source may be found for the request after a preemption."""
        return bool(self._tier or running.request.is_handed_over)

    async def find_again(self, running: RunningRequest, need: NeedsSource) -> Found:
        """Begin a pull for a preempted request from the first place that has more than the core, after `need.after`.

        The tier comes first, unless the offer holds so much more that what is missing would be fetched once more.
        """
        in_tier = None if need.after else await self._begin_at_tier(running, need.keys)
        num_in_tier = 0 if in_tier is None else in_tier[1].num_tokens
        offered, is_of_use = None, False
        try:
            offered = await self._offered_again(running, need, num_in_tier)
            is_of_use = offered is None and num_in_tier > need.num_cached
        finally:
            # What the tier has pinned is pulled or given back, whatever became of the offer.
            if in_tier is not None and not is_of_use:
                self._fetches.failed(in_tier[0], ABORTED)
        if offered is not None:
            return Found(source=offered, kind=OFFER)
        if in_tier is None or not is_of_use:
            return Found()
        return Found(source=self._source(*in_tier, fail_policy=RECOMPUTE), kind=TIER)

    async def _offered_again(self, running: RunningRequest, need: NeedsSource, num_in_tier: int) -> KVSource | None:
        """Begin to pull a preempted request's offer once more, where it holds enough beyond core and tier."""
        num_more = len(running.request.token_ids) - max(num_in_tier, need.num_cached)
        enough = self._config.preempted_fetch_min_tokens if num_in_tier > need.num_cached else 1
        # What the ticket's pull failed for the first time, it would fail for again.
        has_offer = running.request.is_handed_over and not running.fetch_failure and need.after != OFFER
        if not has_offer or num_more < enough:
            return None
        try:
            awaits = running.request.awaits
            return await (self._from_ticket(running) if awaits is None else self._from_awaited(running, awaits))
        except PeerError as exc:
            log.debug("the offer of %s is not to be had any more: %s", running.request.request_id, exc.message)
            return None

    async def _from_ticket(self, running: RunningRequest) -> KVSource:
        ticket = unseal(running.request.ticket, self._secret)
        target = _offers_owner(running, ticket.offer_id, ticket.peer_id, ticket.address)
        check_ticket(ticket, running, self._ready)
        return await self._from_offer(
            target, ticket.offer_id, ticket.groups, lambda peer: check_owner(ticket, peer.names)
        )

    async def _from_awaited(
        self, running: RunningRequest, awaits: AwaitedOffer, hold: Hold = lambda source: None
    ) -> KVSource:
        """Begin at an owner that may compute the offer yet; the request goes on behind the first tokens of its answer."""
        target = _offers_owner(running, awaits.offer_id, awaits.owner_id, awaits.owner_address)
        return await self._from_offer(target, awaits.offer_id, [], awaits=True, hold=hold)

    async def _from_peer(self, running: RunningRequest, remote: RemoteKV) -> KVSource:
        target = Target(
            running=running,
            origin=Origin.STOCK,
            address=await self._allowed.admit(remote.host, remote.port),
            reach_s=_reach_time_s(running),
            is_owner=lambda peer_id: engine_id_of(peer_id) == remote.engine_id,
            owner_name=remote.engine_id,
        )
        return await self._from_offer(target, remote.offer_id, remote.groups)

    async def _from_offer(
        self,
        target: Target,
        offer_id: str,
        groups: list[GroupBlocks],
        check: Callable[[Peer], None] = lambda peer: None,
        *,
        awaits: bool = False,
        hold: Hold = lambda source: None,
    ) -> KVSource:
        running = target.running
        num_resets = self._resets.num_begun

        async def ask(peer: Peer, transfer_id: str, connector: str) -> Begun:
            check(peer)
            if awaits and connector in GIVING_NOTICE and peer.exchange is Exchange.BYTES:
                source = self._held_source(running, peer, transfer_id, connector)
                hold(msgspec.structs.replace(source, offer_id=offer_id, num_resets=num_resets))
            has_agreed = False
            try:
                begun = await self._peers.begin(
                    peer,
                    transfer_id=transfer_id,
                    offer_id=offer_id,
                    digest=running.digest,
                    groups=groups,
                    remaining_s=lifetime_s(running),
                    connector=connector,
                    awaits=awaits,
                )
                if awaits and begun.view is not None and not running.in_core:
                    self._go_on(running, begun.view, begun.first_tokens)
                has_agreed = begun.view is not None and begun.peer_id in ("", peer.peer_id)
            finally:
                if not has_agreed:
                    hold(None)
            return begun

        begun = await self._attempts.begin(target, ask)
        if begun is None:
            raise TransferFailed(f"unknown: {target.address} says nothing of offer {offer_id}")
        source = self._source(*begun, fail_policy=self._config.kv_load_failure_policy)
        return msgspec.structs.replace(source, offer_id=offer_id, num_resets=num_resets)

    def _go_on(self, running: RunningRequest, view: OfferView, first_tokens: list[int]) -> None:
        """Take the first tokens of an awaited offer in. Raises TransferFailed when they cannot be the request's."""
        num_tokens, vocab_size = len(running.request.token_ids), self._ready.vocab_size
        if not first_tokens or not 0 <= min(first_tokens) <= max(first_tokens) < vocab_size:
            raise TransferFailed(f"first_tokens: {len(first_tokens)} came, of a vocabulary of {vocab_size}")
        if view.num_tokens != num_tokens:
            raise TransferFailed(f"num_tokens: the owner offers {view.num_tokens}, this request needs {num_tokens}")
        running.go_on(first_tokens)

    async def _from_tier(self, running: RunningRequest, keys: list[bytes]) -> KVSource | None:
        begun = await self._begin_at_tier(running, keys)
        # A lost tier costs time, never the answer.
        return None if begun is None else self._source(*begun, fail_policy=RECOMPUTE)

    async def _begin_at_tier(self, running: RunningRequest, keys: list[bytes]) -> tuple[Fetch, OfferView] | None:
        if self._tier is None or not keys:
            return None
        reach_s = _reach_time_s(running)
        target = Target(running=running, origin=Origin.TIER, address=self._tier.address, reach_s=reach_s)
        return await self._tier.find(partial(self._attempts.begin, target), keys, reach_s)

    def _held_source(self, running: RunningRequest, peer: Peer, transfer_id: str, connector: str) -> KVSource:
        """Where an awaited offer will be pulled from; its blocks are not known yet."""
        num_blocks = -(-len(running.request.token_ids) // self._ready.block_size) * len(self._ready.layout_fingerprints)
        num_bytes = self._fetches.num_bytes_under_way(connector) + num_blocks * peer.block_bytes
        return KVSource(
            transfer_id=transfer_id,
            peer_id=peer.peer_id,
            connector=connector,
            groups=[],
            num_tokens=0,
            fail_policy=self._config.kv_load_failure_policy,
            deadline_s=min(self._times.bound_s(connector, num_bytes, is_converted=False), running.remaining_s),
        )

    def _source(self, fetch: Fetch, view: OfferView, *, fail_policy: str) -> KVSource:
        """What the core is to pull, and how long that may take beside the pulls that are under way."""
        num_bytes = self._fetches.num_bytes_under_way(fetch.connector)
        bound_s = self._times.bound_s(fetch.connector, num_bytes, is_converted=bool(fetch.layouts))
        groups, marks = view.groups, view.marks
        if fetch.exchange is Exchange.ROUNDED:
            marks = msgspec.structs.replace(marks, num_exact_tokens=0)
        if not self._config.kv_checksums:
            groups = [msgspec.structs.replace(blocks, checksums=[]) for blocks in groups]
        return KVSource(
            transfer_id=fetch.transfer_id,
            peer_id=fetch.peer_id,
            connector=fetch.connector,
            groups=groups,
            num_tokens=view.num_tokens,
            layouts=list(fetch.layouts),
            marks=marks,
            fail_policy=fail_policy,
            deadline_s=min(bound_s, fetch.running.remaining_s),
        )


def _offers_owner(running: RunningRequest, offer_id: str, owner_id: str, address: str) -> Target:
    """The very start of an engine whose offer a request goes on from."""
    running.ticket_offer_id = offer_id
    return Target(
        running=running,
        origin=Origin.TICKET,
        address=address,
        reach_s=_reach_time_s(running),
        is_owner=owner_id.__eq__,
        owner_start=owner_id,
        owner_name=owner_id,
    )


def check_ticket(ticket: Ticket, running: RunningRequest, ready: CoreReady) -> None:
    """Raise TransferFailed, its first word naming what differs, when a ticket's KV is not what this request needs here."""
    request = running.request
    if ticket.digest != running.digest:
        raise TransferFailed("digest: the ticket was made for another request")
    if ready.description is None or not ready.staging_bytes:
        # Else the owner's are in the handshake, which refuses what cannot be converted.
        _check_alike(ticket, ready.model_fingerprint, ready.layout_fingerprints, "this request needs")
    if ticket.num_tokens != (num_offered := _num_offered(ticket, request)):
        raise TransferFailed(
            f"num_tokens: the ticket's owner has [{ticket.num_tokens}], this request needs [{num_offered}]"
        )
    for place, choice in enumerate(request.choices):
        first = ticket.first_tokens.get(choice, [])
        emitted = request.emitted[place] if request.emitted else []
        if not first or emitted[: len(first)] != first:
            raise TransferFailed(f"first_tokens: choice {choice} does not go on after the token that prefill sampled")


def check_owner(ticket: Ticket, owner: KVNames) -> None:
    """Raise TransferFailed when the engine that answers at a ticket's address keeps other KV than the ticket says."""
    _check_alike(ticket, owner.model_fingerprint, list(owner.layout_fingerprints), "it now has")


def _check_alike(ticket: Ticket, model: str, layouts: list[str], whose: str) -> None:
    for what, theirs, ours in (
        ("model_fingerprint", ticket.model_fingerprint, model),
        ("layout_fingerprints", ", ".join(ticket.layout_fingerprints), ", ".join(layouts)),
    ):
        if theirs != ours:
            raise TransferFailed(f"{what}: the ticket's owner has [{theirs}], {whose} [{ours}]")


def _num_offered(ticket: Ticket, request: GenerateRequest) -> int:
    """Tokens that a ticket must be of: the prompt, and what had been emitted before prefill where there is one choice."""
    num_prompt = len(request.token_ids)
    first = ticket.first_tokens.get(request.choices[0], []) if len(request.choices) == 1 else []
    # An older prefill offers the prompt only.
    return num_prompt if ticket.num_tokens == num_prompt else num_prompt + max(len(first) - 1, 0)


def _as_transfer_failure(error: PeerError) -> PeerError:
    """PeerUnavailable is said of the engine that a caller speaks to; this one is well and could not reach another."""
    if isinstance(error, PeerUnavailable):
        return TransferFailed(f"{reason_of(error)}: {error.message}")
    return error


def _reach_time_s(running: RunningRequest) -> float:
    return min(MOST_S, running.remaining_s)
