"""One request while the proxy owns it: what was emitted, which choices go on, which offer is held, what is left of its time."""

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from pdmesh.errors import DeadlineExceeded, MeshError
from pdmesh.openai.generator import TokenRequest
from pdmesh.protocol.exchange import KVNames
from pdmesh.protocol.messages import AwaitedOffer, ChoiceDelta, GenerateRequest
from pdmesh_proxy.doubts import Doubts
from pdmesh_proxy.early_legs import EarlyEnd, EarlyLeg
from pdmesh_proxy.endpoint import Endpoint
from pdmesh_proxy.legs import STAGE_OF_FIRST_TOKEN, Fallback, LegKind
from pdmesh_proxy.metrics import ProxyMetrics, Stage
from pdmesh_proxy.offers import HeldOffer
from pdmesh_proxy.pushes import HeldExpectation
from pdmesh_proxy.router import RequestFacts
from pdmesh_proxy.stream import Leg
from pdmesh_proxy.view import EngineView

# One that is preempted more often is computed where it is: each time costs the mesh its prompt.
MAX_HAND_BACKS = 2
# More than a request gets that ends each engine it comes to, as a resume always yields a token.
FORGIVEN_TOKENS = 32
# Engines bound request ids; a client's own may be as long as it likes.
MAX_SHOWN_ID_CHARS = 200
RETURNED = "preempted:"
"""How `kv_source` begins of a choice that has lost its KV and runs again."""
# Engines say where from: what else comes must not become a series of its own.
RETURN_SOURCES = frozenset({"local", "tier", "offer", "prefill", "recompute"})
OTHER = "other"


@dataclass(slots=True, kw_only=True)
class CurrentLeg:
    """The leg that runs now."""

    kind: LegKind
    engine: EngineView
    endpoint: Endpoint
    leg: Leg
    sent_s: float
    answered: bool = False
    """A token or an end came."""
    yielded_token: bool = False


