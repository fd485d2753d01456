"""Each engine that the proxy uses and what it does now, looked up when somebody asks: load changes with every step."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdmesh_proxy.view import ClusterView, EngineView

ENGINE = ["engine", "address"]


class EngineCollector(Collector):
    """Shows the engines of the picture that the router gets."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = GaugeMetricFamily(
            "pdmesh_proxy_engine_state",
            "Engines in use, by what they are for and their state.",
            labels=[*ENGINE, "role", "state"],
        )
        sequences = GaugeMetricFamily(
            "pdmesh_proxy_engine_sequences", "Sequences that run or wait at an engine.", labels=ENGINE
        )
        usage = GaugeMetricFamily("pdmesh_proxy_engine_kv_usage_ratio", "Share of its KV blocks in use.", labels=ENGINE)
        context = GaugeMetricFamily(
            "pdmesh_proxy_engine_context_tokens", "Most tokens of a request that it holds.", labels=ENGINE
        )
        for engine in self._view().engines:
            name = [engine.engine_id, engine.address]
            states.add_metric([*name, _role(engine), _state(engine)], 1)
            sequences.add_metric(name, engine.num_sequences)
            usage.add_metric(name, engine.kv_usage)
            context.add_metric(name, engine.max_model_len)
        yield from (states, sequences, usage, context)


def _role(engine: EngineView) -> str:
    if engine.can_prefill and engine.can_decode:
        return "both"
    return "prefill" if engine.can_prefill else "decode"


def _state(engine: EngineView) -> str:
    if engine.draining:
        return "draining"
    return "resting" if engine.resting else "serving"
