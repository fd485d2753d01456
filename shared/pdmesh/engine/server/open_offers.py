"""Offers whose prompts are computed here, for consumers that ask before there is anything to read.

A proxy tells both engines of a request at once, so that the consumer may even ask a moment before the request is here.
"""

import asyncio
from dataclasses import dataclass, field

from pdmesh.errors import TransferFailed
from pdmesh.protocol.offers import Reason
from pdmesh.protocol.peer_bounds import MAX_TRANSFERS

# The prefill leg was sent at the same time: it comes within a round trip, or never.
OPEN_WAIT_S = 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenOffer:
    num_tokens: int
    first_tokens: list[int] = field(default_factory=list)
    """Of the one choice; empty until they are drawn, and where it does not go on."""
    drawn: asyncio.Event = field(default_factory=asyncio.Event)
    """Also set at its end."""
    num_waiting: int = 0


class OpenOffers:
    """By id, from an offer's opening to its end. Lives on the event loop."""

    def __init__(self) -> None:
        self._offers: dict[str, _OpenOffer] = {}
        self._opened = asyncio.Event()
        self._num_waiting = 0

    def opened(self, offer_id: str, num_tokens: int) -> None:
        """A prompt of so many tokens is computed for an offer from now on."""
        self._offers[offer_id] = _OpenOffer(num_tokens=num_tokens)
        opened, self._opened = self._opened, asyncio.Event()
        opened.set()

    def drawn(self, offer_id: str, first_tokens: list[int]) -> bool:
        """An offer is sealed and its request's one choice has its first tokens; whether anybody waits for that."""
        offer = self._offers.get(offer_id)
        if offer is None:
            return False
        offer.first_tokens = first_tokens
        offer.drawn.set()
        return offer.num_waiting > 0

    def ended(self, offer_id: str) -> None:
        """Whoever still waits finds out."""
        if (offer := self._offers.pop(offer_id, None)) is not None:
            offer.drawn.set()

    def num_tokens(self, offer_id: str) -> int:
        """Of an offer's prompt; 0 when it is not open."""
        offer = self._offers.get(offer_id)
        return 0 if offer is None else offer.num_tokens

    async def wait_opened(self, offer_id: str) -> None:
        """Return when an offer is open. Raises TransferFailed when it does not come."""
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                while offer_id not in self._offers:
                    await self._opened.wait()
        except TimeoutError:
            raise TransferFailed(f"{Reason.UNKNOWN}: offer {offer_id} is not held here") from None

    async def first_tokens(self, offer_id: str, timeout_s: float) -> list[int]:
        """Return the first tokens of the choice that goes on from an offer, once it can be read; none when the offer ends before.

        Raises TransferFailed when it is not opened soon, and when time is up.
        """
        if self._num_waiting >= MAX_TRANSFERS:
            raise TransferFailed(f"overloaded: {MAX_TRANSFERS} consumers wait for offers here, the limit")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_opened(offer_id)
                offer = self._offers[offer_id]
                offer.num_waiting += 1
                try:
                    await offer.drawn.wait()
                finally:
                    offer.num_waiting -= 1
        except TimeoutError:
            raise TransferFailed(f"timeout: offer {offer_id} was not complete within {timeout_s:.3g} s") from None
        finally:
            self._num_waiting -= 1
        return offer.first_tokens
