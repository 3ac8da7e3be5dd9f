"""A Prometheus collector of the counters of a bus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.bus.port import Bus
from libs.contracts import metric_names as names


class BusCollector(Collector):
    """A collector that reads `Bus.stats` at each scrape."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def collect(self) -> Iterator[Metric]:
        """Yield the records published, dropped, skipped, and waiting to be sent."""
        stats = self._bus.stats()
        yield CounterMetricFamily(names.BUS_PUBLISHED_TOTAL, "Records given to the bus.", stats.published)
        yield CounterMetricFamily(
            names.BUS_DROPPED_TOTAL, "Records given up because the buffer was full.", stats.dropped
        )
        skipped = CounterMetricFamily(
            names.BUS_SKIPPED_TOTAL,
            "Records skipped as unreadable, or for the field that is out of its range.",
            labels=("topic", "reason"),
        )
        for labels, count in sorted(stats.skipped.items()):
            skipped.add_metric(labels, count)
        yield skipped
        yield GaugeMetricFamily(names.BUS_BUFFERED_RECORDS, "Records that the broker has not taken.", stats.buffered)
