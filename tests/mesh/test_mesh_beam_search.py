"""A beam search through the proxy: the beams of one engine, found by one engine, whatever else the mesh has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.mesh import mesh
from support.tiny_models import make_tiny

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

BODY: dict[str, Any] = {
    "prompt": list(range(10, 90)),
    "use_beam_search": True,
    "n": 4,
    "max_tokens": 24,
    "ignore_eos": True,
    "return_token_ids": True,
}


def tokens(answer: httpx.Response) -> list[list[int]]:
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_a_search_stays_on_one_decode_and_finds_what_an_engine_alone_finds(tmp_path: Path) -> None:
    model = str(make_tiny("llama", tmp_path / "model"))
    with mesh(model, prefill=1, decode=2, engine_flags=("--kv-cache-memory-bytes", str(8 << 20))) as running:
        answer = httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60)
        found = tokens(answer)
        assert len({tuple(each) for each in found}) == 4
        route = answer.headers["x-pdmesh-route"]
        assert "reason=beam_search" in route
        computed = {engine.facts["engine_id"]: engine.metric("vllm:prompt_tokens_total") for engine in running.decode}
        busy = [engine_id for engine_id, number in computed.items() if number]
        assert [f"decode={engine_id}" for engine_id in busy] == [
            part for part in route.split("; ") if part.startswith("decode=")
        ]
        assert running.prefill[0].metric("vllm:prompt_tokens_total") == 0
        alone = httpx.post(f"{running.prefill[0].http}/v1/completions", json=BODY, timeout=60)
        assert tokens(alone) == found
        assert "reason=beam_search" in alone.headers["x-pdmesh-route"]
