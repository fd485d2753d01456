"""Fetching over real gRPC, with the core and the owner played: what is checked, what is begun, who hears how it ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import msgspec
import pytest

from pdmesh.connector.checksums import PoolSums
from pdmesh.connector.owner import PoolOwner
from pdmesh.connector.pool import PoolShape
from pdmesh.engine.messages import AddRequest, DisconnectPeer, TransferEnded
from pdmesh.engine.server.assembly import Engine
from pdmesh.engine.server.pull_time import MOST_S, SLOW_LINK_BYTES_S, START_S, PullTimes
from pdmesh.engine.server.sources import check_owner
from pdmesh.engine.server.submission import StockLeg
from pdmesh.engine.server.transfer_params import RemoteKV
from pdmesh.errors import Draining, TransferFailed
from pdmesh.openai.generator import TokenRequest
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol import mesh_pb2_grpc
from pdmesh.protocol.exchange import Exchange, KVNames
from pdmesh.protocol.messages import NO_MARKS, ChoiceDelta, GenerateRequest, GroupBlocks, KVMarks
from pdmesh.protocol.offers import TRANSFER_LEASE_S, OfferTable
from pdmesh.protocol.states import TransferState
from pdmesh.protocol.ticket import Ticket, request_digest, seal
from pdmesh.protocol.transfers import OfferView
from pdmesh.security import MeshSecret
from pdmesh.servers import grpc_server
from support.awaiting import until
from support.engines import SECRET, request
from support.held_engine import READY, HeldCore, Inbox, counted, play
from support.pool_node import make_pool

OURS = MeshSecret(SECRET)
SHAPE = PoolShape(READY.num_blocks, READY.block_bytes)
BLOCKS = GroupBlocks(group=0, block_ids=[0, 1, 2], generations=[1, 1, 1])
GONE = "127.0.0.1:1"
STOCK_OFFER = "0123456789abcdef" * 2
PROXYS_OFFER = "fedcba9876543210" * 2


def ticket_of(made: GenerateRequest, address: str = GONE, peer_id: str = "owner@1", **changes: Any) -> Ticket:
    engine_id, _, epoch = peer_id.rpartition("@")
    ticket = Ticket(
        offer_id="o",
        engine_id=engine_id,
        epoch=int(epoch),
        address=address,
        digest=request_digest(made.token_ids, cache_salt=made.cache_salt),
        groups=[BLOCKS],
        num_tokens=len(made.token_ids),
        layout_fingerprints=READY.layout_fingerprints,
        model_fingerprint=READY.model_fingerprint,
        first_tokens={choice: [9] for choice in made.choices},
    )
    return msgspec.structs.replace(ticket, **changes)


def decode_leg(ticket: Ticket, **fields: Any) -> GenerateRequest:
    fields = {"emitted": [[9]]} | fields
    return request("r", ticket=seal(ticket, OURS), **fields)


@asynccontextmanager
async def owning(
    made: GenerateRequest,
    peer_id: str = "owner@1",
    *,
    has_sums: bool = False,
    marks: KVMarks = NO_MARKS,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[str, OfferTable]]:
    """An owner with an offer of ours and a stock one; its address and its table."""
    pool, table = make_pool(SHAPE, filled=True), OfferTable(clock)
    digest = request_digest(made.token_ids, cache_salt=made.cache_salt)
    for offer_id in ("o", STOCK_OFFER):
        table.open(offer_id, request_id="r", digest=digest, release_on_commit=offer_id == STOCK_OFFER)
        table.seal(offer_id, [BLOCKS], len(made.token_ids), marks)
    owner = PoolOwner(
        peer_id=peer_id,
        pool=pool,
        offers=table,
        connectors={"shm": b"", "grpc": b""},
        model_fingerprint=READY.model_fingerprint,
        layout_fingerprints=READY.layout_fingerprints,
        on_ended=lambda ended: None,
        sums=PoolSums(pool, block_size=READY.block_size) if has_sums else None,
    )
    async with grpc_server("127.0.0.1", 0, OURS, lambda server: [owner.add_to(server)]) as port:
        yield f"127.0.0.1:{port}", table
    if owner.sums is not None:
        owner.sums.close()
    pool.close()


def submitted(engine: Engine, made: GenerateRequest) -> Inbox:
    inbox = Inbox()
    engine.servicer._submission.submit(made, inbox)
    return inbox


@pytest.mark.parametrize(
    ("changes", "fields", "word"),
    [
        ({"digest": b"x" * 32}, {}, "digest"),
        ({"num_tokens": 39}, {}, "num_tokens"),
        ({"model_fingerprint": "other"}, {}, "model_fingerprint"),
        ({"layout_fingerprints": ["other"]}, {}, "layout_fingerprints"),
        ({}, {"emitted": [[8]]}, "first_tokens"),
        ({}, {"emitted": []}, "first_tokens"),
        ({}, {"choices": [1]}, "first_tokens"),
        ({"first_tokens": {0: [9, 4]}}, {}, "first_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_ticket_that_does_not_fit_the_request_is_not_used(
    changes: dict[str, Any], fields: dict[str, Any], word: str, policy: str
) -> None:
    made = decode_leg(ticket_of(request("r"), **changes), **fields)

    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = submitted(engine, made)
        if policy == "fail":
            await until(lambda: inbox.deltas)
            assert inbox.deltas[-1].error_code == "TransferFailed"
            assert inbox.deltas[-1].error_message.startswith(f"{word}:")
            assert core.sent == []
        else:
            await until(lambda: core.sent)
            assert core.added().source is None
            assert counted(engine, "pdmesh_fallbacks_total", reason=word) == 1

    play(scene, kv_load_failure_policy=policy)


def test_a_ticket_is_held_against_the_owner_where_layouts_may_differ() -> None:
    """An engine that converts takes other fingerprints than its own, but only those that the owner has shaken hands with."""
    ticket = ticket_of(request("r"), layout_fingerprints=["theirs"])
    names = KVNames(model_fingerprint=READY.model_fingerprint, layout_fingerprints=("theirs",))
    check_owner(ticket, names)
    with pytest.raises(TransferFailed, match=r"^layout_fingerprints: .*\[theirs\], it now has \[new\]"):
        check_owner(ticket, replace(names, layout_fingerprints=("new",)))
    with pytest.raises(TransferFailed, match=r"^model_fingerprint: "):
        check_owner(ticket, replace(names, model_fingerprint="new"))


def test_a_ticket_that_fits_is_fetched_also_after_more_tokens() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r")) as (address, table):
            submitted(engine, decode_leg(ticket_of(request("r"), address), emitted=[[9, 4, 7]]))
            await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
            source = core.added().source
            assert source is not None
            assert (source.peer_id, source.groups, source.num_tokens) == ("owner@1", [BLOCKS], 40)
            assert table.num_transfers == 1

    play(scene)


def test_what_an_owner_says_of_its_kv_goes_to_the_core() -> None:
    """An owner's mark, a reset of its prefix cache or of this one, and that numbers are rounded between the two."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r"), marks=KVMarks(num_exact_tokens=32)) as (address, table):
            table.note_reset()
            resetting = asyncio.create_task(engine.resets.reset())
            await until(lambda: engine.resets.num_begun)
            submitted(engine, decode_leg(ticket_of(request("r"), address)))
            await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
            source = core.added().source
            assert source is not None
            assert (source.marks, source.num_resets) == (KVMarks(num_exact_tokens=32, before_reset=True), 1)
            sources = engine.servicer._submission._sources
            [fetch] = sources._fetches._open.values()
            fetch.exchange = Exchange.ROUNDED
            view = OfferView(groups=[BLOCKS], num_tokens=40, marks=source.marks)
            marks = sources._source(fetch, view, fail_policy="fail").marks
            assert marks == KVMarks(num_exact_tokens=0, before_reset=True)
            resetting.cancel()

    play(scene)


