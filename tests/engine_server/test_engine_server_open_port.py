"""An engine whose HTTP port others can reach hands over only behind an API key."""

from __future__ import annotations

from typing import Any

import httpx

from support.engines import loop_thread, start_engines

BODY = {"prompt": [4, 5, 6, 7] * 8, "max_tokens": 1, "temperature": 0}
PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


def test_an_open_port_takes_no_handoff_without_a_key(tiny_model: str) -> None:
    """Anyone could have pinned blocks, or fetched what the engine may fetch. 127.0.0.2 counts as an address of others."""

    async def ask(port: int, key: str = "", **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.2:{port}", headers=headers, timeout=30) as client:
            return await client.post("/v1/completions", json=BODY | fields)

    async def scenario() -> None:
        opened, keyed = [
            (await start_engines(tiny_model, "prefill", host="127.0.0.2", api_key=keys))[0] for keys in ([], ["key"])
        ]
        try:
            port = opened.life.facts["http_port"]
            assert (await ask(port)).status_code == 200
            refused = await ask(port, kv_transfer_params=PREFILL_LEG)
            assert refused.status_code == 403
            assert "--api-key" in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == "kv_transfer_params"
            port = keyed.life.facts["http_port"]
            assert (await ask(port, kv_transfer_params=PREFILL_LEG)).status_code == 401
            taken = await ask(port, "key", kv_transfer_params=PREFILL_LEG)
            assert taken.json()["kv_transfer_params"]["do_remote_prefill"] is True
        finally:
            await opened.stop()
            await keyed.stop()

    with loop_thread() as loop:
        loop.run(scenario())
