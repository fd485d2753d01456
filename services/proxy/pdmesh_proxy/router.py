"""Who serves a request: a pure function of what is known of the request and a picture of the mesh.

Cost model. All costs are prompt tokens to be computed, the unit in which the time to a first token grows:

- a prefill leg costs the engine's waiting tokens plus the part of this prompt it does not hold;
- a whole request costs the same plus `SEQUENCE_COST_TOKENS` for each sequence it would share steps with;
- a decode leg computes nothing, so only the sequences and the waiting tokens count.

What decode would have to compute itself decides whether disaggregation pays: below `pd_min_prompt_tokens` the hand-over
costs more than it saves. It is asked of the one decode that would serve the whole request, the cheapest by load and cache
together: that a busy engine holds the prompt is no reason to compute it on an idle one. Engines whose KV pool is nearly
full come last, ties go to the one used longest ago.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pdmesh.openai.generator import BEAM_SEARCH
from pdmesh.protocol.context import tokens_to_hold
from pdmesh.protocol.exchange import Exchange
from pdmesh_proxy.pairs import compatible, exchange_of, refusal
from pdmesh_proxy.view import ClusterView, EngineView

# An assumption, not a measurement: only the order of engines depends on it. One more sequence in every step is taken to
# cost a request over its life what computing this many prompt tokens costs once.
SEQUENCE_COST_TOKENS = 32
# Converting so many tokens' KV takes about as long as computing one: see docs/architecture.md.
TOKENS_CONVERTED_PER_COMPUTED = 16
# Above this an engine is about to preempt, which costs more than any queue.
KV_PRESSURE = 0.95
# A prefill with less room, or with more to compute first than this many such requests, is no help to a preempted one.
HELPFUL_KV_USAGE = 0.8
HELPFUL_QUEUE = 4


class Reason(StrEnum):
    """Why a request went where it went; in the debug header and in `pdmesh_proxy_requests_total`."""

    DISAGGREGATED = "disaggregated"
    SINGLE_TOKEN = "single_token"
    """The first token is the last one, so prefill alone serves it."""
    SHORT_PROMPT = "short_prompt"
    CACHED = "cached_on_decode"
    """Decode probably holds nearly all of the prompt."""
    AGGREGATED = "aggregated"
    """The mesh has one kind of engine only, as configured."""
    NO_PREFILL = "no_prefill"
    NO_DECODE = "no_decode"
    NO_PAIR = "no_compatible_pair"
    """Prefill and decode engines live, but none can exchange KV."""
    PREFILL_EXCLUDED = "prefill_excluded"
    """Prefill engines live, but each that could be used failed or refused this very request."""
    DECODE_EXCLUDED = "decode_excluded"
    """The same of decode engines."""
    PREFILL_CONTEXT = "prefill_context"
    """Prefill engines live, but the context of none holds the prompt."""
    DECODE_CONTEXT = "decode_context"
    """Decode engines live, but the context of none holds prompt and max_tokens."""
    HANDOFF = "handoff"
    """Prefill is done; decode takes over with the ticket."""
    BEAM_SEARCH = BEAM_SEARCH
    """One engine serves all steps of it, so that each finds the one before in its prefix cache."""
    PREEMPTED = "preempted"
    """Decode gave its KV blocks to others; a prefill computes prompt and tokens, and decode takes over once more."""
    RESUMED = "resumed"
    """Tokens were emitted; another engine goes on from them."""


DEGRADED = frozenset(
    {
        Reason.NO_PREFILL,
        Reason.NO_DECODE,
        Reason.NO_PAIR,
        Reason.PREFILL_EXCLUDED,
        Reason.DECODE_EXCLUDED,
        Reason.PREFILL_CONTEXT,
        Reason.DECODE_CONTEXT,
    }
)
"""Disaggregation was intended and will not happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What the decision depends on."""

    num_prompt_tokens: int
    max_tokens: int
    """As admitted: no more than the mesh's context left beside the prompt then."""
    num_emitted_tokens: int = 0
    """Of the choice with the most that still goes on."""
    needs_prompt_logprobs: bool = False
    """Every position's logprobs are still to be reported, so every position is computed: nothing counts as cached."""
    started: bool = False
    """Prefill has ended for this request: tokens may have been emitted."""
    beam_search: bool = False
    """Served whole, by one engine for all its steps."""
    preferred_engine: str = ""
    """engine_id that served the step before."""
    wants_prefill: bool = False
    """It was handed back by a decode that preempted it: its KV is to be computed by a prefill once more."""
    offer_owner: str = ""
    """Process (`peer_id`) with a live offer of the prompt's KV."""
    model_fingerprint: str = ""
    """Not empty: the model that produced the tokens emitted so far."""
    weights_fingerprint: str = ""
    """Of that model, whatever the dtype; empty when it is not known."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """peer_id -> leading prompt tokens it probably holds."""
    pushed_to: str = ""
    """Process (`peer_id`) into whose cache the prompt's KV has been pushed."""
    excluded: frozenset[str] = frozenset()
    """session_ids on which this request has failed."""

    @property
    def num_tokens_at_most(self) -> int:
        """What an engine must hold that generates to the end: one that held less would end it early, as if it were done."""
        return self._tokens_to_hold(prefill_only=False)

    @property
    def num_tokens_of_prefill(self) -> int:
        """What one must hold for a prefill leg."""
        return self._tokens_to_hold(prefill_only=True)

    def _tokens_to_hold(self, *, prefill_only: bool) -> int:
        return tokens_to_hold(
            self.num_prompt_tokens, self.max_tokens, num_emitted=self.num_emitted_tokens, prefill_only=prefill_only
        )

    def uncached(self, engine: EngineView) -> int:
        """Prompt tokens that `engine` would have to compute."""
        if self.needs_prompt_logprobs:
            return self.num_prompt_tokens
        return self.num_prompt_tokens - min(self.num_prompt_tokens, self.cached_tokens.get(engine.peer_id, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next leg: on `prefill` when there is one (`decode` would follow), else on `decode`."""

    prefill: EngineView | None
    decode: EngineView | None
    reason: Reason
    why: str = ""
    """What more there is to say of a reason that asks somebody to change a setting."""


def route(facts: RequestFacts, view: ClusterView, *, pd_min_prompt_tokens: int) -> Decision | None:
    """Decide the next leg of a request; None when no engine can take it.

    An engine whose context would not hold the whole of what it is asked for does not exist for the request.
    """
    usable = [engine for engine in view.engines if _usable(engine, facts)]
    prefills, decodes = _prefills(usable, facts), _decodes(usable, facts)
    alone = _awake(_holding_all(prefills, facts))
    if facts.started:
        return _go_on(facts, view, prefills, decodes)
    awake = _awake(prefills), _awake(decodes)
    if _any_pair(*awake) or not _any_pair(prefills, decodes):
        prefills, decodes = awake
    if facts.beam_search and decodes:
        known = [engine for engine in decodes if engine.engine_id == facts.preferred_engine]
        return _whole(facts, known or decodes, Reason.BEAM_SEARCH)
    if facts.beam_search:
        return _whole(facts, alone, _why_no_decode(facts, view))
    if prefills and facts.max_tokens <= 1:
        return Decision(prefill=_cheapest(prefills, _prefill_cost(facts)), decode=None, reason=Reason.SINGLE_TOKEN)
    if not decodes:
        return _whole(facts, alone, _why_no_decode(facts, view))
    if not prefills:
        return _whole(facts, decodes, _why_no_prefill(facts, view))
    if facts.num_prompt_tokens < pd_min_prompt_tokens:
        return _whole(facts, decodes, Reason.SHORT_PROMPT)
    cheapest = _cheapest(decodes, _whole_cost(facts))
    if facts.uncached(cheapest) < pd_min_prompt_tokens:
        return Decision(prefill=None, decode=cheapest, reason=Reason.CACHED)
    if not _any_pair(prefills, decodes):
        return _unpaired(facts, view, prefills, decodes)
    return _pair(facts, prefills, decodes)


def has_help(facts: RequestFacts, view: ClusterView) -> bool:
    """Whether some prefill could compute the KV of the request anew, should a decode preempt it."""
    usable = [engine for engine in view.engines if _usable(engine, facts)]
    return bool(_helpful(facts, _prefills(usable, facts), _decodes(usable, facts)))


def why_too_long(facts: RequestFacts, view: ClusterView) -> str:
    """Say so when engines take requests, but the context of none holds all of this one; empty otherwise."""
    usable = [engine for engine in view.engines if _usable(engine, facts)]
    if not usable or _holding_all(usable, facts):
        return ""
    return (
        f"no engine holds the request: its prompt and max_tokens are {facts.num_tokens_at_most} tokens, the longest context "
        f"of the engines that take requests now is {max(engine.max_model_len for engine in usable)}"
    )


def _usable(engine: EngineView, facts: RequestFacts) -> bool:
    return _alive(engine, facts) and engine.session_id not in facts.excluded


def _prefills(engines: Iterable[EngineView], facts: RequestFacts) -> list[EngineView]:
    return [engine for engine in engines if engine.can_prefill and engine.holds(facts.num_tokens_of_prefill)]


def _decodes(engines: Iterable[EngineView], facts: RequestFacts) -> list[EngineView]:
    return _holding_all((engine for engine in engines if engine.can_decode), facts)


def _holding_all(engines: Iterable[EngineView], facts: RequestFacts) -> list[EngineView]:
    return [engine for engine in engines if engine.holds(facts.num_tokens_at_most)]


def _awake(engines: list[EngineView]) -> list[EngineView]:
    """Those that do not rest; all, where all do: better an engine that may fail than none of its kind."""
    return [engine for engine in engines if not engine.resting] or engines


def _alive(engine: EngineView, facts: RequestFacts) -> bool:
    """Whether a request that has failed nowhere could use it."""
    same_model = facts.model_fingerprint in ("", engine.model_fingerprint)
    same_weights = "" != facts.weights_fingerprint == engine.weights_fingerprint
    return not engine.draining and (same_model or same_weights)


def _any_pair(prefills: list[EngineView], decodes: list[EngineView]) -> bool:
    return any(compatible(prefill, decode) for prefill in prefills for decode in decodes)


def _go_on(
    facts: RequestFacts, view: ClusterView, prefills: list[EngineView], decodes: list[EngineView]
) -> Decision | None:
    """After prefill: fetch the offered KV where that is possible, else go on from prompt and tokens."""
    owner = view.by_peer(facts.offer_owner) if facts.offer_owner else None
    takers = [engine for engine in decodes if owner is not None and compatible(owner, engine)]
    if owner is not None and takers:
        takers = [engine for engine in takers if engine.peer_id == facts.pushed_to and not engine.resting] or takers
        return Decision(prefill=None, decode=_taker(facts, owner, _awake(takers)), reason=Reason.HANDOFF)
    if facts.wants_prefill and (helpful := _helpful(facts, prefills, decodes)):
        return _pair(facts, helpful, decodes, Reason.PREEMPTED)
    if not decodes and view.wants_decode:
        return _whole(facts, _awake(_holding_all(prefills, facts)), _why_no_decode(facts, view))
    return _whole(facts, _awake(decodes or _holding_all(prefills, facts)), Reason.RESUMED)


def _helpful(facts: RequestFacts, prefills: list[EngineView], decodes: list[EngineView]) -> list[EngineView]:
    """Prefills that would sooner have the KV of a preempted request than the decode that computes it beside others."""
    return [
        engine
        for engine in prefills
        if not engine.resting
        and engine.kv_usage < HELPFUL_KV_USAGE
        and engine.waiting_tokens <= HELPFUL_QUEUE * facts.num_prompt_tokens
        and any(compatible(engine, decode) for decode in decodes)
    ]


def _why_no_prefill(facts: RequestFacts, view: ClusterView) -> Reason:
    alive = [engine for engine in view.engines if engine.can_prefill and _alive(engine, facts)]
    if alive:
        return Reason.PREFILL_EXCLUDED if _prefills(alive, facts) else Reason.PREFILL_CONTEXT
    return Reason.NO_PREFILL if view.wants_prefill else Reason.AGGREGATED


def _why_no_decode(facts: RequestFacts, view: ClusterView) -> Reason:
    alive = [engine for engine in view.engines if engine.can_decode and _alive(engine, facts)]
    if alive:
        return Reason.DECODE_EXCLUDED if _decodes(alive, facts) else Reason.DECODE_CONTEXT
    return Reason.NO_DECODE if view.wants_decode else Reason.AGGREGATED


def _why_no_pair(
    facts: RequestFacts, view: ClusterView, prefills: list[EngineView], decodes: list[EngineView]
) -> Reason:
    alive = [engine for engine in view.engines if _alive(engine, facts)]
    if _any_pair(_prefills(alive, facts), decodes):
        return Reason.PREFILL_EXCLUDED
    if _any_pair(prefills, _decodes(alive, facts)):
        return Reason.DECODE_EXCLUDED
    if _any_pair([engine for engine in alive if engine.can_prefill], decodes):
        return Reason.PREFILL_CONTEXT
    if _any_pair(prefills, [engine for engine in alive if engine.can_decode]):
        return Reason.DECODE_CONTEXT
    # One engine in both roles has nobody to hand over to, and was not meant to have.
    alone = len({engine.peer_id for engine in (*prefills, *decodes)}) == 1
    return Reason.AGGREGATED if alone else Reason.NO_PAIR


def _unpaired(
    facts: RequestFacts, view: ClusterView, prefills: list[EngineView], decodes: list[EngineView]
) -> Decision | None:
    """Served whole, and why, as of one pair: of others the metrics tell."""
    reason = _why_no_pair(facts, view, prefills, decodes)
    decision = _whole(facts, decodes, reason)
    if decision is None or decision.decode is None or reason is not Reason.NO_PAIR:
        return decision
    decode = decision.decode
    prefill = next(engine for engine in (*prefills, *view.engines) if engine.peer_id != decode.peer_id)
    return replace(decision, why=refusal(prefill, decode))


def _pair(
    facts: RequestFacts,
    prefills: list[EngineView],
    decodes: list[EngineView],
    reason: Reason = Reason.DISAGGREGATED,
) -> Decision:
    """The cheapest prefill that some decode can fetch from; decode is chosen anew when prefill is done."""
    paired = [engine for engine in prefills if any(compatible(engine, decode) for decode in decodes)]
    own_cost = _prefill_cost(facts)

    def kinds(engine: EngineView) -> list[Exchange]:
        return [kind for decode in decodes if (kind := exchange_of(engine, decode)) is not None]

    prefill = _cheapest(
        paired,
        lambda engine: own_cost(engine) + _conversion_cost(facts, min(kinds(engine))),
        is_last_resort=lambda engine: min(kinds(engine)) is Exchange.ROUNDED,
    )
    takers = [engine for engine in decodes if compatible(prefill, engine)]
    return Decision(prefill=prefill, decode=_taker(facts, prefill, takers), reason=reason)


def _taker(facts: RequestFacts, owner: EngineView, takers: list[EngineView]) -> EngineView:
    """The decode for KV of `owner`. One that takes it as it is, or to the same numbers, comes before those that round."""
    return _cheapest(
        takers,
        lambda engine: _decode_cost(engine) + _conversion_cost(facts, exchange_of(owner, engine)),
        is_last_resort=lambda engine: exchange_of(owner, engine) is Exchange.ROUNDED,
    )


def _conversion_cost(facts: RequestFacts, kind: Exchange | None) -> int:
    return 0 if kind is Exchange.BYTES else facts.num_prompt_tokens // TOKENS_CONVERTED_PER_COMPUTED


def _whole(facts: RequestFacts, engines: list[EngineView], reason: Reason) -> Decision | None:
    if not engines:
        return None
    return Decision(prefill=None, decode=_cheapest(engines, _whole_cost(facts)), reason=reason)


def _prefill_cost(facts: RequestFacts) -> Callable[[EngineView], int]:
    return lambda engine: engine.waiting_tokens + facts.uncached(engine)


def _whole_cost(facts: RequestFacts) -> Callable[[EngineView], int]:
    return lambda engine: _decode_cost(engine) + facts.uncached(engine)


def _decode_cost(engine: EngineView) -> int:
    return engine.waiting_tokens + SEQUENCE_COST_TOKENS * engine.num_sequences


def _cheapest(
    engines: Iterable[EngineView],
    cost: Callable[[EngineView], int],
    *,
    is_last_resort: Callable[[EngineView], bool] = lambda engine: False,
) -> EngineView:
    def order(engine: EngineView) -> tuple[bool, bool, int, int]:
        return engine.kv_usage > KV_PRESSURE, is_last_resort(engine), cost(engine), engine.last_used

    return min(engines, key=order)
