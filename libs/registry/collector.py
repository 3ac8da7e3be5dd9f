"""A registry's counters for Prometheus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.registry.port import Registry


class RegistryCollector(Collector):
    """Reads `Registry.stats` at each scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Entries that were skipped."""
        stats = self._registry.stats()
        yield CounterMetricFamily(names.REGISTRY_SKIPPED_TOTAL, "Different entries that are no worker.", stats.skipped)
        yield GaugeMetricFamily(names.REGISTRY_UNUSABLE, "Entries of the last list that are no worker.", stats.unusable)
