"""All metrics of an engine service: vLLM's names and labels where it has the thing, `pdmesh_` where it has not.

The core's statistics are cumulative since its start, so counters made of them are collected, not incremented.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdmesh.engine.messages import CoreReady
from pdmesh.engine.server.identity import Identity
from pdmesh.engine.server.load import LoadBoard
from pdmesh.engine.server.token_histogram import TokenHistogram

# Bucket edges as vLLM's dashboards expect them.
HANDOFF_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
NIXL_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
NIXL_BYTES = (2**10, *(2**power for power in range(13, 34)))

ADMISSION_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
"""Settings that a request may be refused for; the labels of vllm:admission_rejections."""
LABELS = ("model_name", "engine")
# Statistics of the core: family, help, whether it is a counter, and how to read it from the board.
CORE_FAMILIES = (
    ("vllm:num_requests_running", "Requests in the running batch.", False, "num_running"),
    ("vllm:num_requests_waiting", "Requests waiting to be scheduled.", False, "num_waiting"),
    ("vllm:num_preemptions", "Requests preempted for lack of KV blocks.", True, "num_preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the local prefix cache.", True, "prefix_cache_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the local prefix cache.", True, "prefix_cache_hits"),
    ("vllm:external_prefix_cache_queries", "Prompt tokens looked up outside this engine.", True, "external_queries"),
    ("vllm:external_prefix_cache_hits", "Prompt tokens loaded from outside this engine.", True, "external_hits"),
    ("vllm:corrupted_requests", "Requests whose logits held NaN.", True, "nan_requests"),
    (
        "pdmesh_illegal_state_events",
        "Requests that failed because the engine's states forbid what happened to them: a defect of this engine.",
        True,
        "illegal_events",
    ),
    (
        "pdmesh_core_undecodable_messages",
        "Messages between server and core that could not be decoded.",
        True,
        "undecodable_messages",
    ),
    (
        "pdmesh_kv_staging_lanes_used",
        "Parts of the staging area in which KV of another layout lies.",
        False,
        "num_lanes_used",
    ),
    ("pdmesh_engine_steps", "Steps of the engine core.", True, "steps"),
    ("pdmesh_engine_max_step_tokens", "Most tokens that one step has had, tokens.", False, "max_step_tokens"),
    ("pdmesh_kv_blocks_used", "KV blocks referenced by requests or offers.", False, "num_blocks_used"),
    (
        "pdmesh_kv_blocks_quarantined",
        "KV blocks that nobody wants and that a peer may still write.",
        False,
        "num_blocks_quarantined",
    ),
    ("pdmesh_pushed_tokens", "Prompt tokens found because they had been pushed here.", True, "pushed_tokens"),
    (
        "pdmesh_requests_told_ahead",
        "Requests that went on by a notice of the core that had computed their prompt.",
        True,
        "told_ahead",
    ),
    ("pdmesh_kv_blocks", "KV blocks in the pool.", False, "num_blocks"),
    ("pdmesh_offers_held", "Offers whose blocks the core holds.", False, "num_offers_held"),
)


class EngineMetrics:
    """Creates every family in `registry`, labelled with the served model and engine "0"."""

    def __init__(
        self,
        registry: CollectorRegistry,
        identity: Identity,
        ready: CoreReady,
        board: LoadBoard,
        connector_fallbacks: Mapping[str, int],
        connectors_regained: Mapping[str, int],
    ) -> None:
        values = (identity.model_name, "0")
        tokens = _token_buckets(ready.max_model_len)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=registry).labels(*values)

        def by(name: str, text: str, *extra: str) -> "Labelled":
            return Labelled(Counter(name, text, (*LABELS, *extra), registry=registry), values)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, registry=registry, buckets=buckets).labels(*values)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that began to answer.")
        self.prompt_tokens_cached = counter("vllm:prompt_tokens_cached", "Prompt tokens not computed here.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.request_success = by("vllm:request_success", "Requests that ended, by reason.", "finished_reason")
        self.admission_rejections = by("vllm:admission_rejections", "Requests refused at a bound.", "reason")
        for limit in ADMISSION_LIMITS:
            # There from the start, so that a rate over the first refusal is one.
            self.admission_rejections.inc(limit, amount=0)
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to first token, seconds.", TTFT_S)
        self.itl = TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Between tokens of one choice, seconds.",
            labels=LABELS,
            values=values,
            buckets=ITL_S,
            registry=registry,
        )
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end, seconds.", LATENCY_S)
        self.queue_time = histogram("vllm:request_queue_time_seconds", "Waiting for a first step, seconds.", LATENCY_S)
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "First step to the end, seconds.", LATENCY_S
        )
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "First step to first token, seconds.", LATENCY_S
        )
        self.decode_time = histogram("vllm:request_decode_time_seconds", "First token to the last, seconds.", LATENCY_S)
        self.time_per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, seconds.", ITL_S
        )
        self.params_n = histogram("vllm:request_params_n", "Choices asked for.", (1, 2, 5, 10, 20))
        self.params_max_tokens = histogram("vllm:request_params_max_tokens", "Most tokens asked for.", tokens)
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", tokens)
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated per request.", tokens
        )
        self.iteration_tokens = histogram("vllm:iteration_tokens_total", "Tokens per engine step.", STEP_TOKENS)
        self.nixl_time = histogram("vllm:nixl_xfer_time_seconds", "Duration of NIXL pulls, seconds.", NIXL_S)
        self.nixl_bytes = histogram("vllm:nixl_bytes_transferred", "Bytes per NIXL pull.", NIXL_BYTES)
        self.nixl_failed = counter("vllm:nixl_num_failed_transfers", "NIXL pulls that failed.")
        self.nixl_expired = counter("vllm:nixl_num_kv_expired_reqs", "Offers that ended by their lease.")

        self.transfers = by(
            "pdmesh_transfers", "Pulls by this engine, by outcome.", "outcome", "reason", "connector", "source"
        )
        self.converted = by(
            "pdmesh_transfers_converted",
            "Pulls of blocks of another layout, by outcome.",
            "outcome",
            "numbers",
            "connector",
        )
        self.transfer_bytes = by("pdmesh_transfer_bytes", "Bytes pulled by this engine.", "connector", "source")
        self.pushes_received = by(
            "pdmesh_pushes_received", "Pushes that this engine was told to expect, by outcome.", "outcome", "reason"
        )
        self.pushes_over = by(
            "pdmesh_pushes_over", "Expected pushes that nobody waits for any more, by why; claimed: used.", "why"
        )
        self.pushes_sent = by("pdmesh_pushes_sent", "Pushes by this engine, by outcome.", "outcome", "reason")
        self.push_bytes = by("pdmesh_push_bytes", "Bytes pushed by and to this engine.", "direction")
        self.kv_damaged = counter(
            "pdmesh_kv_damaged_blocks",
            "KV blocks of this engine whose bytes changed in memory; it let go of its cache.",
        )
        self.offers_ended = by("pdmesh_offers_ended", "Offers of this engine that ended, by how.", "reason")
        self.tier_lookups = by("pdmesh_tier_lookups", "Lookups in the tier, by outcome.", "outcome")
        self.tier_hit_blocks = counter("pdmesh_tier_hit_blocks", "Blocks that lookups found in the tier.")
        self.tier_stores = by("pdmesh_tier_stores", "Blocks offered to the tier, by outcome.", "outcome")
        self.unpublished = by(
            "pdmesh_offers_unpublished",
            "Offers that a connector that copies them could not make available.",
            "connector",
        )
        self.remade = by(
            "pdmesh_offer_directories_remade",
            "Times that the directory a connector copies offers to was removed under it, and was made anew.",
            "connector",
        )
        self.handoff = LabelledHistogram(
            Histogram(
                "pdmesh_handoff_seconds",
                "Time of a handoff's stages: sealed and handed out here, or begun, pulled and resumed here.",
                (*LABELS, "stage"),
                registry=registry,
                buckets=HANDOFF_S,
            ),
            values,
        )
        self.handoff_clock = LabelledGauge(
            Gauge(
                "pdmesh_handoff_clock_seconds",
                "When the last handoff's prompt was computed here, or its next step began here, by the monotonic clock.",
                (*LABELS, "event"),
                registry=registry,
            ),
            values,
        )
        self.damaged = by(
            "pdmesh_damaged_pulls",
            "Pulls whose bytes came over a connector otherwise than their owner had summed them, wherever they went on.",
            "connector",
        )
        self.fallbacks = by("pdmesh_fallbacks", "Intended KV transfers that were not done, by reason.", "reason")
        self.probe_failures = by(
            "pdmesh_connector_probe_failures",
            "Times a connector could not pull a block of this engine's own pool; while it cannot it is not offered.",
            "connector",
        )
        self.connector_proved = Gauge(
            "pdmesh_connector_proved",
            "1 where the connector has pulled a block of this engine's own pool, 0 where it could not, or has not tried.",
            (*LABELS, "connector"),
            registry=registry,
        )
        self.core_silences = counter(
            "pdmesh_core_silences", "Times the engine core did not answer for too long while requests ran."
        )
        self.preempted = by(
            "pdmesh_preempted",
            "Preempted choices that came back, by where their KV was had: local, tier, offer, prefill (elsewhere), recompute.",
            "source",
        )
        for source in ("local", "tier", "offer", "prefill", "recompute"):
            self.preempted.inc(source, amount=0)
        self.unexpected_errors = by("pdmesh_unexpected_errors", "Faults of this engine's own code, by place.", "place")
        self.sessions_aborted = by("pdmesh_sessions_aborted", "Proxy sessions ended with work left.", "reason")

        info = Gauge(
            "vllm:cache_config_info",
            "Facts of the KV cache.",
            ("engine", "block_size", "num_gpu_blocks", "block_bytes", "cache_dtype", "backend"),
            registry=registry,
        )
        info.labels("0", ready.block_size, ready.num_blocks, ready.block_bytes, ready.kv_dtype, ready.backend).set(1)
        computes = Gauge(
            "pdmesh_backend_info",
            "What computes; fallback says why it is PyTorch where the CPU library was wanted.",
            ("engine", "backend", "instruction_set", "fallback"),
            registry=registry,
        )
        computes.labels("0", ready.backend, ready.instruction_set, ready.backend_fallback).set(1)
        expanded = Gauge(
            "pdmesh_expanded_weights",
            "Weight matrices that the checkpoint has in fewer bits and the engine in 16, by reason.",
            ("engine", "reason"),
            registry=registry,
        )
        for reason, count in ready.expanded_weights.items():
            expanded.labels("0", reason).set(count)
        registry.register(_CoreCollector(board, values, connector_fallbacks, connectors_regained))


class Labelled:
    """A counter whose model and engine labels are filled in."""

    def __init__(self, family: Counter, values: tuple[str, ...]) -> None:
        self._family = family
        self._values = values

    def inc(self, *labels: str, amount: float = 1) -> None:
        self._family.labels(*self._values, *labels).inc(amount)


class LabelledHistogram:
    """A histogram whose model and engine labels are filled in."""

    def __init__(self, family: Histogram, values: tuple[str, ...]) -> None:
        self._family = family
        self._values = values

    def observe(self, label: str, amount: float) -> None:
        self._family.labels(*self._values, label).observe(amount)


class LabelledGauge:
    """A gauge whose model and engine labels are filled in."""

    def __init__(self, family: Gauge, values: tuple[str, ...]) -> None:
        self._family = family
        self._values = values

    def set(self, label: str, amount: float) -> None:
        self._family.labels(*self._values, label).set(amount)


class _CoreCollector(Collector):
    """Shows the core's latest statistics whenever someone asks."""

    def __init__(
        self,
        board: LoadBoard,
        values: tuple[str, ...],
        connector_fallbacks: Mapping[str, int],
        connectors_regained: Mapping[str, int],
    ) -> None:
        self._board = board
        self._values = values
        self._connector_fallbacks = connector_fallbacks
        self._connectors_regained = connectors_regained

    def collect(self) -> Iterator[Metric]:
        stats = self._board.stats
        for name, text, is_counter, field in CORE_FAMILIES:
            make = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = make(name, text, labels=LABELS)
            family.add_metric(self._values, getattr(stats, field))
            yield family
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=LABELS)
        usage.add_metric(self._values, stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0)
        yield usage
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting: for room in a step (capacity), or for something else (deferred).",
            labels=(*LABELS, "reason"),
        )
        waiting.add_metric((*self._values, "capacity"), stats.num_waiting)
        waiting.add_metric((*self._values, "deferred"), stats.num_waiting_remote)
        yield waiting
        offers = GaugeMetricFamily("pdmesh_offers_open", "Offers that consumers may still begin.", labels=LABELS)
        offers.add_metric(self._values, self._board.num_offers)
        yield offers
        reading = GaugeMetricFamily("pdmesh_transfers_reading", "Pulls by others that read here now.", labels=LABELS)
        reading.add_metric(self._values, self._board.num_transfers)
        yield reading
        fallbacks = CounterMetricFamily(
            "pdmesh_connector_fallbacks",
            "Times a connector could not reach a peer and the next was tried.",
            labels=(*LABELS, "connector"),
        )
        for connector, count in self._connector_fallbacks.items():
            fallbacks.add_metric((*self._values, connector), count)
        yield fallbacks
        regained = CounterMetricFamily(
            "pdmesh_connectors_regained",
            "Times a connector reached a peer again that had been given up for the next one.",
            labels=(*LABELS, "connector"),
        )
        for connector, count in self._connectors_regained.items():
            regained.add_metric((*self._values, connector), count)
        yield regained


def _token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1-2-5 series up to the context length."""
    edges: list[float] = []
    scale = 1
    while scale <= max_model_len:
        edges += [scale * step for step in (1, 2, 5) if scale * step <= max_model_len]
        scale *= 10
    return tuple(edges or [1.0])
