"""Owns every request from arrival to end, on every path: prefill leg, hand-over, decode leg, and whatever goes wrong between.

`MeshGenerator.generate` is the request's straight line. A leg that fails in a way another engine may not is replaced by a
leg that goes on after the tokens already shown, so that a client sees time pass but no seam.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Iterator

from pdmesh.errors import (
    RETRY_AFTER_S,
    Draining,
    EngineFault,
    HandshakeRefused,
    InvalidRequest,
    MeshError,
    Overloaded,
    PeerUnavailable,
    Preempted,
    TransferFailed,
)
from pdmesh.openai.generator import Generator, ModelCard, TokenRequest
from pdmesh.protocol.exchange import KVNames
from pdmesh.protocol.messages import AwaitedOffer, ChoiceDelta
from pdmesh.protocol.pushes import new_offer_id
from pdmesh_proxy.cluster import Cluster
from pdmesh_proxy.config import ProxyConfig
from pdmesh_proxy.early_legs import EarlyEnd, EarlyLeg, may_go_early
from pdmesh_proxy.legs import Fallback, LegKind
from pdmesh_proxy.metrics import ProxyMetrics
from pdmesh_proxy.prefix_index import PrefixIndex
from pdmesh_proxy.pushes import HeldExpectation, expect, pays
from pdmesh_proxy.router import DEGRADED, Decision, Reason, has_help, route, why_too_long
from pdmesh_proxy.running import RunningRequest
from pdmesh_proxy.stream import Leg
from pdmesh_proxy.view import EngineView

log = logging.getLogger(__name__)

# What nginx counts for a client that closed its connection; no such status is ever sent.
STATUS_CLIENT_LEFT = 499
STATUS_TRY_LATER = 503
STATUS_DEFECT = 500


class MeshGenerator(Generator):
    """Serves token requests with the engines of a cluster."""

    def __init__(self, cluster: Cluster, *, config: ProxyConfig, metrics: ProxyMetrics) -> None:
        self._cluster, self._config, self._metrics = cluster, config, metrics
        self._created_s = int(time.time())
        self._index = PrefixIndex(config.prefix_index_entries)
        self._running: dict[str, RunningRequest] = {}
        self._emptied = asyncio.Event()
        self._retired = self._draining = False

    async def generate(self, request: TokenRequest) -> AsyncIterator[ChoiceDelta]:
        with self._admitted(request) as run:
            while run.unfinished:
                if (early := run.take_early()) is not None:
                    kind, engine, going = LegKind.DECODE, early.engine, self._going_on(run, early)
                else:
                    decision = await self._route(run)
                    kind, engine = self._plan(run, decision)
                    going = self._leg(run, kind, engine, decision)
                try:
                    with going as leg:
                        async for deltas in leg:
                            for delta in deltas:
                                shown = self._accept(run, delta)
                                if shown is not None:
                                    yield shown
                    if kind is LegKind.PREFILL:
                        run.prefilled, run.wants_prefill = True, False
                except MeshError as error:
                    self._retry_or_raise(run, kind, engine, error)

    async def card(self) -> ModelCard:
        """Describe the model; just after a start, when the engines have been heard."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.engine_wait_timeout_s):
                while self._cluster.looking:
                    await self._cluster.changed()
        return self._cluster.card(self._created_s)

    async def abort_choice(self, request_id: str, choice: int) -> None:
        if (run := self._running.get(request_id)) is not None:
            run.stop_choice(choice)

    async def problem(self) -> str:
        if self._retired:
            return "the proxy is shutting down"
        return "" if self._cluster.serving else self._cluster.why_none(None) or "no engine takes requests"

    def retire(self) -> None:
        """Say that new requests should go elsewhere; those that come all the same are served."""
        self._retired = True

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; wait for what runs, then end the rest with an error that says so."""
        self._retired = self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_empty()
        for run in self._running.values():
            # `timeout_s` is what the server's own wait has left of it.
            had_s = self._config.drain_timeout_s
            run.fail(Draining(f"the proxy shut down; the request had {had_s:g} s to end"))
        with contextlib.suppress(TimeoutError):
            # Enough for the error to reach clients that read.
            async with asyncio.timeout(1.0):
                await self._wait_empty()

    # ---- in the order of a request's life ------------------------------------------------------

    @contextlib.contextmanager
    def _admitted(self, request: TokenRequest) -> Iterator[RunningRequest]:
        """Own a request: refuse it, or count it in, and count it out however it ends."""
        self._check_admissible(request)
        self._cluster.expect_requests()
        run = self._running[request.request_id] = RunningRequest(request, self._metrics)
        run.prefix_keys = self._index.keys(request.token_ids, request.cache_salt)
        run.cached_on = self._index.cached_tokens(run.prefix_keys)
        self._metrics.in_flight.inc()
        self._metrics.prompt_tokens.inc(len(request.token_ids))
        status = STATUS_CLIENT_LEFT
        try:
            yield run
        except MeshError as error:
            status = error.status
            error.request_id = request.request_id
            if status == STATUS_TRY_LATER and error.retry_after_s is None:
                error.retry_after_s = RETRY_AFTER_S
            raise
        except Exception:
            status = STATUS_DEFECT
            raise
        finally:
            if not run.unfinished:
                status = 200
            elif status == STATUS_CLIENT_LEFT:
                self._metrics.disconnects.inc()
            self._ended(run, status)

    def _check_admissible(self, request: TokenRequest) -> None:
        if request.kv_transfer_params is not None:
            raise InvalidRequest("kv_transfer_params is not accepted from clients", param="kv_transfer_params")
        if request.request_id in self._running:
            raise InvalidRequest(f"a request with id {request.request_id} is running", param="request_id")
        if self._draining:
            raise Draining("the proxy is shutting down", retry_after_s=RETRY_AFTER_S)
        if len(self._running) >= self._config.max_concurrent_requests:
            raise Overloaded(f"{len(self._running)} requests are in flight already", retry_after_s=RETRY_AFTER_S)

    async def _route(self, run: RunningRequest) -> Decision:
        """Choose the next engine, waiting a while for one to come when there is none."""
        until_s = asyncio.get_running_loop().time() + self._config.engine_wait_timeout_s
        while True:
            if run.final_error is not None:
                raise run.final_error
            model = self._model_of(run)
            view = self._cluster.view(model)
            decision = route(run.facts(), view, pd_min_prompt_tokens=self._config.pd_min_prompt_tokens)
            if decision is not None:
                run.model = model
                run.trace.model_fingerprint = "" if model is None else model.model_fingerprint
                return decision
            if isinstance(run.last_error, Overloaded | EngineFault):
                # Every engine that could take it is full, or failed at it: waiting here would only move the queue.
                raise run.last_error
            if not await run.wait(self._cluster.changed(), until_s):
                why = self._cluster.why_none(model) or why_too_long(run.facts(), view)
                if why or run.last_error is None:
                    raise PeerUnavailable(why or "no engine can take the request", retry_after_s=RETRY_AFTER_S)
                raise run.last_error

    def _model_of(self, run: RunningRequest) -> KVNames | None:
        """The model that may go on with a request: what it began with, and while nothing came of that the mesh's."""
        return run.model if run.is_bound else self._cluster.model_named(run.request.model_fingerprint)

    def _plan(self, run: RunningRequest, decision: Decision) -> tuple[LegKind, EngineView]:
        """Turn a decision into a leg, and count what was meant to be otherwise."""
        if decision.reason is not Reason.HANDOFF and run.unchecked:
            # Decode may have died of nothing else, or behind KV that it had found damaged, and nobody will fetch that again.
            run.doubts.doubt(run.emitted, run.unfinished)
        run.unchecked = False
        if not run.started:
            run.trace.reason, run.trace.why = decision.reason, decision.why
            run.trace.prefill = run.trace.decode = ""
        if decision.prefill is not None:
            run.disaggregating = decision.reason in (Reason.DISAGGREGATED, Reason.PREEMPTED)
            run.kv_settled = False
            run.expect(self._expectation(run, decision))
            return LegKind.PREFILL, decision.prefill
        assert decision.decode is not None
        if decision.reason is Reason.HANDOFF:
            run.need_offer()
            return LegKind.DECODE, decision.decode
        self._count_fallback(run, decision.reason)
        run.release_offer()
        return LegKind.WHOLE, decision.decode

    def _expectation(self, run: RunningRequest, decision: Decision) -> HeldExpectation | None:
        """Have the prompt pushed to decode while prefill computes it, where that pays."""
        if not pays(run.facts(), decision, min_chunks=self._config.push_min_chunks) or decision.decode is None:
            return None
        try:
            _, session = self._cluster.session(decision.decode)
        except PeerUnavailable:
            return None
        request = run.request
        return expect(session, decision, request.token_ids, cache_salt=request.cache_salt, remaining_s=run.remaining_s)

    def _count_fallback(self, run: RunningRequest, reason: Reason) -> None:
        if reason in DEGRADED:
            run.fall_back(Fallback(reason))
        elif run.disaggregating and not run.kv_settled:
            run.fall_back(Fallback.NO_TICKET if run.last_error is None else Fallback.LEG_FAILED)
        run.disaggregating = False

    @contextlib.contextmanager
    def _leg(self, run: RunningRequest, kind: LegKind, engine: EngineView, decision: Decision) -> Iterator[Leg]:
        endpoint, session = self._cluster.session(engine)
        offer_id, goes_early = "", kind is LegKind.PREFILL and self._goes_early(run, decision)
        if kind is LegKind.PREFILL and (run.expectation is not None or goes_early):
            offer_id = new_offer_id() if run.expectation is None else run.expectation.offer_id
        request = run.next_leg_request(kind, has_help=self._has_help(run), offer_id=offer_id)
        with endpoint.judged(session), session.submit(request) as leg:
            leg.may_move = lambda: self._could_move(run, engine)
            run.begin(kind, engine, endpoint, leg)
            if goes_early:
                run.early = self._early_leg(run, decision, offer_id)
            yield leg

    @contextlib.contextmanager
    def _going_on(self, run: RunningRequest, early: EarlyLeg) -> Iterator[Leg]:
        """Go on with a decode leg that was sent before."""
        run.need_offer()
        with early.endpoint.judged(early.session), early.leg as leg:
            leg.may_move = lambda: self._could_move(run, early.engine)
            run.begin(LegKind.DECODE, early.engine, early.endpoint, leg)
            yield leg

    def _goes_early(self, run: RunningRequest, decision: Decision) -> bool:
        return self._config.early_decode and may_go_early(run.facts(), decision, num_choices=run.request.sampling.n)

    def _early_leg(self, run: RunningRequest, decision: Decision, offer_id: str) -> EarlyLeg | None:
        """Send decode its leg now; None when it takes none."""
        prefill, decode = decision.prefill, decision.decode
        assert prefill is not None
        assert decode is not None
        awaits = AwaitedOffer(offer_id=offer_id, owner_id=prefill.peer_id, owner_address=prefill.address)
        try:
            endpoint, session = self._cluster.session(decode)
            leg = session.submit(run.next_leg_request(LegKind.DECODE, has_help=self._has_help(run), awaits=awaits))
        except MeshError:
            return None
        # Moving it costs nothing: nobody has seen anything of it.
        leg.may_move = lambda: True
        return EarlyLeg(engine=decode, endpoint=endpoint, session=session, leg=leg)

    def _has_help(self, run: RunningRequest) -> bool:
        return run.may_be_handed_back and has_help(run.facts(), self._cluster.view(self._model_of(run)))

    def _could_move(self, run: RunningRequest, engine: EngineView) -> bool:
        """Whether another engine than this one could go on with a request now."""
        facts = dataclasses.replace(run.facts(), excluded=frozenset(run.excluded | {engine.session_id}))
        view = self._cluster.view(self._model_of(run))
        decision = route(facts, view, pd_min_prompt_tokens=self._config.pd_min_prompt_tokens)
        return decision is not None and run.final_error is None

    def _accept(self, run: RunningRequest, delta: ChoiceDelta) -> ChoiceDelta | None:
        current = run.current
        assert current is not None
        computed_here = not current.answered and current.kind is not LegKind.DECODE
        if computed_here or delta.kv_committed:
            self._index.record(run.prefix_keys, current.engine.peer_id)
        if delta.ticket:
            if (offer := current.leg.take_offer()) is not None:
                run.hold(offer, current.endpoint)
            if run.wants_prefill:
                run.note_return("prefill")
        return run.accept(delta)

    def _retry_or_raise(self, run: RunningRequest, kind: LegKind, engine: EngineView, error: MeshError) -> None:
        """Prepare the next attempt after a leg failed, or end the request with the leg's error."""
        run.drop_early()
        overflowed = run.current is not None and run.current.leg.overflowed
        if overflowed:
            self._metrics.buffer_overflows.inc()
        if run.final_error is not None or overflowed or not error.retryable:
            raise run.final_error or error
        if isinstance(error, Preempted) and run.may_be_handed_back:
            # Nobody failed. The engine that gave it up may be the one that takes it again.
            run.hand_back()
            return
        is_hand_over = isinstance(error, TransferFailed | HandshakeRefused)
        is_corrupt = isinstance(error, TransferFailed) and error.is_corrupt
        if run.waited_in_vain and is_hand_over and not is_corrupt:
            # Decode is asked with the ticket: then its own policy says what becomes of KV that is not to be had.
            self._metrics.early_legs.labels(EarlyEnd.FAILED).inc()
            if run.offer is None or not run.offer.live:
                # Nobody will be asked who could say so.
                run.trace.fallbacks.append(f"{kind}:{error.message.partition(':')[0]}")
            return
        run.forgive()
        # An engine that shuts down has not failed, and is not asked again.
        if not isinstance(error, Draining):
            if run.num_retries >= self._config.max_retries:
                raise error
            run.num_retries += 1
        run.last_error = error
        self._metrics.retries.labels(error.code).inc()
        run.trace.fallbacks.append(f"{kind}:{error.code}")
        log.warning("%s leg on %s failed, going on elsewhere: %s", kind, engine.engine_id, error.message)
        run.unchecked = kind is LegKind.DECODE and not run.kv_settled and not is_hand_over
        if kind is LegKind.DECODE and is_hand_over:
            # The engine is well, the hand-over was not: it may compute the prompt itself.
            if is_corrupt:
                run.doubts.doubt(run.emitted, run.unfinished)
            run.release_offer()
        else:
            run.excluded.add(engine.session_id)

    def _ended(self, run: RunningRequest, status: int) -> None:
        run.close()
        del self._running[run.request.request_id]
        if not self._running:
            self._emptied.set()
        if run.emitted[0] and run.current is not None and run.current.kind is not LegKind.PREFILL:
            keys = self._index.keys(run.request.token_ids + run.emitted[0], run.request.cache_salt)
            self._index.record(keys, run.current.engine.peer_id)
        self._metrics.in_flight.dec()
        self._metrics.cached_tokens.inc(run.trace.cached_tokens)
        self._metrics.requests.labels(status, run.trace.reason or "none").inc()

    async def _wait_empty(self) -> None:
        while self._running:
            self._emptied.clear()
            await self._emptied.wait()
