"""The proxy's generator over fake engines, in one event loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from pdmesh.openai.generator import TokenRequest
from pdmesh.protocol.messages import ChoiceDelta, SamplingParams
from pdmesh_proxy.cluster import Cluster
from pdmesh_proxy.config import ProxyConfig
from pdmesh_proxy.handler import MeshGenerator
from pdmesh_proxy.metrics import ProxyMetrics
from support.awaiting import until
from support.fake_engine import SECRET, FakeEngine

PROMPT = list(range(1, 101))
_numbers = itertools.count()


@dataclass
class FakeMesh:
    """What a test holds."""

    generator: MeshGenerator
    cluster: Cluster
    registry: CollectorRegistry

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def collect(self, request: TokenRequest) -> list[ChoiceDelta]:
        return [delta async for delta in self.generator.generate(request)]


@contextlib.asynccontextmanager
async def fake_mesh(*engines: FakeEngine, extra: dict[str, Any] | None = None) -> AsyncIterator[FakeMesh]:
    """Start the engines that are given, and a proxy that has found all of them."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        listed = {role: [e.address for e in engines if e.info.role in (role, "both")] for role in ("prefill", "decode")}
        async with proxy_over(**listed, extra=extra) as mesh:
            await until(lambda: len(mesh.cluster.view().engines) == len(engines))
            yield mesh


@contextlib.asynccontextmanager
async def proxy_over(
    *, prefill: Sequence[str], decode: Sequence[str], extra: dict[str, Any] | None = None
) -> AsyncIterator[FakeMesh]:
    """A proxy's generator over targets; beats are short so that tests need not wait."""
    settings: dict[str, Any] = {
        "model": "fake",
        "heartbeat_interval_s": 0.05,
        "heartbeat_timeout_s": 5.0,
        "engine_wait_timeout_s": 0.3,
        "resolve_interval_s": 0.05,
        "resolve_rest_interval_s": 0.05,
    } | (extra or {})
    config = ProxyConfig(prefill=list(prefill), decode=list(decode), **settings)
    registry = CollectorRegistry()
    metrics = ProxyMetrics(registry)
    async with Cluster(config, secret=SECRET, metrics=metrics) as cluster:
        generator = MeshGenerator(cluster, config=config, metrics=metrics)
        yield FakeMesh(generator, cluster, registry)


def token_request(
    prompt: Sequence[int] = PROMPT,
    *,
    deadline_s: float = 10.0,
    request_id: str = "",
    model_fingerprint: str = "",
    **sampling: Any,
) -> TokenRequest:
    sampling = {"max_tokens": 8} | sampling
    return TokenRequest(
        request_id=request_id or f"cmpl-{next(_numbers)}",
        token_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        deadline_s=deadline_s,
        model_fingerprint=model_fingerprint,
    )


def tokens_of(deltas: Sequence[ChoiceDelta], choice: int = 0) -> list[int]:
    return [token for delta in deltas if delta.choice == choice for token in delta.token_ids]


def finish_reasons(deltas: Sequence[ChoiceDelta]) -> dict[int, list[str]]:
    reasons: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.finish_reason:
            reasons.setdefault(delta.choice, []).append(delta.finish_reason)
    return reasons
