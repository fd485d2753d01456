"""The proxy's metrics, all named `pdmesh_proxy_*`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

STAGE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Stage(StrEnum):
    """Parts of the time to the first tokens."""

    ROUTE = "route"
    """Arrival until a leg is on its way."""
    PREFILL = "prefill"
    """Prefill leg on its way until its first token."""
    HANDOFF = "handoff"
    """Decode leg on its way until decode holds the KV (or gave up on it)."""
    FIRST_DECODE = "first_decode"
    """Decode leg on its way until its first token."""
    WHOLE = "whole"
    """Whole request on its way to one engine until its first token there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """What one engine serves."""

    engine_id: str
    address: str
    role: str
    model: str
    fingerprint: str
    is_used: bool


class ProxyMetrics:
    """Registered once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            "pdmesh_proxy_requests",
            "Requests ended, by HTTP status (499: the client left) and routing reason.",
            ["status", "reason"],
            registry=registry,
        )
        self.in_flight = Gauge("pdmesh_proxy_requests_in_flight", "Requests not ended.", registry=registry)
        self.disconnects = Counter("pdmesh_proxy_disconnects", "Requests whose client left early.", registry=registry)
        self.legs = Counter(
            "pdmesh_proxy_legs", "Requests sent to engines, by kind of leg.", ["kind"], registry=registry
        )
        self.early_legs = Counter(
            "pdmesh_proxy_early_legs",
            "Decode legs sent together with their prefill leg, by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self.retries = Counter(
            "pdmesh_proxy_retries", "Legs that failed and went on elsewhere, by error.", ["error"], registry=registry
        )
        self.fallbacks = Counter(
            "pdmesh_proxy_fallbacks", "Disaggregation intended but not done, by reason.", ["reason"], registry=registry
        )
        self.preempted = Counter(
            "pdmesh_proxy_preempted",
            "Choices that an engine preempted and that run again, by where their KV was had.",
            ["source"],
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "pdmesh_proxy_time_to_first_token_seconds",
            "Arrival until the first token left for the client.",
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.stages = Histogram(
            "pdmesh_proxy_stage_seconds",
            "Parts of the time to the first tokens.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "pdmesh_proxy_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry
        )
        self.cached_tokens = Counter(
            "pdmesh_proxy_cached_tokens", "Prompt tokens that prefill did not have to compute.", registry=registry
        )
        self.output_tokens = Counter("pdmesh_proxy_output_tokens", "Tokens sent towards clients.", registry=registry)
        self.kv_bytes = Counter(
            "pdmesh_proxy_kv_bytes",
            "KV bytes that engines pulled for requests, by source.",
            ["source"],
            registry=registry,
        )
        self.stream_breaks = Counter(
            "pdmesh_proxy_stream_breaks", "Sessions with engines that broke.", registry=registry
        )
        self.buffer_overflows = Counter(
            "pdmesh_proxy_buffer_overflows", "Requests aborted because their client read too slowly.", registry=registry
        )
        self.engines = Gauge("pdmesh_proxy_engines", "Engines that can be used, by role.", ["role"], registry=registry)
        self.engines_resting = Gauge(
            "pdmesh_proxy_engines_resting",
            "Engines on which requests failed in a row, used where no other can be.",
            registry=registry,
        )
        self.engine_rests = Counter(
            "pdmesh_proxy_engine_rests", "Times an engine was set to rest after failures in a row.", registry=registry
        )
        self.engines_refused = Gauge(
            "pdmesh_proxy_engines_refused",
            "Engines that answer but serve another model than new requests go to, so are not used.",
            registry=registry,
        )
        self.model_switches = Counter(
            "pdmesh_proxy_model_switches", "Times that new requests began to go to another model.", registry=registry
        )
        self._engine_models = Gauge(
            "pdmesh_proxy_engine_models",
            "Engines that answer, with the model of each and its fingerprint; 1 where new requests go to it, else 0.",
            ["engine", "address", "role", "model", "fingerprint"],
            registry=registry,
        )
        self._unreached = Gauge(
            "pdmesh_proxy_engines_unreached",
            "Addresses that are listed as engines and with which there is no session, and why.",
            ["address", "why"],
            registry=registry,
        )
        self._unpaired = Gauge(
            "pdmesh_proxy_unpaired_engines",
            "Pairs of engines that cannot exchange KV, so do not disaggregate: what differs, and the settings to look at.",
            ["prefill", "decode", "why"],
            registry=registry,
        )

    def engine_models(self, shown: Sequence[EngineModel]) -> None:
        """Show these, and no others."""
        self._engine_models.clear()
        for each in shown:
            labels = (each.engine_id, each.address, each.role, each.model, each.fingerprint)
            self._engine_models.labels(*labels).set(each.is_used)

    def unreached(self, problems: Mapping[str, str]) -> None:
        """Show these addresses and why, and no others."""
        self._unreached.clear()
        for address, why in problems.items():
            self._unreached.labels(address, why).set(1)

    def unpaired(self, refusals: Mapping[tuple[str, str], str]) -> None:
        """Show these (prefill, decode) and why, and no others."""
        self._unpaired.clear()
        for (prefill, decode), why in refusals.items():
            self._unpaired.labels(prefill, decode, why).set(1)

    def watch(self, collector: Collector) -> None:
        """Show what is looked up when somebody asks."""
        self._registry.register(collector)
