"""Decode asks prefill for an offer that is computed yet: both engines' servers over real gRPC, their cores played."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from pdmesh.connector.peers import PeerDirectory
from pdmesh.engine.server import open_offers
from pdmesh.engine.server.open_offers import OpenOffers
from pdmesh.errors import InvalidRequest, TransferFailed
from support.awaiting import until
from support.engines import request
from support.open_offers import OFFER, Side, between, decode_leg


@pytest.mark.parametrize("is_early", [True, False])
def test_decode_goes_on_when_prefill_has_its_first_token(is_early: bool) -> None:
    """Whoever comes first: proxy and engines are not ordered."""

    async def scene(owner: Side, consumer: Side) -> None:
        if is_early:
            consumer.submit(decode_leg(owner))
            await asyncio.sleep(0.1)
        owner.submit(request("p", prefill_only=True, offer_id=OFFER))
        await asyncio.sleep(0.1)
        if not is_early:
            consumer.submit(decode_leg(owner))
        assert consumer.added == []
        # It has no place in a queue, and nobody is refused for it.
        assert consumer.engine.servicer._submission._num_calling == 0
        await owner.core.prefill()
        await until(lambda: consumer.added)
        [added] = consumer.added
        assert (added.request.emitted, added.request.awaits, added.request.ticket) == ([[9]], None, b"")
        assert added.source is not None
        assert (added.source.num_tokens, added.source.offer_id) == (40, OFFER)
        assert owner.engine.offers.num_transfers == 1

    between(scene)


@pytest.mark.parametrize("how", ["ends", "aborted", "never"])
def test_an_offer_that_never_is_ends_the_leg_with_an_error_that_another_may_take(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the policy `recompute` too: its prompt is not computed twice because of that."""
    monkeypatch.setattr(open_offers, "OPEN_WAIT_S", 0.2)

    async def scene(owner: Side, consumer: Side) -> None:
        if how != "never":
            inbox = owner.submit(request("p", prefill_only=True, offer_id=OFFER))
        waiting = consumer.submit(decode_leg(owner))
        await asyncio.sleep(0.1)
        if how == "ends":
            await owner.core.prefill(finish_reason="stop")
        elif how == "aborted":
            [running] = owner.engine.table.of(inbox)
            owner.engine.endings.abort(running)
        await until(lambda: waiting.deltas)
        assert [delta.error_code for delta in waiting.deltas] == ["TransferFailed"]
        reason = "unknown" if how == "never" else "released"
        assert waiting.deltas[0].error_message.startswith(f"{reason}:")
        assert consumer.added == []
        assert len(consumer.engine.servicer._submission._sources._fetches) == 0

    between(scene)


def test_an_offer_that_has_expired_is_told_as_such_and_at_once() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        owner.submit(request("p", prefill_only=True, offer_id=OFFER))
        await owner.core.prefill()
        table = owner.engine.offers
        table._clock = lambda: time.monotonic() + 1000.0
        table.expire()
        owner.engine.handoff.owner.settle()
        began_s = time.monotonic()
        waiting = consumer.submit(decode_leg(owner))
        await until(lambda: waiting.deltas)
        assert waiting.deltas[0].error_message.startswith("expired:")
        assert time.monotonic() - began_s < open_offers.OPEN_WAIT_S

    between(scene)


def test_who_goes_away_is_waited_for_no_longer() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        owner.submit(request("p", prefill_only=True, offer_id=OFFER))
        inbox = consumer.submit(decode_leg(owner))
        offers = owner.engine.handoff._open_offers
        await until(lambda: offers._num_waiting == 1)
        [running] = consumer.engine.table.of(inbox)
        consumer.engine.endings.abort(running)
        await until(lambda: offers._num_waiting == 0)
        await owner.core.prefill()
        await asyncio.sleep(0.1)
        assert (consumer.added, owner.engine.offers.num_transfers) == ([], 0)
        assert owner.engine.offers.num_open == 1

    between(scene)


def test_a_wrong_offer_for_the_prompt_is_refused() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        owner.submit(request("p", prefill_only=True, offer_id=OFFER))
        other = decode_leg(owner)
        waiting = consumer.submit(msgspec.structs.replace(other, token_ids=[5, *other.token_ids[1:]]))
        await asyncio.sleep(0.1)
        await owner.core.prefill()
        await until(lambda: waiting.deltas)
        assert waiting.deltas[-1].error_message.startswith("digest")

    between(scene)


def test_what_cannot_be_awaited_is_refused_at_once() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        for fields in ({"choices": [0, 1]}, {"emitted": [[4]]}, {"prefill_only": True}, {"ticket": b"t"}):
            with pytest.raises(InvalidRequest, match="awaits"):
                consumer.submit(decode_leg(owner, **fields))
        with pytest.raises(InvalidRequest, match="hexadecimal"):
            consumer.submit(decode_leg(owner, offer_id="o"))

    between(scene)


def test_a_wait_ends_with_its_own_time() -> None:
    async def scene() -> None:
        offers = OpenOffers()
        offers.opened("o", 40)
        with pytest.raises(TransferFailed, match=r"^timeout: "):
            await offers.first_tokens("o", 0.05)
        waits = [asyncio.create_task(offers.first_tokens("o", 5.0)) for _ in range(2)]
        await asyncio.sleep(0)
        waits[0].cancel()
        await asyncio.sleep(0)
        assert offers.drawn("o", [3])
        assert await waits[1] == [3]
        assert await offers.first_tokens("o", 5.0) == [3]

    asyncio.run(scene())


def test_an_owner_that_is_slow_to_compute_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A begin has five seconds otherwise, and two that take longer have the peer asked whether it lives."""
    monkeypatch.setattr("pdmesh.connector.peers.CALL_TIMEOUT_S", 0.1)

    async def scene(owner: Side, consumer: Side) -> None:
        owner.submit(request("p", prefill_only=True, offer_id=OFFER))
        consumer.submit(decode_leg(owner))
        await asyncio.sleep(0.5)
        await owner.core.prefill()
        await until(lambda: consumer.added)
        peers: PeerDirectory = consumer.engine.servicer._submission._sources._peers
        assert peers.lost == 0

    between(scene)
