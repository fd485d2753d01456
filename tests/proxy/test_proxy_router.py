"""The router as a pure function: a table of situations, and what must hold in every situation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh_proxy.contexts import mesh_context
from pdmesh_proxy.router import (
    DEGRADED,
    KV_PRESSURE,
    SEQUENCE_COST_TOKENS,
    Decision,
    Reason,
    RequestFacts,
    compatible,
    has_help,
    route,
    why_too_long,
)
from pdmesh_proxy.view import ClusterView, EngineView


def engine(name: str, role: str, **changes: Any) -> EngineView:
    fields: dict[str, Any] = {
        "address": f"{name}:1",
        "session_id": f"session-{name}",
        "engine_id": name,
        "epoch": 1,
        "can_prefill": role in ("prefill", "both"),
        "can_decode": role in ("decode", "both"),
        "model_fingerprint": "m",
        "layout_fingerprints": ("l",),
        "connectors": frozenset({"shm"}),
        "protocol_min": 1,
        "protocol_max": 1,
    }
    return EngineView(**(fields | changes))


P1, P2 = engine("p1", "prefill"), engine("p2", "prefill")
D1, D2 = engine("d1", "decode"), engine("d2", "decode")
BOTH = engine("b1", "both")


def facts(**changes: Any) -> RequestFacts:
    return RequestFacts(**({"num_prompt_tokens": 1000, "max_tokens": 50} | changes))


def decide(
    engines: list[EngineView],
    *,
    wants_prefill: bool = True,
    wants_decode: bool = True,
    minimum: int = 32,
    **changes: Any,
) -> Decision | None:
    view = ClusterView(engines=tuple(engines), wants_prefill=wants_prefill, wants_decode=wants_decode)
    return route(facts(**changes), view, pd_min_prompt_tokens=minimum)


def changed(view: EngineView, **changes: Any) -> EngineView:
    return dataclasses.replace(view, **changes)


NIXL_P2 = changed(P2, connectors=frozenset({"nixl"}))
NIXL_D2 = changed(D2, connectors=frozenset({"nixl"}))


@pytest.mark.parametrize(
    ("engines", "changes", "prefill", "decode", "reason"),
    [
        ([P1, D1], {}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, D1], {"num_prompt_tokens": 31}, None, "d1", Reason.SHORT_PROMPT),
        ([P1, D1], {"num_prompt_tokens": 32}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, D1], {"num_prompt_tokens": 1, "minimum": 0}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, D1], {"max_tokens": 1}, "p1", None, Reason.SINGLE_TOKEN),
        ([D1], {"max_tokens": 1}, None, "d1", Reason.NO_PREFILL),
        ([P1, D1], {"cached_tokens": {"d1@1": 980}}, None, "d1", Reason.CACHED),
        ([P1, D1], {"cached_tokens": {"d1@1": 968}}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, D1], {"cached_tokens": {"d1@2": 980}}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, D1, D2], {"cached_tokens": {"d2@1": 980}}, None, "d2", Reason.CACHED),
        ([P1, D1], {"cached_tokens": {"d1@1": 980}, "needs_prompt_logprobs": True}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, D1], {"cached_tokens": {"d1@1": 1000}, "minimum": 0}, "p1", "d1", Reason.DISAGGREGATED),
        ([D1], {}, None, "d1", Reason.NO_PREFILL),
        ([D1], {"wants_prefill": False}, None, "d1", Reason.AGGREGATED),
        ([P1], {}, None, "p1", Reason.NO_DECODE),
        ([P1], {"wants_decode": False}, None, "p1", Reason.AGGREGATED),
        ([BOTH], {}, None, "b1", Reason.AGGREGATED),
        ([BOTH, D1], {}, "b1", "d1", Reason.DISAGGREGATED),
        ([changed(P1, connectors=frozenset({"nixl"})), D1], {}, None, "d1", Reason.NO_PAIR),
        ([changed(P1, layout_fingerprints=("other",)), D1], {}, None, "d1", Reason.NO_PAIR),
        ([changed(P1, protocol_min=2, protocol_max=3), D1], {}, None, "d1", Reason.NO_PAIR),
        ([changed(P1, connectors=frozenset({"nixl"})), P2, D1], {}, "p2", "d1", Reason.DISAGGREGATED),
        ([P1, changed(D1, draining=True)], {}, None, "p1", Reason.NO_DECODE),
        ([changed(P1, draining=True), D1], {}, None, "d1", Reason.NO_PREFILL),
        # Engines that live and have failed this request are no mesh without them.
        ([P1, D1], {"excluded": frozenset({"session-p1"})}, None, "d1", Reason.PREFILL_EXCLUDED),
        ([P1, D1], {"excluded": frozenset({"session-d1"})}, None, "p1", Reason.DECODE_EXCLUDED),
        ([P1, P2, D1], {"excluded": frozenset({"session-p1"})}, "p2", "d1", Reason.DISAGGREGATED),
        ([P1, NIXL_P2, D1], {"excluded": frozenset({"session-p1"})}, None, "d1", Reason.PREFILL_EXCLUDED),
        ([P1, NIXL_D2, D1], {"excluded": frozenset({"session-d1"})}, None, "d2", Reason.DECODE_EXCLUDED),
        ([P1, NIXL_D2], {"excluded": frozenset({"session-other"})}, None, "d2", Reason.NO_PAIR),
        ([changed(P1, draining=True), D1], {"excluded": frozenset({"session-p1"})}, None, "d1", Reason.NO_PREFILL),
        # One that rests comes after all others of its kind, and before none.
        ([changed(P1, resting=True), P2, D1], {}, "p2", "d1", Reason.DISAGGREGATED),
        ([P1, changed(D1, resting=True), D2], {}, "p1", "d2", Reason.DISAGGREGATED),
        ([changed(P1, resting=True), changed(D1, resting=True)], {}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, changed(D1, resting=True)], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.HANDOFF),
        (
            [P1, changed(D1, resting=True), D2],
            {"excluded": frozenset({"session-d2"})},
            "p1",
            "d1",
            Reason.DISAGGREGATED,
        ),
        # Nor before one that does not fit.
        ([P1, changed(D1, resting=True), NIXL_D2], {}, "p1", "d1", Reason.DISAGGREGATED),
        (
            [P1, changed(D1, resting=True), NIXL_D2],
            {"started": True, "offer_owner": "p1@1"},
            None,
            "d1",
            Reason.HANDOFF,
        ),
        # Load: who holds the prompt serves it alone only where it is the cheapest to do so.
        ([P1, changed(D1, num_sequences=10), D2], {"cached_tokens": {"d1@1": 980}}, None, "d1", Reason.CACHED),
        ([P1, changed(D1, num_sequences=40), D2], {"cached_tokens": {"d1@1": 980}}, "p1", "d2", Reason.DISAGGREGATED),
        ([P1, changed(D1, waiting_tokens=990), D2], {"cached_tokens": {"d1@1": 980}}, "p1", "d2", Reason.DISAGGREGATED),
        ([P1, changed(D1, kv_usage=0.97), D2], {"cached_tokens": {"d1@1": 980}}, "p1", "d2", Reason.DISAGGREGATED),
        ([P1, changed(D1, num_sequences=9), D2], {"num_prompt_tokens": 5}, None, "d2", Reason.SHORT_PROMPT),
        # After prefill.
        ([P1, D1, D2], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.HANDOFF),
        ([changed(P1, draining=True), D1], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.HANDOFF),
        ([D1], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.RESUMED),
        ([P1], {"started": True, "offer_owner": "p1@1"}, None, "p1", Reason.NO_DECODE),
        ([P1, D1], {"started": True, "excluded": frozenset({"session-d1"})}, None, "p1", Reason.DECODE_EXCLUDED),
        ([P1, D1], {"started": True}, None, "d1", Reason.RESUMED),
        ([P1, D1, D2], {"started": True, "excluded": frozenset({"session-d1"})}, None, "d2", Reason.RESUMED),
        (
            [P1, changed(D1, connectors=frozenset({"nixl"})), D2],
            {"started": True, "offer_owner": "p1@1"},
            None,
            "d2",
            Reason.HANDOFF,
        ),
        # Who cannot hold the whole of a leg is not asked: 1000 tokens of prompt and 50 more.
        (
            [P1, changed(D1, max_model_len=1049), D2],
            {"cached_tokens": {"d1@1": 1000}},
            "p1",
            "d2",
            Reason.DISAGGREGATED,
        ),
        ([P1, changed(D1, max_model_len=1050)], {}, "p1", "d1", Reason.DISAGGREGATED),
        ([P1, changed(D1, max_model_len=1049)], {}, None, "p1", Reason.DECODE_CONTEXT),
        ([changed(P1, max_model_len=1002), D1], {}, "p1", "d1", Reason.DISAGGREGATED),
        ([changed(P1, max_model_len=1001), D1], {}, None, "d1", Reason.PREFILL_CONTEXT),
        ([changed(P1, max_model_len=1001), P2, D1], {}, "p2", "d1", Reason.DISAGGREGATED),
        ([changed(P1, max_model_len=1001), D1], {"max_tokens": 1}, "p1", None, Reason.SINGLE_TOKEN),
        ([changed(P1, max_model_len=1049, resting=True), P2], {}, None, "p2", Reason.NO_DECODE),
        ([changed(P1, max_model_len=1049), changed(P2, resting=True)], {}, None, "p2", Reason.NO_DECODE),
        (
            [changed(P1, max_model_len=1002), changed(D1, max_model_len=1049), D2],
            {"started": True, "offer_owner": "p1@1"},
            None,
            "d2",
            Reason.HANDOFF,
        ),
        ([P1, changed(D1, max_model_len=1049)], {"started": True}, None, "p1", Reason.DECODE_CONTEXT),
    ],
)
def test_table(
    engines: list[EngineView], changes: dict[str, Any], prefill: str | None, decode: str | None, reason: Reason
) -> None:
    decision = decide(engines, **changes)
    assert decision is not None
    chosen = (
        decision.prefill.engine_id if decision.prefill else None,
        decision.decode.engine_id if decision.decode else None,
    )
    assert (chosen, decision.reason) == ((prefill, decode), reason)


def test_a_prefill_helps_a_preempted_request_that_it_holds() -> None:
    preempted = facts(started=True, wants_prefill=True, num_emitted_tokens=10)
    for length, reason in ((1012, Reason.PREEMPTED), (1011, Reason.RESUMED)):
        view = ClusterView(engines=(changed(P1, max_model_len=length), D1))
        decision = route(preempted, view, pd_min_prompt_tokens=32)
        assert decision is not None
        assert decision.reason is reason
        assert has_help(preempted, view) == (reason is Reason.PREEMPTED)


SHORT_P, SHORT_D = changed(P1, max_model_len=1049), changed(D1, max_model_len=1049)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    "engines", [[SHORT_P], [SHORT_D], [SHORT_P, SHORT_D], [SHORT_P, SHORT_D, changed(D2, draining=True)]]
)
def test_nobody_holds_the_whole_request(engines: list[EngineView], started: bool) -> None:
    assert decide(engines, started=started) is None
    why = why_too_long(facts(started=started), ClusterView(engines=tuple(engines)))
    assert "1050 tokens" in why
    assert "is 1049" in why


def test_a_context_is_not_blamed_where_it_is_not_the_reason() -> None:
    for engines in ([], [P1, SHORT_D], [changed(SHORT_D, draining=True)]):
        assert why_too_long(facts(), ClusterView(engines=tuple(engines))) == ""


@pytest.mark.parametrize(
    ("engines", "context"),
    [
        ([], 0),
        ([changed(P1, max_model_len=90), changed(D1, max_model_len=40), changed(D2, max_model_len=50)], 50),
        ([changed(P1, max_model_len=30), changed(D1, max_model_len=40)], 40),
        ([changed(P1, max_model_len=90), changed(P2, max_model_len=30)], 90),
        ([changed(D1, max_model_len=40), changed(D2, max_model_len=50, draining=True)], 40),
        ([changed(D2, max_model_len=50, draining=True)], 50),
    ],
)
def test_the_mesh_takes_what_its_longest_decode_holds(engines: list[EngineView], context: int) -> None:
    assert mesh_context(engines) == context


@pytest.mark.parametrize(
    "engines", [[], [changed(D1, draining=True)], [changed(P1, draining=True), changed(D1, draining=True)]]
)
def test_nobody_can_serve(engines: list[EngineView]) -> None:
    assert decide(engines) is None


def test_a_resumed_request_stays_with_the_model_that_began_it() -> None:
    other = changed(D2, model_fingerprint="m2", last_used=-1)
    decision = decide([D1, other], started=True, model_fingerprint="m")
    assert decision is not None
    assert decision.decode == D1
    assert decide([other], started=True, model_fingerprint="m") is None


def test_least_loaded_prefill_wins_unless_the_prefix_elsewhere_saves_more() -> None:
    busy = changed(P1, waiting_tokens=300)
    assert decide([busy, P2, D1]).prefill == P2  # type: ignore[union-attr]
    assert decide([busy, P2, D1], cached_tokens={"p1@1": 256}).prefill == P2  # type: ignore[union-attr]
    assert decide([busy, P2, D1], cached_tokens={"p1@1": 320}).prefill == busy  # type: ignore[union-attr]


def test_decode_is_chosen_by_sequences_then_by_who_rested_longest_and_never_when_full() -> None:
    assert decide([P1, changed(D1, num_sequences=2), D2]).decode.engine_id == "d2"  # type: ignore[union-attr]
    assert decide([P1, changed(D1, last_used=5), changed(D2, last_used=4)]).decode.engine_id == "d2"  # type: ignore[union-attr]
    full = changed(D2, kv_usage=0.99)
    assert decide([P1, changed(D1, num_sequences=50), full]).decode.engine_id == "d1"  # type: ignore[union-attr]


def test_a_busy_holder_of_the_prompt_does_not_make_an_idle_decode_compute_it() -> None:
    """The holder's cache was taken for the choice's: 5,984 of 6,000 tokens held by the busy one sent all to the idle one."""
    holder = changed(D1, num_sequences=200)
    decision = decide([P1, holder, D2], num_prompt_tokens=6000, cached_tokens={"d1@1": 5984})
    assert decision == Decision(prefill=P1, decode=D2, reason=Reason.DISAGGREGATED)


names = st.sampled_from([f"e{i}" for i in range(6)])
engines_st = st.lists(
    st.builds(
        engine,
        names,
        st.sampled_from(["prefill", "decode", "both"]),
        model_fingerprint=st.sampled_from(["m", "m2"]),
        layout_fingerprints=st.sampled_from([("l",), ("k",)]),
        connectors=st.sets(st.sampled_from(["shm", "nixl", "grpc"])).map(frozenset),
        protocol_max=st.integers(1, 3),
        draining=st.booleans(),
        num_sequences=st.integers(0, 300),
        waiting_tokens=st.integers(0, 10_000),
        kv_usage=st.floats(0, 1),
        last_used=st.integers(0, 9),
        max_model_len=st.sampled_from([0, 0, 0, 1000, 2000]),
    ),
    unique_by=lambda view: view.engine_id,
    max_size=6,
)
facts_st = st.builds(
    RequestFacts,
    num_prompt_tokens=st.integers(1, 3000),
    max_tokens=st.integers(0, 50),
    needs_prompt_logprobs=st.booleans(),
    started=st.booleans(),
    offer_owner=names.map(lambda name: f"{name}@1") | st.just(""),
    model_fingerprint=st.sampled_from(["", "m"]),
    cached_tokens=st.dictionaries(names.map(lambda name: f"{name}@1"), st.integers(0, 4000)),
    excluded=st.frozensets(names.map(lambda name: f"session-{name}"), max_size=3),
)


@given(engines_st, facts_st, st.booleans(), st.booleans(), st.integers(0, 100))
def test_whatever_the_mesh_looks_like(
    engines: list[EngineView], request: RequestFacts, wants_prefill: bool, wants_decode: bool, minimum: int
) -> None:
    view = ClusterView(engines=tuple(engines), wants_prefill=wants_prefill, wants_decode=wants_decode)
    decision = route(request, view, pd_min_prompt_tokens=minimum)
    able = [
        e
        for e in engines
        if not e.draining
        and e.session_id not in request.excluded
        and request.model_fingerprint in ("", e.model_fingerprint)
    ]
    # Somebody serves exactly when somebody can.
    whole = [e for e in able if e.holds(request.num_prompt_tokens + request.max_tokens)]
    if decision is None:
        assert not whole
    else:
        assert able
    assert decision == route(request, view, pd_min_prompt_tokens=minimum)
    if decision is None:
        return
    chosen = [e for e in (decision.prefill, decision.decode) if e is not None]
    assert chosen
    assert all(e in able for e in chosen)
    if decision.prefill is not None:
        assert not request.started, "a request is never prefilled twice from nothing"
        assert decision.prefill.can_prefill
    if decision.decode is not None:
        assert decision.decode in whole
    if decision.prefill is not None and decision.decode is None:
        assert decision.prefill in whole
    if decision.prefill is not None and decision.decode is not None:
        assert compatible(decision.prefill, decision.decode)
    if decision.reason is Reason.HANDOFF:
        owner = view.by_peer(request.offer_owner)
        assert owner is not None
        assert decision.decode is not None
        assert compatible(owner, decision.decode)
    if decision.reason in DEGRADED:
        assert decision.prefill is None
    _check_sensible(decision, request, [e for e in whole if e.can_decode], minimum)
    _check_blame(decision, request, engines)


def _check_sensible(decision: Decision, request: RequestFacts, decodes: list[EngineView], minimum: int) -> None:
    if decision.reason is Reason.SHORT_PROMPT:
        assert request.num_prompt_tokens < minimum
    if decision.reason is Reason.CACHED:
        assert decision.decode is not None
        assert not request.needs_prompt_logprobs
        assert request.uncached(decision.decode) < minimum
    if decision.reason in (Reason.SHORT_PROMPT, Reason.CACHED):
        assert decision.decode in decodes
        assert (_is_full(decision.decode), _alone_cost(decision.decode, request)) == min(
            (_is_full(e), _alone_cost(e, request)) for e in decodes
        ), "another decode would have answered sooner"
    if decision.reason is Reason.DISAGGREGATED:
        assert request.num_prompt_tokens >= minimum
        best = min(decodes, key=lambda e: (_is_full(e), _alone_cost(e, request), e.last_used))
        assert request.uncached(best) >= minimum, "the decode to serve it alone holds the prompt"


def _check_blame(decision: Decision, request: RequestFacts, engines: list[EngineView]) -> None:
    """A kind of engine is said to be missing only where none lives, and to be excluded only where some are."""
    alive = [e for e in engines if not e.draining and request.model_fingerprint in ("", e.model_fingerprint)]
    excluded = [e for e in alive if e.session_id in request.excluded]
    if decision.reason is Reason.NO_PREFILL:
        assert not any(e.can_prefill for e in alive)
    if decision.reason is Reason.NO_DECODE:
        assert not any(e.can_decode for e in alive)
    if decision.reason is Reason.NO_PAIR:
        left = [e for e in alive if e not in excluded]
        prefills = [e for e in left if e.can_prefill and e.holds(request.num_tokens_of_prefill)]
        decodes = [e for e in left if e.can_decode and e.holds(request.num_tokens_at_most)]
        assert not any(compatible(p, d) for p in alive for d in decodes if p.can_prefill)
        assert not any(compatible(p, d) for p in prefills for d in alive if d.can_decode)
    if decision.reason is Reason.PREFILL_EXCLUDED:
        assert any(e.can_prefill for e in excluded)
    if decision.reason is Reason.DECODE_EXCLUDED:
        assert any(e.can_decode for e in excluded)
    if decision.reason is Reason.PREFILL_CONTEXT:
        assert any(e.can_prefill and not e.holds(request.num_tokens_of_prefill) for e in alive)
    if decision.reason is Reason.DECODE_CONTEXT:
        assert any(e.can_decode and not e.holds(request.num_tokens_at_most) for e in alive)


def _is_full(view: EngineView) -> bool:
    return view.kv_usage > KV_PRESSURE


def _alone_cost(view: EngineView, request: RequestFacts) -> int:
    return view.waiting_tokens + SEQUENCE_COST_TOKENS * view.num_sequences + request.uncached(view)
