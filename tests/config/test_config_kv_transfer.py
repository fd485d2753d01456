"""vLLM's `--kv-transfer-config` becomes settings of ours, or one line that says which key cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pdmesh.config import EngineConfig, load_config
from pdmesh.connector.options import NixlOptions, connector_options
from pdmesh.engine.kv_transfer_config import (
    CONNECTORS,
    FOREIGN_CONNECTORS,
    WITHOUT_EFFECT,
    kv_transfer_lines,
    resolve_kv_transfer,
)
from pdmesh.errors import ConfigError

EXTRA = "kv_connector_extra_config"
NIXL = {"kv_connector": "NixlConnector"}


def configured(values: dict[str, Any] | str, **settings: Any) -> EngineConfig:
    text = values if isinstance(values, str) else json.dumps(values)
    return EngineConfig(kv_transfer_config=text, **settings)


def refused(values: dict[str, Any] | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_kv_transfer(configured(values, **settings))
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith("kv-transfer-config: ")
    return caught.value.message


def multi(*connectors: Any, **outer: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", EXTRA: {"connectors": list(connectors)}} | outer


def test_a_start_reads_the_json_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did three times: to check, to log and to serve."""
    texts: list[str] = []
    monkeypatch.setattr(
        "pdmesh.engine.kv_transfer_config.parse_object", lambda setting, text: texts.append(text) or json.loads(text)
    )
    config = configured(NIXL | {"engine_id": "read-once"})
    for _ in range(2):
        assert resolve_kv_transfer(config).engine_id == "read-once"
        assert len(kv_transfer_lines(config)) == 1
    assert len(texts) == 1


def test_a_command_line_of_vllms_means_the_same_here() -> None:
    text = json.dumps(
        NIXL
        | {
            "kv_role": "kv_producer",
            "kv_load_failure_policy": "recompute",
            "kv_buffer_device": "cpu",
            "engine_id": "4b1e73c0-aaaa",
            "kv_rank": None,
            EXTRA: {"kv_lease_duration": 12, "backends": ["UCX"], "bidirectional_kv_xfer": False},
        }
    )
    argv = ["--kv-transfer-config", text, "--max-num-seqs", "4"]
    given = load_config(EngineConfig, argv, prog="pdmesh serve", environ={})
    resolved = resolve_kv_transfer(given)
    assert (resolved.connector, resolved.kv_role, resolved.kv_load_failure_policy, resolved.engine_id) == (
        ["nixl"],
        "kv_producer",
        "recompute",
        "4b1e73c0-aaaa",
    )
    assert (resolved.kv_lease_duration_s, resolved.max_num_seqs) == (12.0, 4)
    assert given.connector == EngineConfig().connector, "what was given has been written over"
    assert resolve_kv_transfer(resolved) == resolved
    [line] = kv_transfer_lines(given)
    for word in ("connector nixl", "kv-role kv_producer", "kv-load-failure-policy recompute", "kv-lease-duration-s 12"):
        assert word in line


@pytest.mark.parametrize(
    ("name", "mode"), [("NixlConnector", "pull"), ("NixlPullConnector", "pull"), ("NixlPushConnector", "push")]
)
def test_vllms_connectors_say_how_kv_moves(name: str, mode: str) -> None:
    resolved = resolve_kv_transfer(configured({"kv_connector": name}))
    assert (resolved.connector, resolved.kv_transfer_mode) == (["nixl"], mode)


def test_kv_is_moved_in_one_way_over_all_connectors() -> None:
    both = multi({"kv_connector": "NixlPullConnector"}, {"kv_connector": "NixlPushConnector"})
    assert "kv_transfer_mode" not in refused(both)
    assert "kv_connector push contradicts" in refused(both)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"connector": ["shm", "grpc"]}, "kv-transfer-mode push needs connector nixl; connector is shm,grpc"),
        ({"connector": ["nixl"], "enable_prefix_caching": False}, "no-enable-prefix-caching"),
    ],
)
def test_a_push_that_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(kv_transfer_mode="push", **settings)


