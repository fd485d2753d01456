"""The server's parts with the core's end of the messages held by the test, so that every order of events can be played."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdmesh.config import EngineConfig
from pdmesh.connector.peers import PeerDirectory
from pdmesh.connector.pool import KVPool, PoolShape, create_pool_file, size_pool_file
from pdmesh.engine.messages import (
    Abort,
    AddRequest,
    CoreReady,
    OfferSealed,
    ReleaseOffer,
    Stats,
    StepOutput,
    ToCore,
)
from pdmesh.engine.server import sessions as sessions_module
from pdmesh.engine.server.assembly import Engine, assemble
from pdmesh.engine.server.core_peers import CorePeers
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.requests import Sink
from pdmesh.engine.server.sessions import Broken
from pdmesh.errors import Draining, InvalidRequest, Overloaded
from pdmesh.protocol.messages import ChoiceDelta, GroupBlocks
from pdmesh.protocol.ticket import unseal
from pdmesh.security import MeshSecret
from support.engines import SECRET, request

READY = CoreReady(
    model_fingerprint="model",
    layout_fingerprints=["layout"],
    block_size=16,
    num_blocks=8,
    block_bytes=64,
    max_model_len=1024,
    vocab_size=400,
    eos_token_ids=[1],
    connectors={},
    dtype="float32",
    backend="none",
    row_invariant=True,
)


class HeldCore:
    """The core's end: what was sent to it, and what the test lets it say."""

    ready = READY

    def __init__(self) -> None:
        self.sent: list[ToCore] = []
        self._said: asyncio.Queue[StepOutput] = asyncio.Queue()

    def send(self, message: ToCore) -> None:
        self.sent.append(message)

    async def outputs(self) -> AsyncIterator[StepOutput]:
        while True:
            yield await self._said.get()

    async def say(self, **fields: Any) -> None:
        self._said.put_nowait(StepOutput(**fields))
        await asyncio.sleep(0.01)

    def added(self) -> AddRequest:
        """The latest request."""
        return next(message for message in reversed(self.sent) if isinstance(message, AddRequest))

    def released(self) -> list[str]:
        return [message.offer_id for message in self.sent if isinstance(message, ReleaseOffer)]

    async def prefill(self, *, finish_reason: str = "") -> None:
        """Seal the latest request's offer and give its first token."""
        added = self.added()
        blocks = GroupBlocks(group=0, block_ids=[0, 1, 2], generations=[5, 5, 5])
        await self.say(
            sealed=[OfferSealed(offer_id=added.offer_id, request_id="", groups=[blocks], num_tokens=40)],
            deltas=[ChoiceDelta(request_id=added.request.request_id, token_ids=[9], finish_reason=finish_reason)],
        )


class Inbox(Sink):
    def __init__(self) -> None:
        self.deltas: list[ChoiceDelta] = []

    def put(self, delta: ChoiceDelta) -> None:
        self.deltas.append(delta)


@asynccontextmanager
async def _engine(core: HeldCore, **settings: Any) -> AsyncIterator[Engine]:
    identity = Identity(engine_id="engine", role="prefill", model_name="m", address="127.0.0.1:1")
    fd = create_pool_file("test")
    shape = PoolShape(READY.num_blocks, READY.block_bytes)
    size_pool_file(fd, shape)
    pool = KVPool(fd, shape, writable=False)
    core_peers = CorePeers(core)
    secret = MeshSecret(SECRET)
    async with (
        PeerDirectory(
            identity.peer_id, secret, ["shm"], "model", ["layout"], core_peers.attach, core_peers.detach
        ) as peers,
        asyncio.TaskGroup() as tasks,
    ):
        engine = assemble(
            config=EngineConfig(**settings),
            identity=identity,
            secret=secret,
            core=core,  # type: ignore[arg-type]
            pool=pool,
            core_peers=core_peers,
            peers=peers,
            tasks=tasks,
        )
        running = [tasks.create_task(engine.outputs.run(core)), tasks.create_task(engine.handoff.owner.run())]  # type: ignore[arg-type]
        yield engine
        for task in running:
            task.cancel()
    pool.close()
    os.close(fd)


def _play(scene: Callable[[HeldCore, Engine], Awaitable[None]], **settings: Any) -> None:
    async def body() -> None:
        core = HeldCore()
        async with _engine(core, **settings) as engine:
            await scene(core, engine)

    asyncio.run(body())


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

    _play(scene, max_num_queued_reqs=2)


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

    _play(scene)


def test_a_session_that_does_not_drain_is_broken_and_its_requests_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_UNSENT_DELTAS", 10)

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

    _play(scene)


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

    _play(scene)


def test_a_ticket_that_was_sent_outlives_its_session() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        sessions = engine.servicer._sessions
        session = sessions.open("ending")
        engine.servicer._submission.submit(request("a", prefill_only=True), session)
        await core.prefill()
        (delta,) = await session.take()
        assert unseal(delta.ticket, MeshSecret(SECRET)).first_tokens == {0: [9]}
        sessions.close("ending", session)
        assert core.released() == []
        assert engine.offers.num_open == 1

    _play(scene)


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

    _play(scene)


def test_a_dead_core_fails_what_runs_and_refuses_what_comes() -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        inbox = Inbox()
        engine.servicer._submission.submit(request("a"), inbox)
        engine.core_died("killed by signal 9")
        assert [delta.error_code for delta in inbox.deltas] == ["PeerUnavailable"]
        assert not await engine.generator.healthy()
        with pytest.raises(Draining):
            engine.servicer._submission.submit(request("b"), inbox)

    _play(scene)
