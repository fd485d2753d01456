"""This engine behind its own OpenAI port: the whole request here, or one leg of vLLM's stock prefill/decode flow."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from pdmesh.engine.messages import CoreReady
from pdmesh.engine.server.endings import Endings
from pdmesh.engine.server.handoff import Handoff
from pdmesh.engine.server.heart import Heart
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.kv_probe import KVProbe
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.outputs import RETURNED
from pdmesh.engine.server.requests import RunningRequest, Sink
from pdmesh.engine.server.submission import StockLeg, Submission
from pdmesh.engine.server.transfer_params import check_prompt, named_source, parse, remote_kv
from pdmesh.engine.server.unread_offers import UnreadOffers
from pdmesh.errors import Forbidden, MeshError, Overloaded, from_code
from pdmesh.openai.generator import DIRECT, Generator, ModelCard, TokenRequest, Trace
from pdmesh.protocol.messages import ChoiceDelta, GenerateRequest

# A client that reads nothing while this many deltas arrive is gone or hopeless.
MAX_UNREAD_DELTAS = 16384
# Parameters wait here between a request's last delta and its answer's last byte.
MAX_KEPT_PARAMS = 1024


class LocalGenerator(Generator):
    """Generates with the core of this process's engine."""

    def __init__(
        self,
        *,
        identity: Identity,
        root: str,
        ready: CoreReady,
        submission: Submission,
        endings: Endings,
        handoff: Handoff,
        board: LoadBoard,
        takes_params: bool,
        heart: Heart,
        probe: KVProbe,
        unread: UnreadOffers,
    ) -> None:
        """`takes_params`: whether whoever reaches the HTTP port may hand over by `kv_transfer_params`."""
        self._identity = identity
        self._takes_params = takes_params
        self._card = ModelCard(
            name=identity.model_name,
            root=root,
            max_model_len=ready.max_model_len,
            created_s=int(time.time()),
            vocab_size=ready.vocab_size,
        )
        self._submission = submission
        self._endings = endings
        self._handoff = handoff
        self._board = board
        self._heart = heart
        self._probe = probe
        self._unread = unread
        self._running: dict[str, RunningRequest] = {}
        self._params: OrderedDict[str, dict[str, object]] = OrderedDict()
        self.core_alive = True
        """Cleared by the service when the core is gone."""

    async def card(self) -> ModelCard:
        return self._card

    async def problem(self) -> str:
        if not self.core_alive:
            return "the engine core died"
        if self._board.draining:
            return "the engine is shutting down"
        if not await self._heart.beats():
            return "the engine core does not answer"
        return self._probe.problem

    async def generate(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        if request.kv_transfer_params is not None and not self._takes_params:
            raise Forbidden(
                "kv_transfer_params at an engine that other machines can reach needs --api-key",
                param="kv_transfer_params",
            )
        inbox, is_traced = _Inbox(), False
        try:
            leg = _stock_leg(request)
            running = self._submission.submit(_engine_request(request), inbox, leg)
        except MeshError as exc:
            # What may be tried again, at another decode, still needs its KV.
            if not exc.retryable:
                self.refused(request.kv_transfer_params or {})
            raise
        self._running[request.request_id] = running
        try:
            async for delta in inbox.deltas(running):
                if delta.error_code:
                    raise from_code(
                        delta.error_code, delta.error_message, delta.error_param or None, request.request_id
                    )
                if delta.kv_source.startswith(RETURNED):
                    request.trace.preempted.append(delta.kv_source.removeprefix(RETURNED))
                if not is_traced:
                    self._fill(request.trace, running, leg)
                    # Nothing of it changes once there is a token.
                    is_traced = bool(delta.token_ids)
                    if is_traced and leg.remote is not None:
                        self._unread.leg_answered(leg.remote, running.kv_source, running.digest)
                if delta.token_ids or delta.finish_reason:
                    yield delta
            if leg.offer:
                self._keep_params(request.request_id, running)
        except BaseException as exc:
            if leg.offer:
                self._handoff.release(running.offer_id)
            if leg.remote is not None and running.first_token_s is None:
                self._unread.leg_ended(leg.remote, exc, running.digest)
            raise
        finally:
            if self._running.get(request.request_id) is running:
                del self._running[request.request_id]
            # Changes nothing when it has ended.
            self._endings.abort(running)

    async def abort_choice(self, request_id: str, choice: int) -> None:
        running = self._running.get(request_id)
        if running is not None:
            self._endings.abort_choice(running, choice)
            running.sink.put(ChoiceDelta(request_id=request_id, choice=choice))

    def transfer_params(self, request_id: str) -> dict[str, object] | None:
        return self._params.pop(request_id, None)

    def refused(self, params: dict[str, object]) -> None:
        if self._takes_params and (remote := named_source(params)) is not None:
            self._unread.let_go(remote)

    def _keep_params(self, request_id: str, running: RunningRequest) -> None:
        params = self._handoff.params(running)
        if params is not None:
            self._params[request_id] = params
            while len(self._params) > MAX_KEPT_PARAMS:
                self._params.popitem(last=False)

    def _fill(self, trace: Trace, running: RunningRequest, leg: StockLeg) -> None:
        """Complete the debug header's facts as they become known."""
        if leg.offer:
            trace.prefill = self._identity.engine_id
        else:
            trace.decode = self._identity.engine_id
        if leg.remote is not None:
            trace.prefill = leg.remote.engine_id
        trace.reason = "kv_transfer_params" if leg.offer or leg.remote is not None else DIRECT
        trace.cached_tokens = running.num_cached
        trace.kv_source = running.kv_source
        trace.kv_bytes = running.kv_bytes


class _Inbox(Sink):
    """One request's deltas between the core's outputs and whoever iterates."""

    def __init__(self) -> None:
        self._deltas: deque[ChoiceDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._overflowed = False

    def put(self, delta: ChoiceDelta) -> None:
        if len(self._deltas) < MAX_UNREAD_DELTAS:
            self._deltas.append(delta)
        else:
            self._overflowed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def deltas(self, running: RunningRequest) -> AsyncIterator[ChoiceDelta]:
        """Yield until every choice has ended. The request's deadline bounds each wait: it ends in an error delta."""
        while running.open_choices or self._deltas:
            if self._overflowed:
                raise Overloaded(f"the client read nothing while {MAX_UNREAD_DELTAS} deltas arrived")
            if self._deltas:
                yield self._deltas.popleft()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None


def _stock_leg(request: TokenRequest) -> StockLeg:
    if not request.kv_transfer_params:
        return StockLeg()
    params = parse(request.kv_transfer_params)
    check_prompt(params, request.token_ids)
    if params.do_remote_prefill:
        return StockLeg(remote=remote_kv(params))
    return StockLeg(offer=bool(params.do_remote_decode))


def _engine_request(request: TokenRequest) -> GenerateRequest:
    return GenerateRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=request.sampling,
        choices=list(range(request.sampling.n)),
        cache_salt=request.cache_salt,
        priority=request.priority,
        deadline_s=request.deadline_s,
    )
