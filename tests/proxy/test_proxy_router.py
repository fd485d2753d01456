"""The router as a pure function: a table of situations, and what must hold in every situation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh_proxy.router import DEGRADED, Decision, Reason, RequestFacts, compatible, route
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
        ([P1, D1], {"excluded": frozenset({"session-p1"})}, None, "d1", Reason.NO_PREFILL),
        # After prefill.
        ([P1, D1, D2], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.HANDOFF),
        ([changed(P1, draining=True), D1], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.HANDOFF),
        ([D1], {"started": True, "offer_owner": "p1@1"}, None, "d1", Reason.RESUMED),
        ([P1], {"started": True, "offer_owner": "p1@1"}, None, "p1", Reason.NO_DECODE),
        ([P1, D1], {"started": True}, None, "d1", Reason.RESUMED),
        ([P1, D1, D2], {"started": True, "excluded": frozenset({"session-d1"})}, None, "d2", Reason.RESUMED),
        (
            [P1, changed(D1, connectors=frozenset({"nixl"})), D2],
            {"started": True, "offer_owner": "p1@1"},
            None,
            "d2",
            Reason.HANDOFF,
        ),
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
    assert (decision is None) == (not able)
    assert decision == route(request, view, pd_min_prompt_tokens=minimum)
    if decision is None:
        return
    chosen = [e for e in (decision.prefill, decision.decode) if e is not None]
    assert chosen
    assert all(e in able for e in chosen)
    if decision.prefill is not None:
        assert not request.started, "a request is never prefilled twice from nothing"
        assert decision.prefill.can_prefill
    if decision.prefill is not None and decision.decode is not None:
        assert compatible(decision.prefill, decision.decode)
    if decision.reason is Reason.HANDOFF:
        owner = view.by_peer(request.offer_owner)
        assert owner is not None
        assert decision.decode is not None
        assert compatible(owner, decision.decode)
    if decision.reason in DEGRADED:
        assert decision.prefill is None
