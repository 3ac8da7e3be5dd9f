"""Prometheus collectors for the worker registry and the KV index, read at each scrape."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.stores.kvindex import KvIndex
from libs.stores.registry import Registry


class RegistryCollector(Collector):
    """A collector of the registry entries that were skipped."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        stats = self._registry.stats()
        yield CounterMetricFamily(names.REGISTRY_SKIPPED_TOTAL, "Different entries that are no worker.", stats.skipped)
        yield GaugeMetricFamily(names.REGISTRY_UNUSABLE, "Entries of the last list that are no worker.", stats.unusable)


class KvIndexCollector(Collector):
    """A collector of look-ups, and of calls that the store failed to answer or accept."""

    def __init__(self, index: KvIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        stats = self._index.stats()
        yield CounterMetricFamily(names.KV_INDEX_LOOKUPS_TOTAL, "Round trips for prefixes.", stats.lookups)
        yield CounterMetricFamily(
            names.KV_INDEX_LOOKUP_ERRORS_TOTAL, "Look-ups without an answer.", stats.lookup_errors
        )
        yield CounterMetricFamily(names.KV_INDEX_CHANGE_ERRORS_TOTAL, "Changes not taken.", stats.change_errors)
