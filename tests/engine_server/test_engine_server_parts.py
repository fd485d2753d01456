"""The server's parts with the core's end of the messages held by the test, so that every order of events can be played."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import grpc.aio
import msgspec
import pytest
from prometheus_client import generate_latest

from pdmesh.connector.peers import Ask
from pdmesh.engine.messages import Abort
from pdmesh.engine.push_messages import PushExpected
from pdmesh.engine.server import sessions as sessions_module
from pdmesh.engine.server.assembly import Engine
from pdmesh.engine.server.expectations import Expected
from pdmesh.engine.server.front import _guard
from pdmesh.engine.server.servicer import SESSION_METADATA_KEY
from pdmesh.engine.server.sessions import Broken
from pdmesh.engine.stats import Stats
from pdmesh.errors import Draining, InvalidRequest, Overloaded, PeerUnavailable, TransferFailed
from pdmesh.lifecycle import Life
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.mesh_pb2_grpc import KVPeerStub
from pdmesh.protocol.messages import ChoiceDelta, TokenLogprobs
from pdmesh.protocol.offers import OFFER_LEASE_S
from pdmesh.protocol.pushes import Expectation, PushProgress
from pdmesh.protocol.ticket import unseal
from pdmesh.protocol.transfers import Begun
from pdmesh.protocol.wire import request_to_pb
from pdmesh.security import MeshSecret
from pdmesh_kernels.block_sum import sum_blocks
from support.engines import SECRET, request
from support.held_engine import HeldCore, Inbox, counted, play


def test_metrics_name_what_computes_and_what_keys_and_values_are_kept_in(monkeypatch: pytest.MonkeyPatch) -> None:
    core: dict[str, object] = {
        "dtype": "bfloat16",
        "kv_dtype": "int8",
        "backend": "torch",
        "backend_fallback": "head_dim",
    }
    core["expanded_weights"] = {"type Q6_K": 30}
    monkeypatch.setattr(HeldCore, "ready", msgspec.structs.replace(HeldCore.ready, **core))

    async def scene(core: HeldCore, engine: Engine) -> None:
        text = generate_latest(engine.registry).decode()
        (cache,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
        assert 'cache_dtype="int8"' in cache
        (computes,) = [line for line in text.splitlines() if line.startswith("pdmesh_backend_info{")]
        assert 'backend="torch",engine="0",fallback="head_dim"' in computes
        assert 'pdmesh_expanded_weights{engine="0",reason="type Q6_K"} 30.0' in text

    play(scene)


def test_a_tier_client_that_has_ended_is_asked_nothing() -> None:
    """Its channel is closed: each request that looked in the tier ended with an internal error."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        tier = engine.tier
        assert tier is not None
        peer: Any = SimpleNamespace(peer_id="kvcache@1")
        running = asyncio.create_task(tier.run())
        tier._is_connected = True
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        async def attempt(ask: Ask) -> Begun:
            return await ask(peer, "transfer", "shm")

        assert await tier.find(attempt, [b"key"], 5.0) is None
        assert counted(engine, "pdmesh_tier_lookups_total", outcome="unconnected") == 1
        # Closed at any other time it is a miss, too.
        tier._is_connected = True
        assert await tier.find(attempt, [b"key"], 5.0) is None
        assert counted(engine, "pdmesh_tier_lookups_total", outcome="failed") == 1

    play(scene, kvcache="127.0.0.1:1")


def test_a_part_that_is_cancelled_by_what_it_waits_for_takes_the_service_down() -> None:
    async def scene() -> None:
        inner: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def part() -> None:
            await inner

        asked, life = asyncio.create_task(_guard("tier", part(), quiet := Life())), Life()
        await asyncio.sleep(0)
        asked.cancel()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], asyncio.CancelledError)
        assert not quiet.stopping
        inner = asyncio.get_running_loop().create_future()
        unasked = asyncio.create_task(_guard("tier", part(), life))
        await asyncio.sleep(0)
        inner.cancel()
        await asyncio.gather(unasked, return_exceptions=True)
        assert life.stopping
        assert "tier failed" in str(life.exit_error)

    asyncio.run(scene())


