"""A prefill that restarts under its own name, as `pdmesh up` restarts it: decode must notice and go on fetching from it."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from pdmesh.errors import TransferFailed
from support.engines import RunningEngine, loop_thread, proxy_session, request, start_engines, tokens_of

PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def _restarted(prefill: RunningEngine, model: str, **settings: Any) -> RunningEngine:
    await prefill.stop()
    (again,) = await start_engines(model, "prefill", **settings)
    assert again.grpc == prefill.grpc
    return again


async def _complete(url: str, number: int, params: dict[str, Any], **fields: Any) -> httpx.Response:
    prompt = [4 + (13 * index + number) % 300 for index in range(60)]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "kv_transfer_params": params}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return await client.post("/v1/completions", json=body | fields)


async def _stock(prefill: RunningEngine, decode: RunningEngine, number: int) -> str:
    """Run both legs; the debug header of the second."""
    leg = await _complete(prefill.http, number, PREFILL_LEG, max_tokens=1)
    answer = await _complete(decode.http, number, leg.json()["kv_transfer_params"])
    assert answer.status_code == 200, answer.text
    return answer.headers["x-pdmesh-route"]


async def _ticket(prefill: RunningEngine, name: str) -> tuple[Any, bytes]:
    """Run the prefill leg; the decode leg's request."""
    made = request(name, num_prompt=60 + len(name))
    async with proxy_session(prefill.grpc, name) as session:
        deltas = await session.run(request(name, token_ids=made.token_ids, prefill_only=True))
    first = tokens_of(deltas)
    return request(name, token_ids=made.token_ids, ticket=deltas[-1].ticket, emitted=[first]), deltas[-1].ticket


def test_kv_is_fetched_from_a_prefill_that_has_restarted(tiny_model: str) -> None:
    """The peer that decode knew was never forgotten: begins succeeded at the new process, and every pull, made from the
    memory of the old one, ended stale."""
    settings = {"engine_id": "prefill-1", "grpc_port": _free_port()}

    async def stock() -> None:
        (decode,) = await start_engines(tiny_model, "decode")
        (prefill,) = await start_engines(tiny_model, "prefill", **settings)
        assert "kv=shm" in await _stock(prefill, decode, 1)
        prefill = await _restarted(prefill, tiny_model, **settings)
        for number in (2, 3):
            assert "kv=shm" in await _stock(prefill, decode, number)

        async with proxy_session(decode.grpc, "decode") as session:
            for name in ("a", "b"):
                made, _ = await _ticket(prefill, name)
                told = next(delta for delta in await session.run(made) if delta.token_ids)
                assert told.kv_source == "shm"
            old, _ = await _ticket(prefill, "old")
            prefill = await _restarted(prefill, tiny_model, **settings)
            new, _ = await _ticket(prefill, "new")
            with pytest.raises(TransferFailed, match="restarted"):
                await session.run(old)
            assert next(delta for delta in await session.run(new) if delta.token_ids).kv_source == "shm"
            # A ticket of a start that is over says nothing of the one that lives.
            with pytest.raises(TransferFailed, match="restarted"):
                await session.run(request("late", token_ids=old.token_ids, ticket=old.ticket, emitted=old.emitted))
        async with httpx.AsyncClient(base_url=decode.http, timeout=10) as client:
            metrics = (await client.get("/metrics")).text
        assert 'pdmesh_transfers_total{connector="shm"' in metrics
        await prefill.stop()
        await decode.stop()

    with loop_thread() as loop:
        loop.run(stock())
