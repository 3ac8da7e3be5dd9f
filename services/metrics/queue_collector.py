"""What waits, as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.runtime.clock import Clock
from services.metrics.queues import phase_queues
from services.metrics.state import MetricsState

LABELS = ("model", "phase")


class QueueCollector(Collector):
    """As of each scrape; what is not known has no sample rather than zero."""

    def __init__(self, state: MetricsState, clock: Clock) -> None:
        self._state = state
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """By model and phase."""
        requests = GaugeMetricFamily(names.QUEUE_REQUESTS, "Requests waiting at workers and gateways.", labels=LABELS)
        tokens = GaugeMetricFamily(names.QUEUE_PROMPT_TOKENS, "Prompt tokens to compute there.", labels=LABELS)
        fleet, now_ns = self._state.fleet, self._clock.now_ns()
        for queue in phase_queues(fleet.roll.loads(now_ns), fleet.clocks, self._state.gateways, now_ns):
            for family, count in ((requests, queue.requests), (tokens, queue.prompt_tokens)):
                if count is not None:
                    family.add_metric((queue.model, queue.phase), count)
        yield from (requests, tokens)