class RunningRequest:
    """State of one request. `accept` turns what an engine says into what the client may see."""

    def __init__(self, request: TokenRequest, metrics: ProxyMetrics) -> None:
        self.request = request
        self.trace = request.trace
        self.unfinished = set(range(request.sampling.n))
        self.emitted: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self.prefilled = False
        """A prefill leg has ended well."""
        self.disaggregating = False
        """The router meant this request for prefill and decode."""
        self.kv_settled = False
        """Decode holds the KV, one way or another; what happens later is no hand-over failing."""
        self.model: KVNames | None = None
        """The mesh's when it was routed: from its first token on no engine of another goes on with it."""
        self.model_fingerprint = self.weights_fingerprint = ""
        self.doubts = Doubts()
        self.unchecked = False
        """A decode leg has failed before anybody could say whether what prefill's tokens rest on is whole."""
        self.excluded: set[str] = set()
        self.num_retries = 0
        """Since it last moved on by FORGIVEN_TOKENS."""
        self._num_forgiven = 0
        """Tokens that there were when retries were last counted anew."""
        self.num_hand_backs = 0
        """Times that a decode has given it back after a preemption."""
        self.wants_prefill = False
        """It was, and its KV has not been computed elsewhere yet."""
        self.last_error: MeshError | None = None
        self.final_error: MeshError | None = None
        """Set when the request must end now whatever engines live: its time is up or the proxy shuts down."""
        self.prefix_keys: list[bytes] = []
        self.cached_on: dict[str, int] = {}
        self.current: CurrentLeg | None = None
        self.offer: HeldOffer | None = None
        self.expectation: HeldExpectation | None = None
        """What a decode was told to expect of the prefill leg; it stays the decode of choice after that."""
        self.early: EarlyLeg | None = None
        """A decode leg that waits for what the prefill leg computes."""
        self._offer_endpoint: Endpoint | None = None
        self._metrics = metrics
        self._prompt_logprobs_sent = False
        self._num_legs = 0
        # Engines know requests of many proxies, and a retry must not be taken for its first attempt.
        self._nonce = secrets.token_hex(4)
        self._loop = asyncio.get_running_loop()
        # uvloop's clock ticks in milliseconds: good for deadlines, too coarse to measure with.
        self.arrived_s = time.monotonic()
        self.deadline = self._loop.time() + request.deadline_s
        self._timer = self._loop.call_at(self.deadline, self._overdue)
        self._wait: asyncio.Timeout | None = None

    @property
    def started(self) -> bool:
        """Whether the client may have seen something, so that no engine starts from nothing any more."""
        return self.prefilled or any(self.emitted)

    @property
    def is_bound(self) -> bool:
        """Whether anything came of it that another model would not have said."""
        return self.started or self._prompt_logprobs_sent or len(self.unfinished) < self.request.sampling.n

    @property
    def remaining_s(self) -> float:
        """Of its deadline."""
        return self.deadline - self._loop.time()

    def facts(self) -> RequestFacts:
        """What the router decides on."""
        sampling = self.request.sampling
        return RequestFacts(
            num_prompt_tokens=len(self.request.token_ids),
            max_tokens=sampling.max_tokens,
            num_emitted_tokens=max((len(self.emitted[choice]) for choice in self.unfinished), default=0),
            needs_prompt_logprobs=sampling.prompt_logprobs is not None and not self._prompt_logprobs_sent,
            started=self.started,
            beam_search=self.request.beam_search,
            preferred_engine=self.request.preferred_engine,
            wants_prefill=self.wants_prefill,
            offer_owner=self.offer.peer_id if self.offer is not None and self.offer.live else "",
            model_fingerprint=self.model_fingerprint if self.is_bound else "",
            weights_fingerprint=self.weights_fingerprint if self.is_bound else "",
            cached_tokens=self.cached_on,
            excluded=frozenset(self.excluded),
            pushed_to=self.expectation.peer_id if self.expectation is not None else "",
        )

    @property
    def may_be_handed_back(self) -> bool:
        """Whether an engine that preempts it may end the leg, to have its KV computed elsewhere."""
        return len(self.unfinished) == 1 and self.num_hand_backs < MAX_HAND_BACKS and not self.request.beam_search

    def next_leg_request(
        self, kind: LegKind, *, has_help: bool = False, awaits: AwaitedOffer | None = None, offer_id: str = ""
    ) -> GenerateRequest:
        """Ask for what is still missing: the open choices, after the tokens they have. `has_help`: a prefill could help.

        `awaits`: what a decode leg goes on from, in place of the offer held. `offer_id`: what a prefill leg calls its offer.
        """
        choices = sorted(self.unfinished)
        emitted = [list(self.doubts.sure(choice, self.emitted[choice])) for choice in choices]
        if kind is LegKind.PREFILL:
            self.doubts.prefill_begins(self.emitted)
        sampling = self.request.sampling
        if kind is LegKind.DECODE or self._prompt_logprobs_sent:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self._num_legs += 1
        return GenerateRequest(
            request_id=f"{self.request.request_id[:MAX_SHOWN_ID_CHARS]}.{self._nonce}.{self._num_legs}",
            token_ids=self.request.token_ids,
            sampling=sampling,
            choices=choices,
            emitted=emitted if any(emitted) else [],
            prefill_only=kind is LegKind.PREFILL,
            ticket=self.offer.ticket if kind is LegKind.DECODE and self.offer is not None and awaits is None else b"",
            cache_salt=self.request.cache_salt,
            priority=self.request.priority,
            deadline_s=self.remaining_s,
            hand_back=has_help and kind is not LegKind.PREFILL and self.may_be_handed_back,
            awaits=awaits,
            offer_id=offer_id,
        )

    def begin(self, kind: LegKind, engine: EngineView, endpoint: Endpoint, leg: Leg) -> None:
        """Note that a leg is on its way."""
        now = time.monotonic()
        if self._num_legs == 1:
            self._metrics.stages.labels(Stage.ROUTE).observe(now - self.arrived_s)
        self.current = CurrentLeg(kind=kind, engine=engine, endpoint=endpoint, leg=leg, sent_s=now)
        self.model_fingerprint = engine.model_fingerprint
        self.weights_fingerprint = engine.weights_fingerprint
        if kind is LegKind.PREFILL:
            self.trace.prefill = engine.engine_id
        else:
            self.trace.decode = engine.engine_id
        self._metrics.legs.labels(kind).inc()

    def accept(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """Take a delta of the current leg; return it as the client may see it, or None when nothing of it is for the client."""
        current = self.current
        assert current is not None
        if not current.answered and (delta.token_ids or delta.finish_reason):
            current.answered = True
            current.endpoint.answered()
            self._note_first_answer(current, delta)
        if delta.kv_committed:
            self.kv_settled = True
            self._metrics.stages.labels(Stage.HANDOFF).observe(time.monotonic() - current.sent_s)
            self._keep_offer()
        if delta.kv_source.startswith(RETURNED):
            self.note_return(delta.kv_source.removeprefix(RETURNED))
        if delta.choice not in self.unfinished:
            return None
        delta = self.doubts.confirm(delta)
        if delta.token_ids:
            self._note_tokens(current, delta)
        if delta.finish_reason:
            self.unfinished.discard(delta.choice)
        prompt_logprobs = None if self._prompt_logprobs_sent else delta.prompt_logprobs
        self._prompt_logprobs_sent = self._prompt_logprobs_sent or prompt_logprobs is not None
        if not (delta.token_ids or delta.finish_reason or prompt_logprobs is not None):
            return None
        return msgspec.structs.replace(
            delta,
            request_id=self.request.request_id,
            prompt_logprobs=prompt_logprobs,
            ticket=b"",
            cached_tokens=self.trace.cached_tokens,
            kv_committed=False,
        )

    def hold(self, offer: HeldOffer, endpoint: Endpoint) -> None:
        """Own an offer, which is renewed already, until `release_offer`."""
        self.offer, self._offer_endpoint = offer, endpoint

    def _keep_offer(self) -> None:
        """Decode has the KV: keep it where it came from too while that costs nobody anything, else give it back."""
        self.expect(None)
        if self.offer is None or self._offer_endpoint is None or not self._offer_endpoint.keep(self.offer):
            self.release_offer()

    def need_offer(self) -> None:
        """Another decode is about to fetch what may only have been kept."""
        if self.offer is not None and self._offer_endpoint is not None:
            self._offer_endpoint.need(self.offer)

    def expect(self, expectation: HeldExpectation | None) -> None:
        """Own an expectation, in the place of the one before."""
        before, self.expectation = self.expectation, expectation
        if before is not None:
            before.withdraw()

    def take_early(self) -> EarlyLeg | None:
        """Return the early leg, no longer owned here, if the request can go on with it now; one that it cannot is closed."""
        if self.early is None:
            return None
        is_in_time = self.prefilled and self.offer is not None and self.offer.live and len(self.emitted[0]) == 1
        if not is_in_time or self.early.leg.has_failed:
            self.drop_early()
            return None
        early, self.early = self.early, None
        self._metrics.early_legs.labels(EarlyEnd.USED).inc()
        return early

    @property
    def waited_in_vain(self) -> bool:
        """Whether the current leg is an early one that decode has not begun to fetch for."""
        current = self.current
        return current is not None and current.leg.request.awaits is not None and not self.kv_settled

    def drop_early(self) -> None:
        """Nobody goes on with the early leg, if there is one."""
        if self.early is not None:
            end = EarlyEnd.FAILED if self.early.leg.has_failed else EarlyEnd.UNNEEDED
            self._metrics.early_legs.labels(end).inc()
            self.early.close()
            self.early = None

    def release_offer(self) -> None:
        """Give the offer back, if there is one, and what was expected of it."""
        self.expect(None)
        if self.offer is not None and self._offer_endpoint is not None:
            self._offer_endpoint.release(self.offer)
        self.offer = self._offer_endpoint = None

    def forgive(self) -> None:
        """Count retries anew, and ask every engine again, when it has moved on by FORGIVEN_TOKENS since: a long stream outlives
        any number of failures; one that kills engines, and gets its token at each, none beyond its retries."""
        num_tokens = sum(map(len, self.emitted))
        if num_tokens >= self._num_forgiven + FORGIVEN_TOKENS:
            self._num_forgiven = num_tokens
            self.num_retries = 0
            self.excluded.clear()

    def hand_back(self) -> None:
        """An engine has preempted it: go on from a prefill's KV where there is a prefill, else anywhere."""
        self.num_hand_backs += 1
        self.wants_prefill = True
        self.release_offer()

    def fall_back(self, reason: Fallback, detail: str = "") -> None:
        """Count that disaggregation was intended and is not done."""
        self._metrics.fallbacks.labels(reason).inc()
        self.trace.fallbacks.append(detail or reason)

    def note_return(self, source: str) -> None:
        """Count that a preempted choice runs again, and where its KV came from."""
        source = source if source in RETURN_SOURCES else OTHER
        self._metrics.preempted.labels(source).inc()
        self.trace.preempted.append(source)

    def stop_choice(self, choice: int) -> None:
        """Show nothing more of a choice; the leg goes on for the others."""
        self.unfinished.discard(choice)
        if self.current is not None:
            self.current.leg.stop_choice(choice)

    def fail(self, error: MeshError) -> None:
        """End the request now, wherever it is."""
        if self.final_error is None:
            self.final_error = error
            if self.current is not None:
                self.current.leg.give_up(error)
                if (unread := self.current.leg.take_offer()) is not None:
                    self.current.endpoint.release(unread)
            # Now: a client that does not read keeps the request here for as long as it likes.
            self.release_offer()
            if self._wait is not None and not self._wait.expired():
                self._wait.reschedule(self._loop.time())

    async def wait(self, happening: Coroutine[Any, Any, None], until_s: float) -> bool:
        """Await something until a loop time or the end of the request; False when it did not come. Raises `final_error`."""
        try:
            async with asyncio.timeout_at(min(until_s, self.deadline)) as self._wait:
                await happening
        except TimeoutError:
            if self.final_error is not None:
                raise self.final_error from None
            return False
        finally:
            self._wait = None
        return True

    def close(self) -> None:
        """Let everything go; the leg has been closed by now."""
        self._timer.cancel()
        self.drop_early()
        self.release_offer()

    def _overdue(self) -> None:
        self.fail(DeadlineExceeded(f"the request did not end within its {self.request.deadline_s:g} s"))

    def _note_first_answer(self, current: CurrentLeg, delta: ChoiceDelta) -> None:
        """Read what engines say once per leg: where the KV came from, and what did not have to be computed."""
        trace = self.trace
        if current.kind is not LegKind.DECODE and not any(self.emitted):
            trace.cached_tokens = delta.cached_tokens
        if delta.kv_source.startswith(RETURNED):
            return
        if current.kind is LegKind.DECODE or not trace.kv_source:
            trace.kv_source, trace.kv_bytes = delta.kv_source, delta.kv_bytes
        if delta.kv_bytes:
            self._metrics.kv_bytes.labels(delta.kv_source).inc(delta.kv_bytes)
        if current.kind is LegKind.DECODE and delta.kv_source.startswith("recompute"):
            self.fall_back(Fallback.RECOMPUTE, delta.kv_source)

    def _note_tokens(self, current: CurrentLeg, delta: ChoiceDelta) -> None:
        now = time.monotonic()
        if not current.yielded_token:
            current.yielded_token = True
            self._metrics.stages.labels(STAGE_OF_FIRST_TOKEN[current.kind]).observe(now - current.sent_s)
            if not any(self.emitted):
                self._metrics.time_to_first_token.observe(now - self.arrived_s)
        self.emitted[delta.choice].extend(delta.token_ids)
        self._metrics.output_tokens.inc(len(delta.token_ids))
