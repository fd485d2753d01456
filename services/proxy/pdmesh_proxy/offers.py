"""The offers that this proxy holds at one engine: renewed with every heartbeat, released when nobody needs them any more.

Once decode has an offer's KV it may be *kept* a while, in case the request needs it again: as long as the engine has blocks
to spare, is not shutting down, and the request runs.
"""

import time
from dataclasses import dataclass

# Above this share of its blocks in use an engine needs them for prompts to come.
KEEP_KV_USAGE = 0.5


@dataclass(slots=True, eq=False)
class HeldOffer:
    """The right to fetch one prompt's KV. Owned by its request, which releases it on every path."""

    offer_id: str
    ticket: bytes
    peer_id: str
    """`engine_id@epoch` of the engine that keeps the blocks."""
    live: bool = True
    """False once it was released, or its engine no longer has it."""


class HeldOffers:
    """All of one engine's. Outlives sessions: after a reconnect to the same process the leases go on."""

    def __init__(self) -> None:
        self._held: dict[str, HeldOffer] = {}
        self._released: list[str] = []
        self._kept_until_s: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._held or self._released)

    @property
    def held(self) -> list[str]:
        """Ids to renew."""
        return list(self._held)

    def hold(self, offer: HeldOffer) -> None:
        """Renew this one from now on."""
        self._held[offer.offer_id] = offer

    def release(self, offer: HeldOffer) -> bool:
        """Give one back; says whether there is something to tell the engine."""
        if not offer.live:
            return False
        self.ended(offer.offer_id)
        self._released.append(offer.offer_id)
        return True

    def keep(self, offer: HeldOffer, seconds: float) -> None:
        """Nobody needs this one now; hold it for so long all the same, unless `release_kept` comes first."""
        if offer.live:
            self._kept_until_s[offer.offer_id] = time.monotonic() + seconds

    def need(self, offer: HeldOffer) -> None:
        """One that was only kept is wanted again: neither time nor pressure gives it back."""
        self._kept_until_s.pop(offer.offer_id, None)

    def release_kept(self, *, overdue_only: bool = False) -> bool:
        """Give back those that are only kept; says whether there is something to tell the engine."""
        now = time.monotonic()
        due = [each for each, until_s in self._kept_until_s.items() if not overdue_only or until_s <= now]
        for offer_id in due:
            self.release(self._held[offer_id])
        return bool(due)

    def release_unheld(self, offer_id: str) -> None:
        """Give back one whose request ended before it came."""
        self._released.append(offer_id)

    def take_released(self) -> list[str]:
        """Return what to tell the engine, once."""
        taken, self._released = self._released, []
        return taken

    def ended(self, offer_id: str) -> None:
        """The engine says that it is no longer there."""
        self._kept_until_s.pop(offer_id, None)
        if (offer := self._held.pop(offer_id, None)) is not None:
            offer.live = False

    def lost(self, peer_id: str) -> None:
        """Forget all but those of this process: the engine was started anew."""
        for offer in [offer for offer in self._held.values() if offer.peer_id != peer_id]:
            self.ended(offer.offer_id)
        self._released.clear()