def test_what_a_pusher_has_no_sum_of_any_more_is_left_to_the_pull() -> None:
    """Its offer could go between the last write and the sums: blocks that nobody had checked were found as cached."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        expectations = engine.servicer._sessions._expectations
        plan = PushExpected(transfer_id="t", blocks=[[1, 2]])
        assert expectations._pool is not None
        [wanted, _] = sum_blocks(expectations._pool.blocks, [1, 2]).tolist()

        def progress(*sums: int) -> PushProgress:
            return PushProgress(peer_id="p@1", num_blocks=2, checksums=[list(sums)])

        await expectations._check(plan, 0, progress(wanted, wanted))
        for told in ((0, wanted), (wanted, 0), (0, 0)):
            with pytest.raises(TransferFailed, match="unsummed"):
                await expectations._check(plan, 0, progress(*told))
        for told in ((0, wanted ^ 1), (wanted, wanted ^ 1), (wanted,), ()):
            with pytest.raises(TransferFailed, match="corrupt"):
                await expectations._check(plan, 0, progress(*told))

    play(scene)


def test_a_push_that_is_asked_of_a_peer_lost_meanwhile_is_a_failed_push() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        expectations = engine.servicer._sessions._expectations
        expectations._connector = "nixl"
        engine.handoff.owner.set_metadata("nixl", b"where")
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        peer: Any = SimpleNamespace(stub=KVPeerStub(channel), address="127.0.0.1:1", track=lambda *_, **__: None)
        await channel.close()
        expected = Expected(
            expectation=Expectation(
                offer_id="o", owner_id="p@1", owner_address="127.0.0.1:1", token_ids=[1], cache_salt="", remaining_s=5.0
            ),
            sink=Inbox(),
            transfer_id="t",
            deadline_s=time.monotonic() + 5.0,
            plan=asyncio.get_running_loop().create_future(),
        )
        with pytest.raises(PeerUnavailable):
            await expectations._read(expected, peer, PushExpected(transfer_id="t", blocks=[[1]]))

    play(scene)


def test_the_queue_bound_refuses_with_retry_after() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = Inbox()
        submission = engine.servicer._submission
        submission.submit(request("a"), inbox)
        submission.submit(request("b"), inbox)
        with pytest.raises(Overloaded) as refused:
            submission.submit(request("c"), inbox)
        assert refused.value.retry_after_s
        await core.say(stats=Stats(num_running=2, steps=1, num_blocks=8))
        submission.submit(request("c"), inbox)

    play(scene, max_num_queued_reqs=2)


def test_an_id_that_runs_is_refused_and_free_again_after_its_end() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = Inbox()
        submission = engine.servicer._submission
        first = submission.submit(request("a"), inbox)
        with pytest.raises(InvalidRequest):
            submission.submit(request("a"), inbox)
        engine.endings.abort(first)
        again = submission.submit(request("a"), inbox)
        # Tokens of the aborted attempt that were on their way do not reach the new one.
        await core.say(deltas=[ChoiceDelta(request_id=first.core_id, token_ids=[5])])
        assert inbox.deltas == []
        await core.say(deltas=[ChoiceDelta(request_id=again.core_id, token_ids=[6])])
        assert [delta.token_ids for delta in inbox.deltas] == [[6]]
        assert inbox.deltas[0].request_id == "a"

    play(scene)


def test_a_session_that_does_not_drain_is_broken_and_its_requests_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_UNSENT_BYTES", 10 * sessions_module.DELTA_BYTES)

    async def scene(core: HeldCore, engine: Engine) -> None:
        sessions = engine.servicer._sessions
        slow, quick = sessions.open("slow"), sessions.open("quick")
        running = engine.servicer._submission.submit(request("a", max_tokens=100), slow)
        other = engine.servicer._submission.submit(request("a", max_tokens=100), quick)
        for _ in range(12):
            await core.say(deltas=[ChoiceDelta(request_id=each.core_id, token_ids=[5]) for each in (running, other)])
            await quick.take()
        assert slow.broken.result() is Broken.NOT_DRAINED
        sessions.close("slow", slow)
        assert core.sent[-1] == Abort(request_id=running.core_id)
        assert not quick.broken.done()
        assert len(engine.table) == 1

    play(scene)


def test_what_a_stalled_proxy_is_owed_comes_in_frames_that_a_message_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many logprobs made one message of all of it, larger than any may be: the stream broke, and with it every request."""
    monkeypatch.setattr(sessions_module, "FRAME_BYTES", 10_000)
    alternatives = TokenLogprobs(token_ids=[1] * 50, logprobs=[0.0] * 50, rank=1)

    async def scene(core: HeldCore, engine: Engine) -> None:
        session = engine.servicer._sessions.open("stalled")
        sent = [ChoiceDelta(request_id="a", token_ids=[at], logprobs=[alternatives]) for at in range(20)]
        sent[7] = ChoiceDelta(request_id="a", prompt_logprobs=[None, *[alternatives] * 30])
        for delta in sent:
            session.put(delta)
        frames = []
        while session._unsent:
            frames.append(await session.take())
        assert [delta for frame in frames for delta in frame] == sent
        assert [sent[7]] in frames
        assert max(map(len, frames)) == 2
        assert session._unsent_bytes == 0
        assert not session.broken.done()

    play(scene)


