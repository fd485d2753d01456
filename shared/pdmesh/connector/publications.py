"""What an owner's server knows of the connectors that copy offers: which offers can be read over them.

A consumer that would read over one asks before it reads, and is answered when the copy is complete or cannot be made: then it
fetches otherwise. Lives on the event loop.
"""

import asyncio
from collections.abc import Collection

PUBLISHING = frozenset({"file"})
"""Connectors that copy offers; the others read where they lie."""
# What takes longer is better fetched otherwise, or computed.
PUBLISH_TIMEOUT_S = 10.0


class Publications:
    """Offers by id, from their seal to their end."""

    def __init__(self, connectors: Collection[str]) -> None:
        self._connectors = PUBLISHING & frozenset(connectors)
        self._answers: dict[tuple[str, str], asyncio.Future[str]] = {}

    def sealed(self, offer_id: str) -> None:
        """An offer is being copied from now on."""
        for connector in self._connectors:
            self._answers[offer_id, connector] = asyncio.get_running_loop().create_future()

    def settled(self, offer_id: str, connector: str, error: str) -> None:
        """A connector is done with an offer, well or with an error."""
        answer = self._answers.get((offer_id, connector))
        if answer is None or answer.done():
            return
        answer.set_result(error)

    def ended(self, offer_id: str) -> None:
        """Whoever still waits finds out that the offer is gone when it begins to read."""
        for connector in self._connectors:
            answer = self._answers.pop((offer_id, connector), None)
            if answer is not None and not answer.done():
                answer.set_result("")

    async def wait(self, offer_id: str, connector: str, timeout_s: float) -> str:
        """Return when an offer can be read over a connector: why not, or nothing."""
        answer = self._answers.get((offer_id, connector))
        if answer is None:
            return ""
        await asyncio.wait([answer], timeout=min(timeout_s, PUBLISH_TIMEOUT_S))
        return answer.result() if answer.done() else "it is not written yet"
