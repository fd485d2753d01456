"""The owner's side of a handoff: opens an offer with a request, seals it when the prompt's KV is complete, and turns it into
a ticket for our proxy or into vLLM's parameters for a stock router. What ends an offer ends its hold on the core's blocks.
"""

import secrets
from collections.abc import Callable

from pdmesh.config import EngineConfig
from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.pool import KVPool
from pdmesh.engine.messages import CoreReady, OfferPublished, OfferSealed, ReleaseOffer
from pdmesh.engine.server.core_peers import Core, CorePeers
from pdmesh.engine.server.identity import Identity, pushes
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.metrics import EngineMetrics
from pdmesh.engine.server.open_offers import OpenOffers
from pdmesh.engine.server.outgoing_pushes import OutgoingPushes
from pdmesh.engine.server.requests import RunningRequest
from pdmesh.engine.server.transfer_params import offered
from pdmesh.protocol.messages import GroupBlocks
from pdmesh.protocol.offers import OFFER_LEASE_S, EndedOffer, OfferTable, Reason
from pdmesh.protocol.ticket import Ticket, seal, unseal
from pdmesh.security import MeshSecret


class Handoff:
    """All offers of this engine that its own requests opened."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        identity: Identity,
        ready: CoreReady,
        secret: MeshSecret,
        core: Core,
        core_peers: CorePeers,
        pool: KVPool,
        offers: OfferTable,
        board: LoadBoard,
        metrics: EngineMetrics,
        sums: PoolSums | None,
    ) -> None:
        self._stock_lease_s = config.kv_lease_duration_s
        self._identity = identity
        self._ready = ready
        self._secret = secret
        self._core = core
        self._offers = offers
        self._board = board
        self._metrics = metrics
        self._sealed: dict[str, OfferSealed] = {}
        self.on_reused: Callable[[list[GroupBlocks], int], None] = lambda groups, num_tokens: None
        """Called with the blocks of each sealed offer whose sums are told, and how many of its first tokens were found here."""
        self.owner = PoolOwner(
            peer_id=identity.peer_id,
            pool=pool,
            offers=offers,
            connectors=ready.connectors,
            model_fingerprint=ready.model_fingerprint,
            layout_fingerprints=ready.layout_fingerprints,
            on_ended=self._ended,
            description=ready.description,
            sums=sums,
        )
        """Answers the peers that fetch; its `run` ends leases."""
        self._open_offers = OpenOffers()
        self.owner.on_await = self._open_offers.first_tokens
        self.pushes = OutgoingPushes(
            ready=ready,
            core=core,
            core_peers=core_peers,
            owner=self.owner,
            offers=offers,
            open_offers=self._open_offers,
            metrics=metrics,
            is_enabled=pushes(ready, config),
        )

    def open(self, running: RunningRequest, *, stock: bool) -> None:
        """Open an offer for a request: a stock one lives until it is fetched once, ours until the proxy lets it go."""
        request = running.request
        running.offer_id = request.offer_id or secrets.token_hex(16)
        self._offers.open(
            running.offer_id,
            request_id=request.request_id,
            digest=running.digest,
            lease_s=self._stock_lease_s if stock else OFFER_LEASE_S,
            release_on_commit=stock,
            seal_within_s=request.deadline_s,
        )
        self._open_offers.opened(running.offer_id, len(request.token_ids))
        self.owner.settle()

    def knows(self, offer_id: str) -> bool:
        """Whether there is or was an offer of this name."""
        return self._offers.knows(offer_id)

    def sealed(self, message: OfferSealed) -> None:
        """The core holds the whole prompt's blocks."""
        # Other choices may compute yet: nobody can renew it before all have their first token and the ticket is out.
        if self._offers.seal(message.offer_id, message.groups, message.num_tokens, message.marks, is_told=False):
            self._sealed[message.offer_id] = message
            self.owner.publications.sealed(message.offer_id)
            if self.owner.sums is not None:
                if message.checksums:
                    self.owner.sums.adopt(message.groups, message.checksums, message.num_tokens)
                else:
                    # While the ticket is on its way.
                    self.owner.sums.prepare(message.groups, message.num_tokens, grows=message.grows)
                self.on_reused(message.groups, message.num_reused)
        self.owner.settle()

    def drawn(self, running: RunningRequest, token_ids: list[int]) -> bool:
        """The choice of a request that goes on at decode has its first tokens; whether anybody waits for its offer.

        Who awaits an offer goes on with one choice: several have the ticket.
        """
        if len(running.request.choices) != 1 or running.offer_id not in self._sealed:
            return False
        before = running.request.emitted[0] if running.request.emitted else []
        return self._open_offers.drawn(running.offer_id, before + token_ids)

    def published(self, message: OfferPublished) -> None:
        """A connector that copies offers is done with one."""
        self.owner.publications.settled(message.offer_id, message.connector, message.error)
        if message.error:
            self._metrics.unpublished.inc(message.connector)
        if message.num_remade:
            self._metrics.remade.inc(message.connector, amount=message.num_remade)

    def ticket(self, running: RunningRequest) -> bytes:
        """Sign a ticket for a request whose choices all have their first token; empty when the offer was not sealed."""
        sealed = self._sealed.get(running.offer_id)
        if sealed is None:
            return b""
        request = running.request
        before = request.emitted or [[] for _ in request.choices]
        return seal(
            Ticket(
                offer_id=running.offer_id,
                engine_id=self._identity.engine_id,
                epoch=self._identity.epoch,
                address=self._identity.address,
                digest=running.digest,
                groups=sealed.groups,
                num_tokens=sealed.num_tokens,
                layout_fingerprints=self._ready.layout_fingerprints,
                model_fingerprint=self._ready.model_fingerprint,
                first_tokens={
                    choice: emitted + running.first_tokens.get(choice, [])
                    for choice, emitted in zip(request.choices, before, strict=True)
                },
            ),
            self._secret,
        )

    def params(self, running: RunningRequest) -> dict[str, object] | None:
        """Make vLLM's parameters for a finished prefill leg; None when there is nothing to fetch."""
        sealed = self._sealed.get(running.offer_id)
        if sealed is None:
            return None
        return offered(
            engine_id=self._identity.engine_id,
            offer_id=running.offer_id,
            address=self._identity.address,
            groups=sealed.groups,
            num_tokens=sealed.num_tokens,
            num_cached=running.num_cached,
        )

    def tell(self, offer_id: str) -> None:
        """Start an offer's lease: its ticket or parameters are on their way."""
        self._offers.tell(offer_id)
        self.owner.settle()

    def renew(self, offer_id: str) -> bool:
        """Extend an offer for a proxy; False when it has ended."""
        renewed = self._offers.renew(offer_id)
        self.owner.settle()
        return renewed

    def release(self, offer_id: str) -> None:
        """Let an offer go as soon as nobody reads from it; repeating it changes nothing."""
        self._offers.release(offer_id)
        self.owner.settle()

    def release_ticket(self, ticket: bytes) -> None:
        """Let go the offer of a ticket that this engine made and nobody got."""
        self.release(unseal(ticket, self._secret).offer_id)

    def release_all(self) -> None:
        """Let all offers go, at the end of a drain."""
        self._offers.release_all()
        self.owner.settle()

    def core_died(self) -> None:
        """Let all offers go that nobody reads: what computed them is gone, and what wrote them."""
        self.pushes.core_died()
        self.release_all()

    def _ended(self, ended: EndedOffer) -> None:
        """Give the blocks of an offer that ended back to the core."""
        self._sealed.pop(ended.offer_id, None)
        self.owner.publications.ended(ended.offer_id)
        self._open_offers.ended(ended.offer_id)
        self._core.send(ReleaseOffer(offer_id=ended.offer_id))
        self._metrics.offers_ended.inc(ended.reason)
        if ended.reason is Reason.EXPIRED:
            self._metrics.nixl_expired.inc()
        self._board.touch()
