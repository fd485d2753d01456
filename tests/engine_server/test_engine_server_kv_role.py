"""`kv-role`: which ends of a handoff an engine takes, what it tells proxies, and what it says to the others."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdmesh.config import EngineConfig
from pdmesh.engine.server import service
from pdmesh.engine.server.assembly import Engine
from pdmesh.engine.server.identity import Identity, Role, identify
from pdmesh.engine.server.submission import StockLeg
from pdmesh.engine.server.transfer_params import RemoteKV
from pdmesh.errors import ConfigError, HandshakeRefused, InvalidRequest, MeshError
from pdmesh.lifecycle import Life
from pdmesh.protocol.messages import GenerateRequest, GroupBlocks
from support.engines import SECRET, request
from support.held_engine import HeldCore, Inbox, play

REMOTE = StockLeg(
    remote=RemoteKV(
        engine_id="owner",
        offer_id="o",
        host="127.0.0.1",
        port=1,
        groups=[GroupBlocks(group=0, block_ids=[0], generations=[])],
        num_tokens=None,
    )
)
PREFILL_LEG = request("p", prefill_only=True)
DECODE_LEG = request("d", ticket=b"a ticket", emitted=[[9]])


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    ("kv_role", "made", "leg", "error", "param"),
    [
        ("kv_producer", DECODE_LEG, None, HandshakeRefused, None),
        ("kv_producer", request("s"), REMOTE, InvalidRequest, "kv_transfer_params.do_remote_prefill"),
        ("kv_consumer", PREFILL_LEG, None, HandshakeRefused, None),
        ("kv_consumer", request("s"), StockLeg(offer=True), InvalidRequest, "kv_transfer_params.do_remote_decode"),
    ],
)
def test_the_other_end_of_a_handoff_is_refused(
    policy: str, kv_role: str, made: GenerateRequest, leg: StockLeg | None, error: type[MeshError], param: str | None
) -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        with pytest.raises(error, match=f"kv-role is {kv_role}") as refusal:
            engine.servicer._submission.submit(made, Inbox(), leg)
        assert refusal.value.param == param
        assert (core.sent, len(engine.table), engine.offers.num_open) == ([], 0, 0)

    play(scene, kv_role=kv_role, kv_load_failure_policy=policy)


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_both"])
def test_who_offers_still_does(kv_role: str) -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        for made, leg in ((PREFILL_LEG, None), (request("s"), StockLeg(offer=True))):
            engine.servicer._submission.submit(made, Inbox(), leg)
        assert engine.offers.num_open == 2
        engine.servicer._submission.submit(request("whole"), Inbox())
        assert len(engine.table) == 3

    play(scene, kv_role=kv_role)


@pytest.mark.parametrize("kv_role", ["kv_consumer", "kv_both"])
def test_who_fetches_still_does(kv_role: str) -> None:
    async def scene(core: HeldCore, engine: Engine) -> None:
        running = engine.servicer._submission.submit(request("s"), Inbox(), REMOTE)
        assert running.submission is not None
        await asyncio.wait({running.submission}, timeout=10)
        # Nobody listens there, and the policy says what follows: it was tried.
        assert core.added().source is None
        assert running.fetch_failure

    play(scene, kv_role=kv_role, kv_load_failure_policy="recompute", kv_peers=["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("role", "kv_role", "told"),
    [
        ("prefill", "kv_both", "prefill"),
        ("decode", "kv_both", "decode"),
        ("both", "kv_both", "both"),
        ("prefill", "kv_producer", "prefill"),
        ("decode", "kv_consumer", "decode"),
        ("both", "kv_producer", "prefill"),
        ("both", "kv_consumer", "decode"),
        ("prefill", "kv_consumer", "kv_producer or kv_both"),
        ("decode", "kv_producer", "kv_consumer or kv_both"),
    ],
)
def test_proxies_are_told_a_role_that_the_engine_takes(role: Role, kv_role: Any, told: str) -> None:
    config = EngineConfig(kv_role=kv_role)
    if " " in told:
        with pytest.raises(ConfigError, match=f"kv-role {kv_role}: a {role} service .* must be {told}"):
            identify(config, role, "m")
    else:
        assert identify(config, role, "m").role == told


def test_an_engine_that_was_given_vllms_json_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts of a service get the settings that `--kv-transfer-config` became."""
    seen: list[EngineConfig] = []

    def named(config: EngineConfig, role: Role, model_name: str) -> Identity:
        seen.append(config)
        raise ConfigError("far enough")

    monkeypatch.setattr(service, "resolve", lambda model: SimpleNamespace(name="m"))
    monkeypatch.setattr(service, "identify", named)
    text = json.dumps({"kv_role": "kv_consumer", "engine_id": "consumer-of-vllms"})
    with pytest.raises(ConfigError, match="far enough"):
        asyncio.run(service.serve_engine(EngineConfig(kv_transfer_config=text, secret=SECRET), Life(), "both"))
    assert [(config.kv_role, config.engine_id) for config in seen] == [("kv_consumer", "consumer-of-vllms")]
