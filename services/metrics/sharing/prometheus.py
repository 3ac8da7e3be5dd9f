"""What comes of others' telling, for Prometheus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from services.metrics.sharing.sharing import Sharing


class SharingCollector(Collector):
    """Reads a `Sharing` at each scrape."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def collect(self) -> Iterator[Metric]:
        """What was not taken, by reason."""
        left_out = CounterMetricFamily(
            names.SHARED_LEFT_OUT_TOTAL, "Told by other instances and not taken.", labels=("reason",)
        )
        for reason, count in self._sharing.left_out.items():
            left_out.add_metric((reason.value,), count)
        yield left_out
