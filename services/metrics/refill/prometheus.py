"""What the live reader has left out, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.policy.metrics.gaps import Gaps
from services.metrics.refill.refill import Partition


class GapCollector(Collector):
    """Reads `Gaps` at each scrape."""

    def __init__(self, gaps: Gaps[Partition]) -> None:
        self._gaps = gaps

    def collect(self) -> Iterator[Metric]:
        """Every fate has a sample, so that 0 is told."""
        yield CounterMetricFamily(
            names.TELEMETRY_JUMPS_TOTAL, "Times that a partition was read on at its end.", self._gaps.jumps
        )
        yield GaugeMetricFamily(
            names.TELEMETRY_GAP_RECORDS, "Records jumped over that are still to be read.", self._gaps.records
        )
        fates = CounterMetricFamily(
            names.TELEMETRY_GAP_RECORDS_TOTAL, "Records jumped over, by what became of them.", labels=("fate",)
        )
        for fate, count in self._gaps.fates.items():
            fates.add_metric((fate.value,), count)
        yield fates
