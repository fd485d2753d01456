"""What the scheduler counts for the metrics."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Cumulative, since start; named as in `Stats`."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    nan_requests: int = 0
    illegal_events: int = 0
