"""`--connector-options`: what is taken, what is refused and how, and where it arrives."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from pdmesh.config import EngineConfig
from pdmesh.connector.options import (
    OPTIONS,
    GrpcOptions,
    MooncakeOptions,
    NixlOptions,
    ShmOptions,
    connector_options,
    unused_options,
)
from pdmesh.connector.throttle import Throttle
from pdmesh.engine.server.preflight import check_engine
from pdmesh.errors import ConfigError
from pdmesh_kvcache.config import KVCacheConfig
from pdmesh_kvcache.server import check

SECRET = "a secret of the tests"


def read(values: Any) -> Any:
    return connector_options(values if isinstance(values, str) else json.dumps(values))


def test_options_are_read_by_connector_and_sizes_may_have_units() -> None:
    options = read(
        {
            "shm": {"throttle_bytes_s": "100M"},
            "grpc": {"num_threads": 2},
            "nixl": {"ucx_tls": "tcp"},
            "mooncake": {"host": "a"},
        }
    )
    assert options == {
        "shm": ShmOptions(throttle_bytes_s=100 << 20),
        "grpc": GrpcOptions(num_threads=2),
        "nixl": NixlOptions(ucx_tls="tcp"),
        "mooncake": MooncakeOptions(host="a"),
    }
    assert read("") == read("  ") == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{", "connector-options: '{' is not JSON"),
        ("[]", "not a JSON object"),
        ({"rdma": {}}, "no connector 'rdma' with options; those are shm, nixl, grpc, mooncake, ucxx, file"),
        ({"shm": 3}, "shm: 3 is not a JSON object"),
        ({"shm": {"threads": 3}}, "unknown key shm.threads; the keys there are throttle_bytes_s, copy_bytes"),
        ({"grpc": {"num_threads": 0}}, "grpc.num_threads: Input should be greater than or equal to 1"),
        ({"grpc": {"num_threads": True}}, "num-threads: must be a number"),
        ({"grpc": {"num_threads": "2"}}, "grpc.num_threads: Input should be a valid integer"),
        ({"shm": {"throttle_bytes_s": -1}}, "shm.throttle_bytes_s: Input should be greater than or equal to 0"),
        ({"nixl": {"backends": ["GDS"]}}, "nixl.backends.0: Input should be 'UCX'"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(values: Any, words: str) -> None:
    with pytest.raises(ConfigError, match="connector-options") as refused:
        read(values)
    assert words in refused.value.message


def test_services_refuse_them_before_they_start() -> None:
    text = json.dumps({"shm": {"copy_bytes": 1}})
    with pytest.raises(ConfigError, match=r"shm\.copy_bytes"):
        asyncio.run(check_engine(EngineConfig(connector_options=text, secret=SECRET)))
    with pytest.raises(ConfigError, match=r"shm\.copy_bytes"):
        asyncio.run(check(KVCacheConfig(connector_options=text, secret=SECRET)))


def test_options_of_a_connector_that_is_not_used_are_told() -> None:
    [line] = unused_options('{"nixl": {}, "shm": {}}', ["shm", "grpc"])
    assert line == "connector-options: nixl has no effect: connector is shm,grpc"


def test_every_connector_has_documented_options() -> None:
    for options in OPTIONS.values():
        assert all(field.description for field in options.model_fields.values())


def test_ucx_is_told_only_what_was_asked_for() -> None:
    assert NixlOptions().variables == {}
    assert NixlOptions(ucx_net_devices="eth0").variables == {"UCX_NET_DEVICES": "eth0"}


def test_a_throttle_books_pieces_one_after_the_other() -> None:
    throttle = Throttle(1000)
    before_s = time.monotonic()
    first_s, second_s = throttle.book(500), throttle.book(1000)
    assert first_s >= before_s + 0.5
    assert second_s - first_s == pytest.approx(1.0)
    assert throttle.piece_blocks(10, 10_000) == 5
    assert throttle.piece_blocks(10_000, 10) == 1


def test_without_a_limit_nothing_waits() -> None:
    throttle = Throttle(0)
    assert throttle.book(1 << 40) == 0.0
    assert throttle.piece_blocks(10, 100) == 10
