"""A request whose offer is awaited is held in the core, and may run there before the owner has agreed: both servers over real
gRPC, their cores played."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdmesh.connector.peers import Peer, PeerDirectory
from pdmesh.engine.messages import DropHeld, HoldRequest, NeedsSource, TransferEnded
from pdmesh.errors import PeerUnavailable
from pdmesh.protocol.messages import ChoiceDelta
from pdmesh.protocol.pushes import Expectation
from pdmesh.protocol.states import TransferState
from pdmesh.protocol.transfers import Begun
from support.awaiting import until
from support.engines import request
from support.held_engine import Inbox, counted
from support.open_offers import OFFER, Side, between, decode_leg


def held(consumer: Side) -> list[HoldRequest]:
    return [message for message in consumer.core.sent if isinstance(message, HoldRequest)]


def dropped(consumer: Side) -> list[str]:
    return [message.request_id for message in consumer.core.sent if isinstance(message, DropHeld)]


async def run_ahead(consumer: Side, number: int = 0) -> str:
    """Have the consumer's core go on by a notice: its pull has ended, a token is drawn. Returns the transfer's id."""
    await until(lambda: len(held(consumer)) > number)
    add = held(consumer)[number].add
    assert add.source is not None
    await consumer.core.say(
        transfers=[
            TransferEnded(
                transfer_id=add.source.transfer_id,
                peer_id=add.source.peer_id,
                request_id=add.request.request_id,
                committed=True,
                num_bytes=192,
                way="shm",
            )
        ],
        deltas=[ChoiceDelta(request_id=add.request.request_id, token_ids=[11])],
        begun_s=1.0,
        ended_s=2.0,
    )
    return add.source.transfer_id


def start(owner: Side, consumer: Side) -> Inbox:
    owner.submit(request("p", prefill_only=True, offer_id=OFFER))
    return consumer.submit(decode_leg(owner))


def test_what_runs_ahead_is_let_out_when_the_owner_has_agreed() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        inbox = start(owner, consumer)
        transfer_id = await run_ahead(consumer)
        [hold] = held(consumer)
        source = hold.add.source
        assert source is not None
        assert (source.groups, source.offer_id, source.connector) == ([], OFFER, "shm")
        assert source.peer_id == owner.engine.handoff.owner.peer_id
        assert (hold.add.request.emitted, hold.add.request.awaits) == ([], None)
        # By which the cores know that they mean the same prompt.
        assert hold.add.digest == owner.core.added().digest != b""
        await asyncio.sleep(0.1)
        assert (inbox.deltas, consumer.added) == ([], [])
        assert owner.engine.offers.outcome_of(transfer_id) is None

        await owner.core.prefill()
        await until(lambda: len(inbox.deltas) == 2)
        assert [(delta.kv_committed, delta.token_ids) for delta in inbox.deltas] == [(True, []), (False, [11])]
        assert (inbox.deltas[1].kv_source, inbox.deltas[1].kv_bytes) == ("shm", 192)
        [added] = consumer.added
        assert added.source is not None
        assert (added.request.request_id, added.source.transfer_id) == (hold.add.request.request_id, transfer_id)
        await until(lambda: owner.engine.offers.outcome_of(transfer_id) is TransferState.COMMITTED)
        assert dropped(consumer) == []
        assert counted(consumer.engine, "vllm:generation_tokens_total") == 1
        # From here on it is a request as any other.
        await consumer.core.say(deltas=[ChoiceDelta(request_id=added.request.request_id, token_ids=[12])])
        assert inbox.deltas[-1].token_ids == [12]

    between(scene)


def test_what_the_owner_does_not_agree_to_comes_out_of_no_core() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        inbox = start(owner, consumer)
        await run_ahead(consumer)
        core_id = held(consumer)[0].add.request.request_id
        await owner.core.prefill(finish_reason="stop")
        await until(lambda: inbox.deltas)
        assert [(delta.error_code, delta.token_ids) for delta in inbox.deltas] == [("TransferFailed", [])]
        assert (dropped(consumer), consumer.added) == ([core_id], [])
        await consumer.core.say(deltas=[ChoiceDelta(request_id=core_id, token_ids=[12], finish_reason="abort")])
        assert len(inbox.deltas) == 1
        assert len(consumer.engine.servicer._submission._sources._fetches) == 0

    between(scene)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_who_goes_away_is_held_no_longer(is_ahead: bool) -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        inbox = start(owner, consumer)
        await until(lambda: held(consumer))
        if is_ahead:
            await run_ahead(consumer)
        [running] = consumer.engine.table.of(inbox)
        consumer.engine.endings.abort(running)
        await until(lambda: dropped(consumer))
        assert dropped(consumer) == [held(consumer)[0].add.request.request_id]
        assert (len(consumer.engine.table), inbox.deltas) == (0, [])
        await owner.core.prefill()
        await asyncio.sleep(0.1)
        assert (consumer.added, owner.engine.offers.num_transfers) == ([], 0)

    between(scene)


def test_an_error_of_the_core_that_ran_ahead_is_the_requests_end() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        inbox = start(owner, consumer)
        await until(lambda: held(consumer))
        core_id = held(consumer)[0].add.request.request_id
        error = ChoiceDelta(request_id=core_id, finish_reason="error", error_code="EngineFault", error_message="no")
        await consumer.core.say(deltas=[error])
        assert inbox.deltas == []
        await owner.core.prefill()
        await until(lambda: inbox.deltas)
        assert [delta.error_code for delta in inbox.deltas] == ["EngineFault"]
        await until(lambda: len(consumer.engine.table) == 0)

    between(scene)


def test_a_second_attempt_is_another_request_to_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one has said must not pass for the second's."""
    begin, lost = PeerDirectory.begin, []

    async def begin_once_more(self: PeerDirectory, peer: Peer, **about: Any) -> Begun:
        if not lost:
            lost.append(peer)
            await asyncio.sleep(0.1)
            self.forget(peer.peer_id)
            raise PeerUnavailable("it was lost")
        return await begin(self, peer, **about)

    monkeypatch.setattr(PeerDirectory, "begin", begin_once_more)

    async def scene(owner: Side, consumer: Side) -> None:
        inbox = start(owner, consumer)
        await run_ahead(consumer)
        await until(lambda: len(held(consumer)) == 2)
        first, second = (hold.add.request.request_id for hold in held(consumer))
        assert dropped(consumer) == [first]
        await consumer.core.say(deltas=[ChoiceDelta(request_id=first, finish_reason="abort")])
        await owner.core.prefill()
        await until(lambda: consumer.added)
        assert [added.request.request_id for added in consumer.added] == [second]
        assert first != second
        assert inbox.deltas == []
        await consumer.core.say(deltas=[ChoiceDelta(request_id=second, token_ids=[12])])
        assert [delta.token_ids for delta in inbox.deltas] == [[12]]

    between(scene)