def test_a_control_stream_ends_after_what_is_owed_on_the_data_stream_is_sent() -> None:
    """It ended at once, which the proxy took for the loss of the engine: the last tokens of a request that an engine had still
    served while it shut down were an error to its client."""

    class Context:
        def __init__(self) -> None:
            self.written: list[pb.ControlDown] = []

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return ((SESSION_METADATA_KEY, "leaving"),)

        async def read(self) -> None:
            await asyncio.Event().wait()

        async def write(self, message: pb.ControlDown) -> None:
            self.written.append(message)

        def done(self) -> bool:
            return False

    async def scene(core: HeldCore, engine: Engine) -> None:
        sessions, context = engine.servicer._sessions, Context()
        session = sessions.open("leaving")
        control = asyncio.create_task(engine.servicer.Control(None, context))  # type: ignore[arg-type]
        while not context.written:
            await asyncio.sleep(0)
        engine.servicer.close()
        await asyncio.sleep(0.05)
        assert not control.done()
        sessions.close("leaving", session)
        await asyncio.wait_for(control, 5)

    play(scene)


def test_a_session_that_does_not_take_its_logprobs_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_UNSENT_BYTES", 100_000)
    alternatives = TokenLogprobs(token_ids=[1] * 50, logprobs=[0.0] * 50, rank=1)

    async def scene(core: HeldCore, engine: Engine) -> None:
        session = engine.servicer._sessions.open("stalled")
        # One delta, whatever its size, is no sign of it.
        session.put(ChoiceDelta(request_id="a", prompt_logprobs=[alternatives] * 100))
        assert not session.broken.done()
        session.put(ChoiceDelta(request_id="a", token_ids=[1]))
        assert session.broken.result() is Broken.NOT_DRAINED

    play(scene)


def test_a_ticket_that_was_never_sent_lets_its_offer_go() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        sessions = engine.servicer._sessions
        session = sessions.open("dying")
        engine.servicer._submission.submit(request("a", prefill_only=True), session)
        offer_id = core.added().offer_id
        await core.prefill()
        assert len(engine.table) == 0
        assert core.released() == []
        sessions.close("dying", session)
        assert core.released() == [offer_id]
        assert engine.offers.num_open == 0

    play(scene)


def test_a_ticket_that_was_sent_outlives_its_session() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        sessions = engine.servicer._sessions
        session = sessions.open("ending")
        engine.servicer._submission.submit(request("a", prefill_only=True), session)
        await core.prefill()
        (delta,) = await session.take()
        assert unseal(delta.ticket, MeshSecret(SECRET)).first_tokens == {0: [9]}
        session.written()
        sessions.close("ending", session)
        assert core.released() == []
        assert engine.offers.num_open == 1

    play(scene)


def test_a_drain_keeps_an_offer_until_nobody_is_left_to_fetch_it() -> None:
    class ToldLife(Life):
        def __init__(self) -> None:
            super().__init__()
            self.kept = asyncio.Event()

        def keeping(self) -> None:
            self.kept.set()

    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox, life = Inbox(), ToldLife()
        engine.servicer._submission.submit(request("a", prefill_only=True), inbox)
        draining = asyncio.create_task(engine.drain(600, life))
        await asyncio.sleep(0)
        # A request runs yet.
        assert not life.kept.is_set()
        await core.prefill()
        async with asyncio.timeout(10):
            await life.kept.wait()
            await asyncio.sleep(0.05)
            assert not draining.done()
            assert engine.offers.num_open == 1
            life.forsake()
            await draining
        assert core.released() == [core.added().offer_id]

    play(scene)


