"""What is observed once per token shows as prometheus_client's own histogram would."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdmesh.engine.server.token_histogram import TokenHistogram

BUCKETS = (0.01, 0.5, 1.0, 80)


def shown(registry: CollectorRegistry) -> list[str]:
    # When it was made is told by prometheus_client alone.
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("values", [[], [0.0, 0.01, 0.0100001, 0.7, 1.0, 79.0, 80.0, 81.0, 1e9], [0.02] * 100])
def test_it_shows_what_a_histogram_of_prometheus_client_shows(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = TokenHistogram("m:x_seconds", "Help.", labels=("a", "b"), values=("1", "2"), buckets=BUCKETS, registry=ours)
    its = Histogram("m:x_seconds", "Help.", ("a", "b"), registry=theirs, buckets=BUCKETS).labels("1", "2")
    for value in values:
        mine.observe(value)
        its.observe(value)
    assert shown(ours) == shown(theirs)