@pytest.mark.parametrize("text", ["", " ", "{}", '{"kv_connector": null}'])
def test_what_is_not_given_changes_nothing(text: str) -> None:
    config = configured(text, connector=["grpc"])
    assert resolve_kv_transfer(config) is config
    assert kv_transfer_lines(config) == []


def test_a_multi_connector_is_a_list_in_its_order() -> None:
    """nixl has two names in vLLM; here it is tried once."""
    inner = {"kv_connector": "NixlPullConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    resolved = resolve_kv_transfer(
        configured(multi(inner, NIXL | {EXTRA: {"kv_lease_duration": 3}}, kv_role="kv_both"))
    )
    assert (resolved.connector, resolved.kv_lease_duration_s) == (["nixl"], 3.0)
    assert resolved.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize("name", sorted(FOREIGN_CONNECTORS))
def test_a_connector_that_is_not_here_is_refused_by_name(name: str) -> None:
    for values, path in (
        ({"kv_connector": name}, ""),
        (multi(NIXL, {"kv_connector": name}), f"{EXTRA}.connectors[1]."),
    ):
        message = refused(values)
        assert f"{path}kv_connector {name} is a connector of vLLM's that is not here: " in message
        assert any(word in message for word in ("kvcache", *CONNECTORS))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{", ["'{'", "is not JSON"]),
        ("[1]", ["is not a JSON object"]),
        ({"kv_conector": "x"}, ["unknown key kv_conector", "kv_connector"]),
        (NIXL | {EXTRA: {"lease": 1}}, [f"unknown key {EXTRA}.lease", "kv_lease_duration"]),
        (
            {"kv_connector": "MyConnector"},
            [
                "kv_connector MyConnector",
                "NixlConnector, NixlPullConnector, NixlPushConnector, MooncakeConnector, MultiConnector",
            ],
        ),
        ({"kv_role": "producer"}, ["kv_role", "'kv_producer', 'kv_consumer' or 'kv_both'", "'producer'"]),
        ({"kv_load_failure_policy": "retry"}, ["kv_load_failure_policy", "'fail' or 'recompute'", "'retry'"]),
        ({"kv_buffer_device": "cuda"}, ["kv_buffer_device", "'cpu'", "'cuda'"]),
        ({"engine_id": "a b"}, ["engine_id", "'a b'"]),
        ({"kv_port": "14579"}, ["kv_port", "'14579'"]),
        (NIXL | {EXTRA: {"kv_lease_duration": 0}}, [f"{EXTRA}.kv_lease_duration", "greater than 0"]),
        (NIXL | {EXTRA: {"kv_lease_duration": 3601}}, ["less than or equal to 3600"]),
        (NIXL | {EXTRA: {"backends": ["GDS"]}}, [f"{EXTRA}.backends.0", "'UCX'", "'GDS'"]),
        (NIXL | {EXTRA: {"mooncake_protocol": "rdma"}}, [f"{EXTRA}.mooncake_protocol", "'tcp'", "'rdma'"]),
        (NIXL | {EXTRA: {"bidirectional_kv_xfer": True}}, [f"{EXTRA}.bidirectional_kv_xfer True is not supported"]),
        ({"kv_connector_module_path": "my.module"}, ["kv_connector_module_path my.module is not supported"]),
        ({"enable_permute_local_kv": True}, ["enable_permute_local_kv True is not supported"]),
        ({"kv_connector": "MultiConnector"}, [f"{EXTRA}.connectors is missing"]),
        (multi(), [f"{EXTRA}.connectors", "at least 1"]),
        (multi("NixlConnector"), [f"{EXTRA}.connectors.0", "dictionary"]),
        (multi({}), [f"{EXTRA}.connectors[0].kv_connector None must be one of"]),
        (multi(multi(NIXL)), [f"{EXTRA}.connectors[0].kv_connector MultiConnector must be one of"]),
        (multi(NIXL | {EXTRA: {"connectors": [NIXL]}}), [f"{EXTRA}.connectors[0].{EXTRA}.connectors is for"]),
        (NIXL | {EXTRA: {"connectors": [NIXL]}}, [f"{EXTRA}.connectors is for kv_connector MultiConnector"]),
        (
            multi(NIXL | {"kv_role": "kv_consumer"}, kv_role="kv_both"),
            [f"{EXTRA}.connectors[0].kv_role kv_consumer contradicts kv_role kv_both"],
        ),
    ],
)
def test_one_line_names_key_and_value(values: dict[str, Any] | str, words: list[str]) -> None:
    message = refused(values)
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize(
    ("values", "flag", "words"),
    [
        (NIXL, {"connector": ["shm", "grpc"]}, ["kv_connector nixl contradicts connector shm,grpc"]),
        ({"kv_role": "kv_both"}, {"kv_role": "kv_producer"}, ["kv_role kv_both contradicts kv-role kv_producer"]),
        (
            {"kv_load_failure_policy": "recompute"},
            {"kv_load_failure_policy": "fail"},
            ["kv_load_failure_policy recompute contradicts kv-load-failure-policy fail"],
        ),
        ({"engine_id": "a"}, {"engine_id": "b"}, ["engine_id a contradicts engine-id b"]),
        (
            {EXTRA: {"kv_lease_duration": 5}},
            {"kv_lease_duration_s": 30.0},
            [f"{EXTRA}.kv_lease_duration 5 contradicts kv-lease-duration-s 30"],
        ),
    ],
)
def test_a_flag_that_says_otherwise_is_not_overruled(
    values: dict[str, Any], flag: dict[str, Any], words: list[str]
) -> None:
    """Also one that says what the default is: it was given."""
    message = refused(values, **flag)
    assert not [word for word in words if word not in message], message


