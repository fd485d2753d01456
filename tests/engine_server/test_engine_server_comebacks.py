"""Where a preempted request's KV is looked for, when both the tier and the offer may have it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.engine.messages import NeedsSource
from pdmesh.engine.server.fetches import ABORTED
from pdmesh.engine.server.sources import OFFER, TIER, Found, Sources
from pdmesh.errors import TransferFailed
from pdmesh.protocol.messages import GenerateRequest, KVSource, SamplingParams

NEED = NeedsSource(request_id="r", choice=0, num_cached=32, keys=[b"k"])


class FoundInBoth(Sources):
    """Sources whose tier has `num_in_tier` tokens and whose offer, of 1,000 tokens, is `offer`."""

    def __init__(self, *, num_in_tier: int, offer: KVSource | Exception) -> None:
        self.given_back: list[str] = []
        self._config: Any = SimpleNamespace(preempted_fetch_min_tokens=256)
        self._fetches: Any = SimpleNamespace(failed=lambda fetch, reason: self.given_back.append(f"{fetch}:{reason}"))
        self._num_in_tier, self._offer = num_in_tier, offer

    async def _begin_at_tier(self, running: Any, keys: list[bytes]) -> Any:
        return "fetch", SimpleNamespace(num_tokens=self._num_in_tier)

    async def _from_ticket(self, running: Any) -> KVSource:
        if isinstance(self._offer, BaseException):
            raise self._offer
        return self._offer

    def _source(self, fetch: Any, view: Any, *, fail_policy: str) -> KVSource:
        return _source("tier")

    def found(self) -> Found:
        request = GenerateRequest(request_id="r", ticket=b"t", sampling=SamplingParams(), token_ids=[0] * 1000)
        running: Any = SimpleNamespace(fetch_failure="", request=request)
        return asyncio.run(self.find_again(running, NEED))


def _source(name: str) -> KVSource:
    return KVSource(transfer_id=name, peer_id="p", groups=[], num_tokens=1, fail_policy="recompute", deadline_s=1.0)


def test_an_offer_that_is_gone_leaves_what_the_tier_has() -> None:
    """The tier's pin was given back before the offer was asked, so that a request computed what both might have had."""
    sources = FoundInBoth(num_in_tier=320, offer=TransferFailed("released: offer o is not held here"))
    assert sources.found() == Found(source=_source("tier"), kind=TIER)
    assert not sources.given_back


def test_an_offer_that_has_much_more_is_preferred_and_the_tier_s_pin_given_back() -> None:
    sources = FoundInBoth(num_in_tier=320, offer=_source("offer"))
    assert sources.found() == Found(source=_source("offer"), kind=OFFER)
    assert sources.given_back == [f"fetch:{ABORTED}"]


def test_an_offer_that_has_little_more_is_left() -> None:
    sources = FoundInBoth(num_in_tier=960, offer=TransferFailed("never asked"))
    assert sources.found().kind == TIER


def test_what_the_core_has_already_is_given_back_at_the_tier() -> None:
    sources = FoundInBoth(num_in_tier=32, offer=TransferFailed("released: offer o is not held here"))
    assert sources.found() == Found()
    assert sources.given_back == [f"fetch:{ABORTED}"]


def test_the_tier_s_pin_goes_back_when_the_request_leaves_meanwhile() -> None:
    sources = FoundInBoth(num_in_tier=320, offer=asyncio.CancelledError())  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        sources.found()
    assert sources.given_back == [f"fetch:{ABORTED}"]
