"""A histogram for what happens once per token: an observation is one entry of a list.

prometheus_client's own takes locks and walks its buckets, which at 32 tokens a step was a tenth of what the server does.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """Registered under `name` with fixed labels. Belongs to one thread; whoever collects may see an observation in part."""

    def __init__(
        self,
        name: str,
        text: str,
        *,
        labels: tuple[str, ...],
        values: tuple[str, ...],
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels, self._values = name, text, labels, values
        self._edges = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._edges), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(self._values, buckets, self._sum)
        yield family