def test_an_offer_waits_for_its_last_choice_longer_than_a_lease() -> None:
    """Its lease ran before the proxy had a ticket to renew it with: the ticket was empty, and decode computed all anew."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox, clock = Inbox(), [time.monotonic()]
        engine.offers._clock = lambda: clock[0]
        made = request("a", prefill_only=True, choices=[0, 1], sampling={"n": 2})
        running = engine.servicer._submission.submit(made, inbox)
        await core.prefill()
        clock[0] += OFFER_LEASE_S + 1
        engine.handoff.renew("somebody else's")
        await core.say(deltas=[ChoiceDelta(request_id=running.core_id, choice=1, token_ids=[8])])
        assert unseal(inbox.deltas[-1].ticket, MeshSecret(SECRET)).first_tokens == {0: [9], 1: [8]}
        # From now on the proxy renews it, or nobody does.
        clock[0] += OFFER_LEASE_S + 1
        engine.handoff.renew("somebody else's")
        assert engine.offers.num_open == 0

    play(scene)


def test_a_stop_string_on_one_choice_of_a_prefill_leaves_the_others_ticket() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = Inbox()
        made = request("a", prefill_only=True, choices=[0, 1], sampling={"n": 2})
        running = engine.servicer._submission.submit(made, inbox)
        await core.prefill()
        engine.endings.abort_choice(running, 1)
        assert core.sent[-1] == Abort(request_id=running.core_id, choice=1)
        await core.say(deltas=[ChoiceDelta(request_id=running.core_id, choice=1, finish_reason="abort")])
        assert inbox.deltas[-1].ticket
        assert len(engine.table) == 0

    play(scene)


def test_a_dead_core_fails_what_runs_and_refuses_what_comes() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = Inbox()
        engine.servicer._submission.submit(request("a"), inbox)
        engine.core_died("killed by signal 9")
        assert [delta.error_code for delta in inbox.deltas] == ["PeerUnavailable"]
        assert not await engine.generator.healthy()
        with pytest.raises(Draining):
            engine.servicer._submission.submit(request("b"), inbox)

    play(scene)


def test_a_dead_core_runs_and_holds_nothing() -> None:
    """While its server drained, metrics and load said what had run last."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        busy = Stats(
            num_running=2, num_waiting=3, num_waiting_remote=4, num_waiting_tokens=5, num_blocks_used=6, num_blocks=8,
            num_offers_held=1, num_blocks_quarantined=2, num_lanes_used=1, steps=9,
        )  # fmt: skip
        await core.say(stats=busy)
        assert counted(engine, "vllm:num_requests_running") == 2
        engine.core_died("killed by signal 9")

        def held() -> set[float]:
            load = engine.board.report()
            names = (
                "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
                "vllm:kv_cache_usage_perc", "pdmesh_kv_blocks_used", "pdmesh_kv_blocks_quarantined", "pdmesh_offers_held",
                "pdmesh_kv_staging_lanes_used",
            )  # fmt: skip
            told = {load.num_running, load.num_waiting, load.num_waiting_tokens, load.kv_usage}
            return told | {counted(engine, name) for name in names}

        assert held() == {0}
        # What it had said before is read after its death: its counts are taken.
        await core.say(stats=msgspec.structs.replace(busy, steps=10))
        assert held() == {0}
        assert (counted(engine, "pdmesh_engine_steps_total"), counted(engine, "pdmesh_kv_blocks")) == (10, 8)
        assert engine.board.report().draining

    play(scene)


def test_a_defect_ends_the_request_that_met_it_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the session, and with it every request of that proxy."""

    async def scene(core: HeldCore, engine: Engine) -> None:
        session = engine.servicer._sessions.open("proxy")
        engine.servicer._submit(session, request_to_pb(request("before")))
        with monkeypatch.context() as patched:
            patched.setattr(engine.servicer._submission, "submit", lambda *arguments: [][0])
            engine.servicer._submit(session, request_to_pb(request("met", choices=[0, 1])))
        engine.servicer._submit(session, request_to_pb(request("after")))
        deltas = await session.take()
        assert [(each.request_id, each.choice, each.error_code) for each in deltas] == [
            ("met", 0, "InternalError"),
            ("met", 1, "InternalError"),
        ]
        assert not session.broken.done()
        assert len(engine.table) == 2
        assert counted(engine, "pdmesh_unexpected_errors_total", place="submit") == 1

    play(scene)


def test_a_streams_task_that_fails_is_told_unless_the_stream_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    class Context:
        is_done = False

        def done(self) -> bool:
            return self.is_done

    async def scene(core: HeldCore, engine: Engine) -> None:
        async def fail() -> None:
            raise ValueError("odd")

        context = Context()
        for context.is_done in (True, False):
            task = asyncio.create_task(fail())
            await asyncio.wait([task])
            await engine.servicer._end(context, task)  # type: ignore[arg-type]
        assert counted(engine, "pdmesh_unexpected_errors_total", place="stream") == 1
        assert caplog.text.count("ValueError: odd") == 1

    play(scene)


def test_extra_arguments_that_cannot_be_read_end_their_request_and_not_the_session() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        session = engine.servicer._sessions.open("s")
        bad, good = request_to_pb(request("bad")), request_to_pb(request("good"))
        bad.sampling.extra_args = b"\xc1"
        for message in (bad, good):
            engine.servicer._submit(session, message)
        [delta] = await session.take()
        assert (delta.request_id, delta.error_code, delta.error_param) == ("bad", "InvalidRequest", "vllm_xargs")
        assert core.added().request.token_ids == list(good.token_ids)

    play(scene)