def test_a_flag_that_says_the_same_is_no_contradiction() -> None:
    assert resolve_kv_transfer(configured(NIXL, connector=["nixl"])).connector == ["nixl"]


def test_num_threads_becomes_an_option_of_nixl_beside_those_that_are_there() -> None:
    config = configured(NIXL | {EXTRA: {"num_threads": 4}}, connector_options='{"nixl": {"ucx_tls": "tcp"}, "shm": {}}')
    resolved = resolve_kv_transfer(config)
    assert connector_options(resolved.connector_options)["nixl"] == NixlOptions(num_threads=4, ucx_tls="tcp")
    assert resolve_kv_transfer(resolved) == resolved
    assert 'connector-options {"nixl": {"num_threads": 4}}' in kv_transfer_lines(config)[0]
    message = refused(NIXL | {EXTRA: {"num_threads": 4}}, connector_options='{"nixl": {"num_threads": 2}}')
    assert "contradicts connector-options nixl.num_threads 2" in message


def test_keys_without_effect_are_named_and_change_nothing() -> None:
    outer = {"kv_ip": "10.0.0.1", "kv_port": 14579, "kv_rank": 0, "kv_parallel_size": 2, "kv_buffer_size": 1e9}
    inner = {
        "num_workers": 10,
        "decoder_kv_blocks_ttl": 480,
        "kv_recompute_threshold": 64,
        "push_registration_timeout": 5,
        "enforce_handshake_compat": True,
    }
    config = configured(outer | {EXTRA: inner})
    assert resolve_kv_transfer(config) is config
    lines = kv_transfer_lines(config)
    named = {line.split()[1] for line in lines if "has no effect: " in line}
    assert named == set(outer) | {f"{EXTRA}.{key}" for key in inner}
    assert len(lines) == len(WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("service", "value", "says"),
    [
        ("prefill", "kv_consumer", "kv-role kv_consumer: a prefill service offers KV"),
        ("decode", "kv_producer", "kv-role kv_producer: a decode service fetches KV"),
    ],
)
def test_a_service_whose_role_the_json_refuses_does_not_start(service: str, value: str, says: str) -> None:
    argv = [sys.executable, "-m", f"pdmesh_{service}", "--check-config"]
    argv += ["--kv-transfer-config", json.dumps(NIXL | {"kv_role": value})]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"pdmesh {service}: {says}")
    assert len(ended.stderr.splitlines()) == 1
