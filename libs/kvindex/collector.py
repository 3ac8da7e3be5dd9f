"""A KV index's counters for Prometheus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.kvindex.port import KvIndex


class KvIndexCollector(Collector):
    """Reads `KvIndex.stats` at each scrape."""

    def __init__(self, index: KvIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        """Look-ups, and what the store did not answer or take."""
        stats = self._index.stats()
        yield CounterMetricFamily(names.KV_INDEX_LOOKUPS_TOTAL, "Round trips for prefixes.", stats.lookups)
        yield CounterMetricFamily(
            names.KV_INDEX_LOOKUP_ERRORS_TOTAL, "Look-ups without an answer.", stats.lookup_errors
        )
        yield CounterMetricFamily(names.KV_INDEX_CHANGE_ERRORS_TOTAL, "Changes not taken.", stats.change_errors)