def test_a_preemption_of_what_runs_ahead_is_heard_of_when_the_owner_has_agreed() -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        start(owner, consumer)
        await run_ahead(consumer)
        core_id = held(consumer)[0].add.request.request_id
        await consumer.core.say(needs=[NeedsSource(request_id=core_id, choice=0, num_cached=0)])
        assert owner.engine.offers.num_transfers == 0
        await owner.core.prefill()
        # It asks the same owner again.
        await until(lambda: owner.engine.offers.num_transfers == 2 or (len(held(consumer)) == 1 and consumer.added))
        assert len(held(consumer)) == 1

    between(scene)


@pytest.mark.parametrize("why", ["connector", "push"])
def test_what_no_core_could_give_notice_of_is_not_held(why: str) -> None:
    async def scene(owner: Side, consumer: Side) -> None:
        if why == "connector":
            consumer.engine.servicer._submission._sources._peers._greeter._connectors[:] = ["grpc"]
            owner.engine.handoff.owner.set_metadata("grpc", b"")
        else:
            owner_id, tokens = owner.engine.handoff.owner.peer_id, request("d").token_ids
            expectation = Expectation(
                offer_id=OFFER,
                owner_id=owner_id,
                owner_address=owner.address,
                token_ids=tokens,
                cache_salt="",
                remaining_s=60.0,
            )
            expectations = consumer.engine.servicer._submission._expectations
            expectations._connector = "nixl"
            expectations.expect(expectation, Inbox())
        start(owner, consumer)
        await asyncio.sleep(0.1)
        await owner.core.prefill()
        await until(lambda: consumer.added)
        assert held(consumer) == []
        consumer.engine.servicer._submission._expectations.close()

    between(scene)
