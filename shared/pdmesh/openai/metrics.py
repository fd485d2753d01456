"""What the HTTP side counts. Names of the http_* families are those of vLLM's instrumentation."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

DURATION_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 30.0)


class ApiMetrics:
    """One per app."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "http_requests",
            "HTTP requests by route, method and status class.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self.duration = Histogram(
            "http_request_duration_seconds",
            "Seconds until the whole answer was sent.",
            ["handler", "method"],
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.in_flight = Gauge("pdmesh_api_requests_in_flight", "Generation requests being served.", registry=registry)
        self.outcomes = Counter(
            "pdmesh_api_requests",
            "Generation requests by how they ended: ok, client_gone, cancelled, or an error's name.",
            ["outcome"],
            registry=registry,
        )
        self.unknown_fields = Counter(
            "pdmesh_api_unknown_fields",
            "Fields in request bodies that no schema has; they are ignored.",
            registry=registry,
        )
        self.num_in_flight = 0

    def begin(self) -> None:
        self.num_in_flight += 1
        self.in_flight.set(self.num_in_flight)

    def end(self, outcome: str) -> None:
        self.num_in_flight -= 1
        self.in_flight.set(self.num_in_flight)
        self.outcomes.labels(outcome).inc()