def test_the_offers_of_an_engine_that_empties_its_prefix_cache_say_so() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        submitted(engine, request("r", prefill_only=True))
        await core.prefill()
        resetting = asyncio.create_task(engine.resets.reset())
        await until(lambda: engine.resets.num_begun)
        [offer] = engine.offers._offers.values()
        assert offer.view.marks == KVMarks(before_reset=True)
        resetting.cancel()

    play(scene)


def test_a_pull_has_time_by_its_size() -> None:
    """It had 30 s, whatever it was: an owner that stood still held up a prompt that a second computes."""
    made = request("r")

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(made) as (address, _):
            submitted(engine, decode_leg(ticket_of(made, address)))
            await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
            source = core.added().source
            assert source is not None
            assert source.deadline_s == START_S + 3 * READY.block_bytes / SLOW_LINK_BYTES_S

    play(scene)


@pytest.mark.parametrize("is_on", [True, False])
def test_an_owners_sums_go_to_the_core_unless_they_are_not_wanted(is_on: bool) -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r"), has_sums=True) as (address, _):
            submitted(engine, decode_leg(ticket_of(request("r"), address)))
            await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
            source = core.added().source
            assert source is not None
            [blocks] = source.groups
            assert len(blocks.checksums) == (3 if is_on else 0)
            assert blocks.is_sound

    play(scene, kv_checksums=is_on)


