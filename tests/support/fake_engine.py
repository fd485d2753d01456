"""An engine that is a real gRPC server speaking the mesh's protocol, with made-up tokens and failures on demand.

Its tokens are a function of prompt, choice and all tokens before, so a proxy that resumes from the wrong place gives itself
away. Offers and tickets are real; "fetching" KV means asking the owner's offer table in this process.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import msgspec

from pdmesh.auth import AuthInterceptor
from pdmesh.errors import MeshError, PeerUnavailable, Preempted, TransferFailed
from pdmesh.grpc_options import GRPC_OPTIONS
from pdmesh.protocol import mesh_pb2 as pb
from pdmesh.protocol.capabilities import FIRST, NONE, Capabilities, capabilities_to_pb
from pdmesh.protocol.mesh_pb2_grpc import EngineServicer, add_EngineServicer_to_server
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest, TokenLogprobs
from pdmesh.protocol.ticket import Ticket, request_digest, seal, unseal
from pdmesh.protocol.version import PROTOCOL_VERSION
from pdmesh.protocol.wire import delta_to_pb, request_from_pb
from pdmesh.security import MeshSecret
from support.old_wire import OldWireServer

SECRET = MeshSecret("a-secret-for-the-fakes")
KV_BYTES = 4096
CACHED_TOKENS = 3


def next_token(prompt: Sequence[int], choice: int, before: Sequence[int]) -> int:
    """The one token that may follow."""
    return 100 + zlib.crc32(repr((list(prompt), choice, list(before))).encode()) % 400


def expected_tokens(prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
    """What a client must see, whatever happened to the engines."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(next_token(prompt, choice, tokens))
    return tokens


@dataclass
class Behaviour:
    """What goes wrong, and how fast things go. May be changed while the engine runs."""

    step_s: float = 0.0
    tokens_per_step: int = 1
    eos_after: int | None = None
    """The choice ends with `stop` at this many tokens."""
    die_after: int | None = None
    """The engine dies abruptly once a request has this many tokens; 0: when it arrives."""
    fail_after: int | None = None
    """Every leg fails once it has given so many tokens."""
    refuse: MeshError | None = None
    """Answer every request with this error."""
    refuse_fetch: MeshError | None = None
    """Answer every request that has a ticket with this error."""
    wrong_prefill: bool = False
    """Its prefill legs draw another token than they should, as from damaged KV."""
    recompute_fetch: bool = False
    hand_back_at: int | None = None
    """The first request that may be handed back is, once it has so many tokens."""
    answer_pings: bool = True
    heed_aborts: bool = True
    hold: asyncio.Event | None = None
    """Requests wait here before their first token."""
    fail_after_hold: MeshError | None = None


