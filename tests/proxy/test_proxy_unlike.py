"""Engines whose KV is of different kinds: who is paired with whom, and which models a mesh serves at the same time."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.protocol.capabilities import OWN, UNTOLD
from pdmesh.protocol.exchange import KVDescription, KVNames
from pdmesh.protocol.layout import Layout
from pdmesh_proxy.model_choice import Candidate, choose_model, serves
from pdmesh_proxy.pairs import compatible, conversion, incompatibility
from pdmesh_proxy.router import Decision, Reason, RequestFacts, route
from pdmesh_proxy.view import ClusterView, EngineView


def engine(name: str, role: str) -> EngineView:
    return EngineView(
        address=f"{name}:1",
        session_id=f"session-{name}",
        engine_id=name,
        epoch=1,
        can_prefill=role == "prefill",
        can_decode=role == "decode",
        model_fingerprint="m",
        layout_fingerprints=("l",),
        connectors=frozenset({"shm"}),
        protocol_min=1,
        protocol_max=1,
    )


P1, P2 = engine("p1", "prefill"), engine("p2", "prefill")
D1, D2 = engine("d1", "decode"), engine("d2", "decode")


def changed(view: EngineView, **changes: Any) -> EngineView:
    return dataclasses.replace(view, **changes)


def decide(engines: list[EngineView], **changes: Any) -> Decision | None:
    facts = RequestFacts(**({"num_prompt_tokens": 1000, "max_tokens": 50} | changes))
    return route(facts, ClusterView(engines=tuple(engines)), pd_min_prompt_tokens=32)


def decided(engines: list[EngineView]) -> tuple[str | None, str | None, Reason]:
    decision = decide(engines)
    assert decision is not None
    prefill, decode = (end and end.engine_id for end in (decision.prefill, decision.decode))
    return prefill, decode, decision.reason


def unlike(view: EngineView, model: str = "m", **changes: Any) -> EngineView:
    """The same engine with KV of its own kind, and what it tells of it."""
    fields: dict[str, Any] = {"block_size": 16, "dtype": "float32"} | changes
    layout = Layout(layers=(0,), window=None, num_layers=1, num_kv_heads=1, head_dim=8, **fields)
    description = KVDescription(
        weights_fingerprint="w", layouts=(layout,), block_bytes=layout.block_bytes, staging_bytes=1 << 20
    )
    return changed(
        view,
        model_fingerprint=model,
        layout_fingerprints=(layout.fingerprint,),
        description=description,
        capabilities=OWN,
    )


def test_a_decode_that_takes_kv_as_it_is_comes_before_one_that_converts() -> None:
    prefill, same = unlike(P1), unlike(D2, block_size=16)
    other = unlike(D1, block_size=32)
    assert decided([prefill, same, other]) == ("p1", "d2", Reason.DISAGGREGATED)
    # Conversion has a price in the cost model, and a queue may be longer.
    assert decided([prefill, changed(same, waiting_tokens=500), other]) == ("p1", "d1", Reason.DISAGGREGATED)
    decision = decide([prefill, same, other], started=True, model_fingerprint="m", offer_owner=prefill.peer_id)
    assert decision is not None
    assert decision.decode is same


def test_a_decode_that_rounds_is_used_when_there_is_no_other() -> None:
    prefill = unlike(P1, model="m in float32")
    repacking, rounding = (
        unlike(D1, model="m in float32", block_size=32),
        unlike(D2, model="m in bf16", dtype="bfloat16"),
    )
    assert decided([prefill, rounding]) == ("p1", "d2", Reason.DISAGGREGATED)
    busy = changed(repacking, waiting_tokens=10_000)
    assert decided([prefill, busy, rounding]) == ("p1", "d1", Reason.DISAGGREGATED)


def test_a_prefill_whose_kv_needs_no_conversion_is_preferred() -> None:
    decode = unlike(D1)
    assert decided([unlike(P1, block_size=32), unlike(P2), decode]) == ("p2", "d1", Reason.DISAGGREGATED)
    busy = changed(unlike(P2), waiting_tokens=500)
    assert decided([unlike(P1, block_size=32), busy, decode]) == ("p1", "d1", Reason.DISAGGREGATED)


def test_a_pair_that_is_not_converted_is_told_why() -> None:
    prefill, decode = unlike(P1, block_size=16), changed(unlike(D1, block_size=32), capabilities=UNTOLD)
    assert not compatible(prefill, decode)
    assert "the target's release does not convert" in incompatibility(prefill, decode)
    assert decided([prefill, decode]) == (None, "d1", Reason.NO_PAIR)


def test_what_a_conversion_does_is_said() -> None:
    repacked = conversion(unlike(P1, block_size=16), unlike(D1, block_size=32))
    assert repacked == "block_size 16 and 32; tokens are the same"
    rounded = conversion(unlike(P1, model="a"), unlike(D1, model="b", dtype="bfloat16"))
    assert rounded.startswith("dtype float32 and bfloat16; numbers are rounded")


def test_tokens_of_a_prefill_are_continued_by_a_decode_of_the_same_weights() -> None:
    decode = unlike(D1, model="m in bf16", dtype="bfloat16")
    for weights, going_on in (("w", True), ("v", False), ("", False)):
        decision = decide([decode], started=True, model_fingerprint="m in float32", weights_fingerprint=weights)
        assert (decision is not None) is going_on


def candidate(model: str, weights: str = "", *, can_decode: bool) -> Candidate:
    description = (
        KVDescription(weights_fingerprint=weights, layouts=(), block_bytes=1, staging_bytes=1) if weights else None
    )
    return Candidate(
        names=KVNames(model_fingerprint=model, layout_fingerprints=("l",), description=description),
        can_decode=can_decode,
    )


WIDE = candidate("m32", "w", can_decode=False)
NARROW = candidate("m16", "w", can_decode=True)
OTHER = candidate("x", "v", can_decode=True)
SILENT = candidate("m32", can_decode=True)


def leaving(engine: Candidate) -> Candidate:
    return dataclasses.replace(engine, draining=True)


@pytest.mark.parametrize(
    ("current", "candidates", "chosen"),
    [
        (None, [], None),
        (None, [WIDE], "m32"),
        # A prefill that answered first does not keep the decodes of its weights out.
        (WIDE, [WIDE, NARROW], "m16"),
        (None, [WIDE, WIDE, NARROW], "m16"),
        # A stranger does not take over, whichever came first; one that decodes is as good as one that prefills and better.
        (WIDE, [WIDE, WIDE, OTHER], "m32"),
        (OTHER, [WIDE, WIDE, OTHER], "m32"),
        (WIDE, [WIDE, OTHER], "x"),
        (NARROW, [WIDE, OTHER, NARROW], "m16"),
        # As many engines, and fewer that decode.
        (NARROW, [WIDE, OTHER, OTHER, NARROW], "x"),
        # The last decode has gone: prefills serve alone, and the decode's numbers are back with it.
        (NARROW, [WIDE], "m32"),
        (NARROW, [OTHER], "x"),
        (NARROW, [], "m16"),
        # One odd decode is not believed against those that prefills go with.
        (None, [WIDE, WIDE, OTHER, NARROW], "m16"),
        # Engines of the release before tell no weights; alike in number, they are told apart by fingerprint.
        (SILENT, [SILENT, candidate("m16", can_decode=True)], "m16"),
        (WIDE, [SILENT], "m32"),
        # A rolling update, one of three at a time.
        (NARROW, [OTHER, NARROW, NARROW], "m16"),
        (NARROW, [OTHER, OTHER, NARROW], "x"),
        # Who shuts down has no say while somebody stays.
        (NARROW, [OTHER, leaving(NARROW), leaving(NARROW)], "x"),
        (OTHER, [leaving(OTHER), leaving(NARROW), leaving(NARROW)], "m16"),
    ],
)
def test_the_model_in_use(current: Candidate | None, candidates: list[Candidate], chosen: str | None) -> None:
    names = choose_model(current and current.names, candidates)
    assert (names and names.model_fingerprint) == chosen


@given(st.lists(st.sampled_from([WIDE, NARROW, OTHER, SILENT, leaving(OTHER)]), min_size=1), st.randoms())
def test_proxies_that_reach_the_same_engines_choose_the_same(engines: list[Candidate], random: Random) -> None:
    """The first engine to start decided for the mesh, and two proxies that met them in another order served two models."""
    chosen = choose_model(None, engines)
    assert chosen is not None
    shuffled = random.sample(engines, len(engines))
    for before in (WIDE, NARROW, OTHER):
        other = choose_model(before.names, shuffled)
        assert other is not None
        assert other.model_fingerprint == chosen.model_fingerprint


def test_a_wanted_model_is_served_however_few_have_it() -> None:
    chosen = choose_model(None, [OTHER, OTHER, NARROW], wanted="m1")
    assert chosen == NARROW.names
    assert choose_model(None, [OTHER, OTHER], wanted="m1") is None
    assert choose_model(NARROW.names, [OTHER], wanted="m1") == NARROW.names


def test_only_a_prefill_may_differ_in_dtype() -> None:
    assert serves(WIDE, NARROW.names)
    assert serves(NARROW, NARROW.names)
    assert not serves(candidate("m32", "w", can_decode=True), NARROW.names)
    assert not serves(candidate("m32", can_decode=False), NARROW.names)
    assert not serves(candidate("m32", "v", can_decode=False), NARROW.names)
    assert not serves(WIDE, None)
