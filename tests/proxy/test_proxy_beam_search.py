"""Where the steps of a beam search go: whole to one engine, the same for all while it can."""

from __future__ import annotations

from typing import Any

import pytest

from pdmesh_proxy.router import Decision, Reason, RequestFacts, route
from pdmesh_proxy.view import ClusterView, EngineView


def engine(name: str, **changes: Any) -> EngineView:
    fields: dict[str, Any] = {
        "address": f"{name}:1",
        "session_id": f"session-{name}",
        "engine_id": name,
        "epoch": 1,
        "can_prefill": name.startswith("p"),
        "can_decode": name.startswith("d"),
        "model_fingerprint": "m",
        "layout_fingerprints": ("l",),
        "connectors": frozenset({"shm"}),
        "protocol_min": 1,
        "protocol_max": 1,
    }
    return EngineView(**(fields | changes))


P1, D1, D2 = engine("p1"), engine("d1"), engine("d2")


def decide(*engines: EngineView, **changes: Any) -> Decision | None:
    facts = RequestFacts(**({"num_prompt_tokens": 1000, "max_tokens": 1, "beam_search": True} | changes))
    return route(facts, ClusterView(engines=engines), pd_min_prompt_tokens=32)


def went_to(decision: Decision | None) -> tuple[str, Reason]:
    assert decision is not None
    assert decision.prefill is None
    assert decision.decode is not None
    return decision.decode.engine_id, decision.reason


def test_a_step_is_served_whole_by_decode_though_it_has_a_single_token() -> None:
    assert went_to(decide(P1, D1)) == ("d1", Reason.BEAM_SEARCH)
    assert decide(P1, D1, beam_search=False) == Decision(prefill=P1, decode=None, reason=Reason.SINGLE_TOKEN)


@pytest.mark.parametrize("preferred", ["d1", "d2"])
def test_the_next_step_goes_where_the_last_one_was_however_busy(preferred: str) -> None:
    busy = [engine(name, num_sequences=50 * (name == preferred)) for name in ("d1", "d2")]
    assert went_to(decide(P1, *busy, preferred_engine=preferred)) == (preferred, Reason.BEAM_SEARCH)


@pytest.mark.parametrize(
    ("engines", "excluded"),
    [
        ((P1, engine("d1", draining=True), D2), frozenset()),
        ((P1, D1, D2), frozenset({"session-d1"})),
        ((P1, D2), frozenset()),
    ],
)
def test_another_engine_takes_over_when_that_one_cannot(
    engines: tuple[EngineView, ...], excluded: frozenset[str]
) -> None:
    assert went_to(decide(*engines, preferred_engine="d1", excluded=excluded)) == ("d2", Reason.BEAM_SEARCH)


def test_without_decode_a_prefill_engine_serves_it_and_that_is_told() -> None:
    assert went_to(decide(P1)) == ("p1", Reason.NO_DECODE)
    assert decide() is None