@dataclass
class Offers:
    """What the proxy did with this engine's offers."""

    open: dict[str, bytes] = field(default_factory=dict)
    renewed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class FakeEngine(EngineServicer):
    """Use as `async with`; `kill()` ends it like SIGKILL would."""

    everyone: dict[str, FakeEngine] = {}  # noqa: RUF012  (peer_id -> engine, how a decode reaches its prefill)

    def __init__(
        self,
        role: str,
        *,
        engine_id: str = "",
        port: int = 0,
        behaviour: Behaviour | None = None,
        model: str = "fake",
        model_fingerprint: str = "model-1",
        max_model_len: int = 4096,
        vocab_size: int = 512,
        connectors: Sequence[str] = ("shm", "grpc"),
        is_old: bool = False,
        pushes: bool = False,
        awaits: bool = False,
    ) -> None:
        """`is_old`: it speaks protocol version 1. `awaits`: as a prefill it is waited for, as a decode it waits."""
        self.behaviour = behaviour or Behaviour()
        self.port = port
        self.info = pb.EngineInfo(
            engine_id=engine_id or f"{role}-{secrets.token_hex(2)}",
            epoch=secrets.randbits(62),
            role=role,
            model=model,
            model_fingerprint=model_fingerprint,
            layout_fingerprints=["layout-1"],
            block_size=16,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            connectors=connectors,
            protocol_min=1,
            protocol_max=PROTOCOL_VERSION,
            version="0",
            max_num_batched_tokens=32,
            capabilities=capabilities_to_pb(
                Capabilities(push=FIRST if pushes else NONE, await_offer=FIRST if awaits else NONE)
            ),
        )
        self.expectations: list[pb.Expectation] = []
        self.drawn: dict[str, list[int]] = {}
        """First tokens by offer."""
        self._has_drawn = asyncio.Event()
        self.withdrawn: list[str] = []
        self._is_old = is_old
        self.requests: list[GenerateRequest] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.aborts: list[tuple[str, int]] = []
        self.stopped_choices: set[tuple[str, int]] = set()
        self.offers = Offers()
        self.num_sessions = 0
        self.num_pings = 0
        self.draining = False
        self.drain_ms = 0
        self.kv_usage = 0.0
        self._load_changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def engine_id(self) -> str:
        return self.info.engine_id

    @property
    def peer_id(self) -> str:
        return f"{self.info.engine_id}@{self.info.epoch}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=[AuthInterceptor(SECRET)])
        add_EngineServicer_to_server(self, OldWireServer(self._server) if self._is_old else self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        FakeEngine.everyone[self.peer_id] = self
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.kill()

    async def kill(self) -> None:
        FakeEngine.everyone.pop(self.peer_id, None)
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=None)
        for task in (*self.running.values(), *self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    def drain(self, within_ms: int = 0) -> None:
        self.draining, self.drain_ms = True, within_ms
        self._load_changed.set()

    def use(self, kv_usage: float) -> None:
        self.kv_usage = kv_usage
        self._load_changed.set()

    # ---- rpc -----------------------------------------------------------------------------------

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.EngineInfo:
        return self.info

    async def Generate(
        self, request_iterator: AsyncIterator[pb.SubmitFrame], context: Any
    ) -> AsyncIterator[pb.StepFrame]:
        frames: asyncio.Queue[pb.StepFrame] = asyncio.Queue()
        mine: list[str] = []
        self.num_sessions += 1

        async def read() -> None:
            async for frame in request_iterator:
                self.expectations += frame.expectations
                for message in frame.requests:
                    request = request_from_pb(message)
                    self.requests.append(request)
                    mine.append(request.request_id)
                    task = asyncio.create_task(self._serve(request, frames))
                    self.running[request.request_id] = task
                    task.add_done_callback(lambda _, id=request.request_id: self.running.pop(id, None))

        reader = self._keep(asyncio.create_task(read()))
        try:
            while True:
                yield await frames.get()
        finally:
            reader.cancel()
            for request_id in mine:
                if request_id in self.running:
                    self.running[request_id].cancel()

    async def Control(
        self, request_iterator: AsyncIterator[pb.ControlUp], context: Any
    ) -> AsyncIterator[pb.ControlDown]:
        downs: asyncio.Queue[pb.ControlDown] = asyncio.Queue()

        async def read() -> None:
            async for up in request_iterator:
                for abort in up.aborts:
                    self._abort(abort.request_id, abort.choice)
                self.withdrawn += up.withdraw_expectations
                for offer_id in up.release_offers:
                    self.offers.released.append(offer_id)
                    self.offers.open.pop(offer_id, None)
                self.offers.renewed.extend(up.renew_offers)
                ended = [offer_id for offer_id in up.renew_offers if offer_id not in self.offers.open]
                if up.ping and self.behaviour.answer_pings:
                    self.num_pings += 1
                    downs.put_nowait(pb.ControlDown(pong=up.ping, load=self._load(), ended_offers=ended))

        async def report() -> None:
            while True:
                await self._load_changed.wait()
                self._load_changed.clear()
                downs.put_nowait(pb.ControlDown(load=self._load()))

        tasks = [self._keep(asyncio.create_task(read())), self._keep(asyncio.create_task(report()))]
        try:
            while True:
                yield await downs.get()
        finally:
            for task in tasks:
                task.cancel()

    # ---- serving -------------------------------------------------------------------------------

    async def _serve(self, request: GenerateRequest, frames: asyncio.Queue[pb.StepFrame]) -> None:
        behaviour = self.behaviour
        error = behaviour.refuse or (behaviour.refuse_fetch if request.ticket or request.awaits else None)
        if error is not None:
            frames.put_nowait(self._frame(request, _error_delta(request, error)))
            return
        if request.awaits is not None:
            owner = FakeEngine.everyone[request.awaits.owner_id]
            request = msgspec.structs.replace(request, emitted=[await owner.first_tokens(request.awaits.offer_id)])
        if behaviour.die_after == 0:
            self._die()
            return
        if behaviour.hold is not None:
            await behaviour.hold.wait()
            if behaviour.fail_after_hold is not None:
                frames.put_nowait(self._frame(request, _error_delta(request, behaviour.fail_after_hold)))
                return
        try:
            facts = self._fetch(request) if request.ticket or request.awaits else {"cached_tokens": CACHED_TOKENS}
        except MeshError as failed:
            frames.put_nowait(self._frame(request, _error_delta(request, failed)))
            return
        if request.ticket or request.awaits:
            committed = ChoiceDelta(request_id=request.request_id, choice=request.choices[0], kv_committed=True)
            frames.put_nowait(self._frame(request, committed))
        await self._steps(request, frames, facts)

    async def _steps(
        self, request: GenerateRequest, frames: asyncio.Queue[pb.StepFrame], facts: dict[str, Any]
    ) -> None:
        emitted = request.emitted or [[] for _ in request.choices]
        tokens = {choice: list(before) for choice, before in zip(request.choices, emitted, strict=True)}
        open_ = set(request.choices)
        num_given = 0
        while open_:
            await asyncio.sleep(self.behaviour.step_s)
            deltas: list[ChoiceDelta] = []
            for choice in sorted(open_):
                if (request.request_id, choice) in self.stopped_choices:
                    open_.discard(choice)
                    continue
                new, reason = self._advance(request, choice, tokens[choice])
                num_given += len(new)
                deltas.append(self._delta(request, choice, new, reason, facts))
                facts = {}
                if reason or request.prefill_only:
                    open_.discard(choice)
            if request.prefill_only and not all(delta.finish_reason for delta in deltas):
                deltas[-1] = self._with_ticket(request, deltas[-1], tokens)
            if deltas:
                frames.put_nowait(self._frame(request, *deltas))
            hand_back_at = self.behaviour.hand_back_at
            if request.hand_back and hand_back_at is not None and len(tokens[request.choices[0]]) >= hand_back_at:
                self.behaviour.hand_back_at = None
                frames.put_nowait(self._frame(request, _error_delta(request, Preempted("no room"))))
                return
            fail_after = self.behaviour.fail_after
            if fail_after is not None and num_given >= fail_after:
                frames.put_nowait(self._frame(request, _error_delta(request, PeerUnavailable("a core that came back"))))
                return
            die_after = self.behaviour.die_after
            if die_after is not None and max(map(len, tokens.values())) >= die_after:
                await asyncio.sleep(0.02)
                self._die()
                return

    def _advance(self, request: GenerateRequest, choice: int, tokens: list[int]) -> tuple[list[int], str]:
        new: list[int] = []
        for _ in range(1 if request.prefill_only else self.behaviour.tokens_per_step):
            if request.sampling.max_tokens > len(tokens):
                is_wrong = self.behaviour.wrong_prefill and request.prefill_only
                new.append(next_token(request.token_ids, choice, tokens) ^ is_wrong)
                tokens.append(new[-1])
            if self.behaviour.eos_after is not None and len(tokens) >= self.behaviour.eos_after:
                return new, "stop"
            if len(tokens) >= request.sampling.max_tokens:
                return new, "length"
        return new, ""

    def _delta(
        self, request: GenerateRequest, choice: int, new: list[int], reason: str, facts: dict[str, Any]
    ) -> ChoiceDelta:
        wants_logprobs, wants_prompt = request.sampling.logprobs, request.sampling.prompt_logprobs
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if facts and wants_prompt is not None:
            prompt_logprobs = [None, *[_logprobs(token) for token in request.token_ids[1:]]]
        return ChoiceDelta(
            request_id=request.request_id,
            choice=choice,
            token_ids=new,
            logprobs=[_logprobs(token) for token in new] if wants_logprobs is not None else [],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            **facts,
        )

    def _with_ticket(self, request: GenerateRequest, delta: ChoiceDelta, tokens: dict[int, list[int]]) -> ChoiceDelta:
        offer_id = request.offer_id or secrets.token_hex(8)
        digest = request_digest(request.token_ids, cache_salt=request.cache_salt)
        self.offers.open[offer_id] = digest
        ticket = Ticket(
            offer_id=offer_id,
            engine_id=self.info.engine_id,
            epoch=self.info.epoch,
            address=self.address,
            digest=digest,
            groups=[],
            num_tokens=len(request.token_ids),
            layout_fingerprints=list(self.info.layout_fingerprints),
            model_fingerprint=self.info.model_fingerprint,
            first_tokens={choice: tokens[choice] for choice in request.choices},
        )
        self.drawn[offer_id] = tokens[request.choices[0]]
        self._has_drawn.set()
        return ChoiceDelta(**{**_fields(delta), "ticket": seal(ticket, SECRET)})

    async def first_tokens(self, offer_id: str) -> list[int]:
        while offer_id not in self.drawn:
            self._has_drawn.clear()
            await self._has_drawn.wait()
        return self.drawn[offer_id]

    def _fetch(self, request: GenerateRequest) -> dict[str, Any]:
        if request.awaits is not None:
            return {"kv_source": "shm", "kv_bytes": KV_BYTES, "cached_tokens": len(request.token_ids)}
        ticket = unseal(request.ticket, SECRET)
        assert ticket.digest == request_digest(request.token_ids, cache_salt=request.cache_salt)
        owner = FakeEngine.everyone.get(ticket.peer_id)
        if owner is not None and ticket.offer_id in owner.offers.open and not self.behaviour.recompute_fetch:
            return {"kv_source": "shm", "kv_bytes": KV_BYTES, "cached_tokens": ticket.num_tokens}
        if self.behaviour.recompute_fetch:
            return {"kv_source": "recompute:peer_lost"}
        raise TransferFailed("expired: the offer is not there")

    def _frame(self, request: GenerateRequest, *deltas: ChoiceDelta) -> pb.StepFrame:
        return pb.StepFrame(deltas=map(delta_to_pb, deltas))

    def _abort(self, request_id: str, choice: int) -> None:
        self.aborts.append((request_id, choice))
        if not self.behaviour.heed_aborts:
            return
        if choice >= 0:
            self.stopped_choices.add((request_id, choice))
        elif request_id in self.running:
            self.running[request_id].cancel()

    def _die(self) -> None:
        self._keep(asyncio.create_task(self.kill()))

    def _load(self) -> pb.LoadReport:
        return pb.LoadReport(
            num_running=len(self.running),
            draining=self.draining,
            epoch=self.info.epoch,
            kv_usage=self.kv_usage,
            drain_remaining_ms=self.drain_ms,
        )

    def _keep(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _error_delta(request: GenerateRequest, error: MeshError) -> ChoiceDelta:
    return ChoiceDelta(
        request_id=request.request_id,
        choice=request.choices[0],
        finish_reason="error",
        error_code=error.code,
        error_message=error.message,
        error_param=error.param or "",
    )


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token], logprobs=[-0.5], rank=1)


def _fields(delta: ChoiceDelta) -> dict[str, Any]:
    return {name: getattr(delta, name) for name in delta.__struct_fields__}
