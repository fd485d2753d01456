"""vLLM's kv_transfer_params as clients send them: read, checked, and given back in the same names."""

from typing import Any

import pytest

from pdmesh.engine.server.transfer_params import check_prompt, offered, parse, remote_kv
from pdmesh.errors import InvalidRequest
from pdmesh.protocol.messages import GroupBlocks

PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def _offered(address: str = "127.0.0.1:8101") -> dict[str, object]:
    return offered(
        engine_id="prefill-1",
        offer_id="offer-1",
        address=address,
        groups=[GroupBlocks(group=0, block_ids=[3, 4], generations=[9, 9])],
        num_tokens=20,
        num_cached=0,
    )


def test_a_prefill_legs_nulls_are_accepted() -> None:
    params = parse(PREFILL_LEG)
    assert params.do_remote_decode
    assert not params.do_remote_prefill


def test_what_a_prefill_gives_back_is_what_a_decode_takes() -> None:
    remote = remote_kv(parse(_offered()))
    assert (remote.engine_id, remote.offer_id, remote.address) == ("prefill-1", "offer-1", "127.0.0.1:8101")
    assert remote.groups == [GroupBlocks(group=0, block_ids=[3, 4], generations=[])]
    assert remote.num_tokens == 20


def test_an_ipv6_address_survives_the_round_trip() -> None:
    assert remote_kv(parse(_offered("[::1]:8101"))).address == "[::1]:8101"


def test_a_flat_block_list_is_one_group() -> None:
    assert remote_kv(parse(_offered() | {"remote_block_ids": [5, 6]})).groups[0].block_ids == [5, 6]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"remote_port": "8101"}, "kv_transfer_params.remote_port"),
        ({"remote_port": 70000}, "kv_transfer_params.remote_port"),
        ({"remote_num_tokens": 0}, "kv_transfer_params.remote_num_tokens"),
        ({"remote_num_tokens": -1}, "kv_transfer_params.remote_num_tokens"),
        ({"remote_num_tokens": 10**30}, "kv_transfer_params.remote_num_tokens"),
        ({"remote_engine_id": None}, "kv_transfer_params.remote_engine_id"),
        ({"remote_request_id": ""}, "kv_transfer_params.remote_request_id"),
        ({"remote_host": 5}, "kv_transfer_params.remote_host"),
        ({"remote_block_ids": [[1, -2]]}, "kv_transfer_params.remote_block_ids"),
        ({"remote_block_ids": [[1, "x"]]}, "kv_transfer_params.remote_block_ids"),
        ({"remote_block_ids": None}, "kv_transfer_params.remote_block_ids"),
        ({"do_remote_decode": True}, "kv_transfer_params.do_remote_prefill"),
        ({"tp_size": 2}, "kv_transfer_params.tp_size"),
        ({"transfer_mode": "push"}, "kv_transfer_params.transfer_mode"),
        ({"surprise": 1}, "kv_transfer_params.surprise"),
    ],
)
def test_a_bad_value_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        remote_kv(parse(_offered() | change))
    assert (refused.value.param or "").startswith(field)


def test_prompt_ids_of_a_router_must_be_the_prompts() -> None:
    params = parse({"do_remote_prefill": True, "prompt_token_ids": [1, 2, 3]})
    check_prompt(params, [1, 2, 3])
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        check_prompt(params, [1, 2])
