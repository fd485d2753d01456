"""vLLM's own P/D flow over plain HTTP: prefill leg, params, decode leg, as curl or a stock router would do it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

PROMPT = "The first ten prime numbers, written out one after the other with a short remark on each of them, are"
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def post(url: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_stock_flow_moves_kv_and_gives_the_same_text(shm_mesh: Mesh, endpoint: str) -> None:
    prefill, decode = shm_mesh.prefill[0], shm_mesh.decode[0]
    asked = {"prompt": PROMPT} if endpoint == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body = {**asked, "temperature": 0, "max_tokens": 10}
    alone = post(f"{prefill.http}/v1/{endpoint}", body)

    leg = post(f"{prefill.http}/v1/{endpoint}", {**body, "max_tokens": 1, "kv_transfer_params": ASK})
    params = leg["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    before = decode.metric("pdmesh_transfer_bytes_total")
    answer = post(f"{decode.http}/v1/{endpoint}", {**body, "kv_transfer_params": params})
    assert answer["choices"] == alone["choices"]
    assert decode.metric("pdmesh_transfer_bytes_total") > before
    shm_mesh.wait_nothing_held()


def test_params_that_name_no_offer_or_no_peer_are_refused(shm_mesh: Mesh) -> None:
    prefill, decode = shm_mesh.prefill[0], shm_mesh.decode[0]
    body = {"prompt": PROMPT + " again", "temperature": 0, "max_tokens": 4}
    leg = post(f"{prefill.http}/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": ASK})
    params = leg["kv_transfer_params"]
    foreign_host = {**params, "remote_host": "192.0.2.1"}
    answer = post(f"{decode.http}/v1/completions", {**body, "kv_transfer_params": foreign_host}, status=403)
    assert "kv-peers" in answer["error"]["message"]
    wrong_type = {**params, "remote_port": "not a port"}
    answer = post(f"{decode.http}/v1/completions", {**body, "kv_transfer_params": wrong_type}, status=400)
    assert "remote_port" in answer["error"]["message"]


def test_client_cannot_bring_kv_params_or_a_ticket_to_the_proxy(shm_mesh: Mesh) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    for field, value in (("kv_transfer_params", ASK), ("ticket", "Zm9yZ2Vk")):
        answer = post(f"{shm_mesh.url}/v1/completions", {**body, field: value}, status=400)
        assert field in answer["error"]["message"]