def test_damaged_kv_is_counted_and_told_once_for_a_peer(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r")) as (address, table):
            for number in range(2):
                made = msgspec.structs.replace(decode_leg(ticket_of(request("r"), address)), request_id=f"r{number}")
                submitted(engine, made)
                await until(lambda num=number: sum(isinstance(each, AddRequest) for each in core.sent) > num)
                source = core.sent[-1].source
                ended = TransferEnded(
                    transfer_id=source.transfer_id,
                    peer_id="owner@1",
                    request_id=made.request_id,
                    committed=False,
                    reason="corrupt",
                )
                await core.say(transfers=[ended])
            assert counted(engine, "pdmesh_transfers_total", reason="corrupt") == 2
            assert counted(engine, "pdmesh_fallbacks_total", reason="corrupt") == 2
            await until(lambda: not table.num_transfers)
        assert sum("is not what was summed there" in record.message for record in caplog.records) == 1

    play(scene)


def test_damaged_kv_is_not_said_to_be_settled_before_the_tokens_that_came_with_it_were_drawn_again() -> None:
    """A proxy that heard so let the offer go, and when decode died then, another went on behind tokens nobody had drawn again."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r")) as (address, _):
            inbox = submitted(engine, decode_leg(ticket_of(request("r"), address)))
            await until(lambda: any(isinstance(each, AddRequest) for each in core.sent))
            source, core_id = core.added().source, core.added().request.request_id
            assert source is not None
            ended = TransferEnded(
                transfer_id=source.transfer_id,
                peer_id="owner@1",
                request_id=core_id,
                committed=False,
                reason="corrupt",
            )
            await core.say(transfers=[ended])
            await until(lambda: counted(engine, "pdmesh_transfers_total", reason="corrupt") == 1)
            assert not inbox.deltas
            await core.say(deltas=[ChoiceDelta(request_id=core_id, token_ids=[11])])
            await until(lambda: len(inbox.deltas) == 2)
            assert [(each.kv_committed, each.token_ids) for each in inbox.deltas] == [(True, []), (False, [11])]

    play(scene)


def test_damage_on_the_way_that_another_way_made_good_is_counted_and_told_once_and_its_connector_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HeldCore, "connectors", ("shm", "grpc"))
    used: list[str] = []

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r")) as (address, table):
            for number in range(4):
                made = msgspec.structs.replace(decode_leg(ticket_of(request("r"), address)), request_id=f"r{number}")
                submitted(engine, made)
                await until(lambda num=number: sum(isinstance(each, AddRequest) for each in core.sent) > num)
                source = core.added().source
                assert source is not None
                used.append(source.connector)
                ended = TransferEnded(
                    transfer_id=source.transfer_id,
                    peer_id="owner@1",
                    request_id=made.request_id,
                    committed=True,
                    way="grpc:after:shm" if source.connector == "shm" else "grpc",
                    damaged=["shm"] if source.connector == "shm" else [],
                )
                await core.say(transfers=[ended])
                await until(lambda: not table.num_transfers)
            assert counted(engine, "pdmesh_damaged_pulls_total", connector="shm") == 2
            assert counted(engine, "pdmesh_connector_fallbacks_total", connector="shm") >= 2

    play(scene)
    assert used == ["shm", "shm", "grpc", "grpc"]
    assert sum("is not what was summed there" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("flow", ["ticket", "stock"])
def test_a_transfer_is_renewed_while_its_request_is_queued(flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner ended it after 30 s, and let the blocks go, while its request waited for its turn; here it counted as failed
    after 40 s. What was pulled then was told as expired there, or stale."""
    monkeypatch.setattr("pdmesh.connector.peers.RENEW_INTERVAL_S", 0.02)
    made, leap_s = request("r", deadline_s=300.0), 0.0

    async def scene(core: HeldCore, engine: Engine) -> None:
        nonlocal leap_s
        async with owning(made, clock=lambda: time.monotonic() + leap_s) as (address, table):
            if flow == "ticket":
                submitted(engine, decode_leg(ticket_of(made, address), deadline_s=300.0))
            else:
                remote = RemoteKV(
                    engine_id="owner",
                    offer_id="o",
                    host="127.0.0.1",
                    port=int(address.rpartition(":")[2]),
                    groups=[msgspec.structs.replace(BLOCKS, generations=[])],
                    num_tokens=40,
                )
                engine.servicer._submission.submit(made, Inbox(), StockLeg(remote=remote))
            await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
            source = core.added().source
            assert source is not None
            for _ in range(20):
                leap_s += 0.8 * TRANSFER_LEASE_S
                due_s = leap_s + time.monotonic() + 0.5 * TRANSFER_LEASE_S
                await until(lambda due_s=due_s: (table.next_deadline() or math.inf) > due_s)
                assert table.outcome_of(source.transfer_id) is TransferState.READING
            [fetch] = engine.servicer._submission._sources._fetches._open.values()
            assert fetch.timer is not None
            assert fetch.timer.when() > asyncio.get_running_loop().time() + 280.0
            ended = TransferEnded(
                transfer_id=source.transfer_id, peer_id="owner@1", request_id="r", committed=True, reason=""
            )
            await core.say(transfers=[ended])
            await until(lambda: not table.num_transfers)
            assert table.transfers_ended == {TransferState.COMMITTED: 1}
            assert counted(engine, "pdmesh_transfers_total", outcome="committed") == 1
            assert counted(engine, "pdmesh_transfers_total", outcome="failed") == 0

    play(scene)


def test_pulls_under_way_and_a_throttle_give_a_pull_more_time() -> None:
    times = PullTimes('{"shm": {"throttle_bytes_s": "10M"}, "grpc": {"throttle_bytes_s": "10G"}}')
    assert times.bound_s("nixl", 0) == START_S
    assert times.bound_s("nixl", 100_000_000) == times.bound_s("grpc", 100_000_000) == START_S + 2
    assert times.bound_s("shm", 10 << 20) == START_S + 1
    assert times.bound_s("shm", 1 << 40) == MOST_S


def test_a_dead_owner_is_not_taken_for_this_engine_by_the_proxy() -> None:
    """It surfaced as PeerUnavailable, for which the proxy excludes the engine that answered: a healthy one."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = submitted(engine, decode_leg(ticket_of(request("r"))))
        await until(lambda: inbox.deltas)
        assert inbox.deltas[-1].error_code == "TransferFailed"
        assert inbox.deltas[-1].error_message.startswith("peer_unavailable:")

    play(scene, kv_load_failure_policy="fail")


def test_an_owner_with_too_many_transfers_costs_the_fetch_and_not_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the request as Overloaded, for which the proxy excludes the engine that answered, whatever the policy."""
    monkeypatch.setattr("pdmesh.connector.owner.MAX_TRANSFERS", 0)

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r")) as (address, _):
            inbox = submitted(engine, decode_leg(ticket_of(request("r"), address)))
            await until(
                lambda: (
                    any(isinstance(each, AddRequest) for each in core.sent)
                    or any(each.error_code for each in inbox.deltas)
                )
            )
            assert core.added().source is None
            assert counted(engine, "pdmesh_fallbacks_total", reason="overloaded") == 1

    play(scene, kv_load_failure_policy="recompute")


def test_a_stale_name_does_not_cost_a_live_peer_its_pulls() -> None:
    """Each ticket of an earlier start, and each wrong remote_engine_id, dropped the peer that lives there now."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r"), "owner@2") as (address, table):
            submitted(engine, decode_leg(ticket_of(request("r"), address, "owner@2")))
            await until(lambda: table.num_transfers)
            made = decode_leg(ticket_of(request("r"), address, "owner@1"))
            inbox = submitted(engine, made)
            await until(lambda: inbox.deltas)
            assert inbox.deltas[-1].error_message.startswith("restarted:")
            assert table.num_transfers == 1
            assert not [message for message in core.sent if isinstance(message, DisconnectPeer)]

    play(scene, kv_load_failure_policy="fail")


@pytest.mark.parametrize(("reason", "num_fallbacks"), [("aborted", 0), ("cancelled", 0), ("stale: block 3", 1)])
def test_a_client_that_leaves_during_a_pull_is_no_fallback(reason: str, num_fallbacks: int) -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(request("r")) as (address, table):
            submitted(engine, decode_leg(ticket_of(request("r"), address)))
            await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
            source = core.added().source
            assert source is not None
            ended = TransferEnded(
                transfer_id=source.transfer_id, peer_id="owner@1", request_id="r", committed=False, reason=reason
            )
            await core.say(transfers=[ended])
            assert counted(engine, "pdmesh_fallbacks_total") == num_fallbacks
            await until(lambda: not table.num_transfers)
            assert table.transfers_ended[TransferState.FAILED if num_fallbacks else TransferState.ABORTED] == 1

    play(scene)


def stock_params(address: str, offer_id: str = STOCK_OFFER) -> dict[str, object]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": "owner",
        "remote_request_id": offer_id,
        "remote_host": "127.0.0.1",
        "remote_port": int(address.rpartition(":")[2]),
        "remote_block_ids": [BLOCKS.block_ids],
    }


async def answer(engine: Engine, params: dict[str, object], made: GenerateRequest) -> None:
    asked = TokenRequest(
        request_id=made.request_id, token_ids=made.token_ids, sampling=made.sampling, kv_transfer_params=params
    )
    async for _ in engine.generator.generate(asked):
        pass


class LegEnd(Enum):
    CLIENT_LEFT = auto()
    REFUSED = auto()
    COMPUTED = auto()
    ANOTHER_PROMPT = auto()
    FAILED = auto()
    UNAUTHENTICATED = auto()
    NOT_STOCK = auto()
    ANSWERED = auto()


@pytest.mark.parametrize("end", LegEnd)
def test_a_stock_offer_ends_when_its_leg_will_not_read_it(end: LegEnd) -> None:
    """A leg that was refused, whose client left, or whose prompt was computed here, left it to its lease of 30 s."""
    made = request("r")

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(made) as (address, table):
            submitted(engine, decode_leg(ticket_of(made, address)))
            await until(lambda: table.num_transfers)
            table.open(PROXYS_OFFER, request_id="p", digest=b"")
            params = stock_params(address, PROXYS_OFFER if end is LegEnd.NOT_STOCK else STOCK_OFFER)
            if end in (LegEnd.REFUSED, LegEnd.NOT_STOCK, LegEnd.UNAUTHENTICATED):
                engine.generator._takes_params = end is not LegEnd.UNAUTHENTICATED
                engine.generator.refused(params)
            else:
                await _leg(core, engine, params, end)
            if end in (LegEnd.CLIENT_LEFT, LegEnd.REFUSED, LegEnd.COMPUTED, LegEnd.ANSWERED):
                await until(lambda: not table.is_live(STOCK_OFFER))
            else:
                await asyncio.sleep(0.2)
                assert table.is_live(STOCK_OFFER)
            assert table.is_live(PROXYS_OFFER)

    async def _leg(core: HeldCore, engine: Engine, params: dict[str, object], end: LegEnd) -> None:
        asked = (
            request("s", num_prompt=41)
            if end is LegEnd.ANOTHER_PROMPT
            else msgspec.structs.replace(made, request_id="s")
        )
        num_sent = len(core.sent)
        leg = asyncio.create_task(answer(engine, params, asked))
        await until(lambda: len(core.sent) > num_sent)
        added = core.sent[-1]
        assert isinstance(added, AddRequest)
        if end is LegEnd.CLIENT_LEFT:
            leg.cancel()
            await asyncio.wait([leg])
            return
        reason = {LegEnd.ANSWERED: "", LegEnd.COMPUTED: "stale", LegEnd.FAILED: "stale"}.get(end, "digest")
        if added.source is not None:
            ended = TransferEnded(
                transfer_id=added.source.transfer_id,
                peer_id="owner@1",
                request_id=added.request.request_id,
                committed=not reason,
                reason=reason,
            )
            await core.say(transfers=[ended])
        told = ChoiceDelta(
            request_id=added.request.request_id,
            token_ids=[9],
            finish_reason="length",
            kv_source=f"recompute:{reason}" if reason else "shm",
        )
        if end is LegEnd.FAILED:
            told = ChoiceDelta(
                request_id=added.request.request_id,
                finish_reason="error",
                error_code="TransferFailed",
                error_message="the KV of this request could not be fetched: stale",
            )
        await core.say(deltas=[told])
        await asyncio.wait([leg])

    play(scene, kv_load_failure_policy="recompute")


def test_an_offer_outlives_a_refusal_that_is_tried_again_at_another_decode() -> None:
    """Routers send a leg that met a full or draining decode to another, with the same parameters."""
    made = request("r")

    async def scene(core: HeldCore, engine: Engine) -> None:
        async with owning(made) as (address, table):
            engine.board.draining = True
            with pytest.raises(Draining):
                await answer(engine, stock_params(address), made)
            await asyncio.sleep(0.2)
            assert table.is_live(STOCK_OFFER)

    play(scene)


class Tier(mesh_pb2_grpc.KVCacheServicer, mesh_pb2_grpc.KVPeerServicer):
    """A tier that hits always, as slow and as often restarted as the test wants."""

    def __init__(self) -> None:
        self.epoch = 1
        self.delay_s = 0.0
        self.lookups: list[pb.LookupRequest] = []
        self.ended: list[pb.EndTransferRequest] = []

    @property
    def peer_id(self) -> str:
        return f"tier@{self.epoch}"

    async def Lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupReply:
        self.lookups.append(request)
        await asyncio.sleep(self.delay_s)
        blocks = pb.BlockList(block_ids=[0], generations=[1])
        return pb.LookupReply(num_hits=1, num_arena=1, peer_id=self.peer_id, blocks=blocks)

    async def Handshake(self, request: pb.HandshakeRequest, context: object) -> pb.HandshakeReply:
        connectors = [pb.ConnectorMetadata(connector="shm")]
        return pb.HandshakeReply(peer_id=self.peer_id, protocol=1, connectors=connectors, num_blocks=8, block_bytes=64)

    async def EndTransfer(self, request: pb.EndTransferRequest, context: object) -> pb.EndTransferReply:
        self.ended.append(request)
        return pb.EndTransferReply(known=True)


def play_with_tier(scene: Any) -> None:
    """Run a scene of (core, engine, tier) once they are connected."""

    async def body() -> None:
        tier = Tier()

        def register(server: Any) -> list[str]:
            mesh_pb2_grpc.add_KVCacheServicer_to_server(tier, server)
            mesh_pb2_grpc.add_KVPeerServicer_to_server(tier, server)
            return []

        async with grpc_server("127.0.0.1", 0, OURS, register) as port:

            async def connected(core: HeldCore, engine: Engine) -> None:
                assert engine.tier is not None
                running = asyncio.create_task(engine.tier.run())
                await engine.tier.tried()
                await scene(core, engine, tier)
                running.cancel()
                await asyncio.wait([running])

            await asyncio.to_thread(play, connected, kvcache=f"127.0.0.1:{port}", kvcache_lookup_timeout_s=0.4)

    asyncio.run(body())


def test_a_tier_that_restarted_is_asked_again_and_told_of_the_first_answer() -> None:
    async def scene(core: HeldCore, engine: Engine, tier: Tier) -> None:
        submitted(engine, request("before"))
        await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
        tier.epoch = 2
        submitted(engine, request("after"))
        await until(lambda: isinstance(core.sent[-1], AddRequest) and "after" in core.added().request.request_id)
        source = core.added().source
        assert source is not None
        assert source.peer_id == "tier@2"
        assert [lookup.transfer_id for lookup in tier.lookups[1:]] == [tier.ended[0].transfer_id, source.transfer_id]
        # The time the tier may take, not the time that the pull may take afterwards.
        assert {lookup.remaining_ms for lookup in tier.lookups} == {400}

    play_with_tier(scene)


def test_a_lookup_that_nobody_waits_for_lets_its_pins_go() -> None:
    """Nobody ended it: the tier kept the blocks pinned for its whole lease."""

    async def scene(core: HeldCore, engine: Engine, tier: Tier) -> None:
        tier.delay_s = 0.2
        running = engine.servicer._submission.submit(request("left"), Inbox())
        await until(lambda: tier.lookups)
        engine.endings.abort(running)
        await until(lambda: tier.ended)
        assert tier.ended[0].transfer_id == tier.lookups[0].transfer_id
        assert tier.ended[0].reason == "aborted"
        tier.delay_s = 2.0
        submitted(engine, request("slow"))
        await until(lambda: len(tier.ended) == 2)
        assert tier.ended[1].transfer_id == tier.lookups[1].transfer_id
        # Whichever clock rings first: the call's or the caller's.
        assert tier.ended[1].reason in ("timeout", "aborted")

    play_with_tier(scene)


def test_one_request_in_a_hurry_does_not_pause_the_tier_for_all() -> None:
    async def scene(core: HeldCore, engine: Engine, tier: Tier) -> None:
        assert engine.tier is not None

        async def attempt(ask: object) -> None:
            await asyncio.sleep(30)

        assert await engine.tier.find(attempt, [b"key"], 0.05) is None
        submitted(engine, request("patient"))
        await until(lambda: core.sent and isinstance(core.sent[-1], AddRequest))
        assert core.added().source is not None
        # One that had all the time a lookup may take and got no answer says that the tier is slow.
        assert await engine.tier.find(attempt, [b"key"], 30.0) is None
        assert await engine.tier.find(attempt, [b"key"], 30.0) is None
        assert counted(engine, "pdmesh_tier_lookups_total", outcome="timeout") == 2
        assert counted(engine, "pdmesh_tier_lookups_total", outcome="paused") == 1

    play_with_tier(scene)
