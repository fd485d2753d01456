"""A decode with too little room for its requests: they come back by every way there is, with the single engine's tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pdmesh.models.source import DEMO_MODEL
from support.mesh import Mesh, Service, mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

NUM_PROMPT, NUM_OUTPUT = 64, 180
PROMPTS = [[1000 + (37 * index * (number + 1)) % 20000 for index in range(NUM_PROMPT)] for number in range(4)]
BODY: dict[str, Any] = {
    "max_tokens": NUM_OUTPUT,
    "ignore_eos": True,
    "temperature": 0.8,
    "seed": 7,
    "presence_penalty": 0.4,
}
# Blocks of 32 tokens. Four begin with 12 and need 32 at their end: who gives way loses all that it has to the others.
BLOCK_BYTES = 30 * 3 * 2 * 64 * 32 * 2
DECODE_FLAGS = (
    "--kv-cache-memory-bytes", str(18 * BLOCK_BYTES + (1 << 16)), "--max-model-len", "512",
    "--preempted-fetch-min-tokens", "48", "--kvcache-spill-usage", "0.5",
)  # fmt: skip


def returned(decode: Service, source: str) -> float:
    return sum(
        value
        for key, value in decode.metrics().items()
        if key.startswith("pdmesh_preempted_total{") and f'source="{source}"' in key
    )


def tokens(running: Mesh, prompt: list[int], url: str) -> list[int]:
    answer = running.complete(prompt, url=url, **BODY)
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def crowd_until(running: Mesh, source: str, wanted: list[list[int]], *, rounds: int = 4) -> None:
    """Ask for all at once until some request came back by `source`; every answer is the single engine's."""
    decode = running.decode[0]
    for _ in range(rounds):
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            told = list(clients.map(lambda prompt: tokens(running, prompt, running.url), PROMPTS))
        assert told == wanted
        if returned(decode, source):
            return
    raise AssertionError(
        f"none came back by {source}: {[f'{k}={v}' for k, v in decode.metrics().items() if 'preempt' in k]}"
    )


def test_preempted_requests_come_back_by_every_way_with_the_same_tokens() -> None:
    with mesh(DEMO_MODEL, kvcache_flags=(), decode_flags=DECODE_FLAGS) as running:
        wanted = [tokens(running, prompt, running.prefill[0].http) for prompt in PROMPTS]
        crowd_until(running, "tier", wanted)
        assert running.kvcache is not None
        running.kvcache.kill()
        running.kvcache = None
        crowd_until(running, "offer", wanted)
        assert running.proxy is not None
        running.proxy.stop()
        running.start_proxy("--pd-min-prompt-tokens", "0", "--keep-offers-s", "0")
        crowd_until(running, "prefill", wanted)
        assert running.proxy.metric("pdmesh_proxy_preempted_total") > 0
        running.prefill.pop().kill()
        # Its health is its own, and the proxy's is that of any engine: before the list says so, and after.
        for url in (running.decode[0].http, running.url):
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        running.announce()
        crowd_until(running, "recompute", wanted)
        for url in (running.decode[0].http, running.url):
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        assert running.decode[0].metric("pdmesh_illegal_state_events_total") == 0
        running.wait_nothing_held()
