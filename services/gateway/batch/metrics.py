from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from libs.contracts import metric_names as names


class BatchMetrics:
    """The counts of this gateway's answers, and gauges over all jobs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lines = Counter(
            names.GATEWAY_BATCH_LINES, "Batch lines whose answers were committed", ("outcome",), registry=registry
        )
        self._commits = Counter(names.GATEWAY_BATCH_COMMITS, "Transactions of answers", registry=registry)

    def committed(self, ok: Sequence[bool]) -> None:
        """Count a transaction and its lines; each of `ok` says whether a line was answered without an error."""
        self._commits.inc()
        completed = sum(ok)
        self._lines.labels("completed").inc(completed)
        self._lines.labels("failed").inc(len(ok) - completed)

    def watch(
        self,
        *,
        in_flight: Callable[[], float],
        unfinished_jobs: Callable[[], float],
        late_jobs: Callable[[], float],
        left_lines: Callable[[], float],
        dropped_events: Callable[[], float],
    ) -> None:
        for name, text, read in (
            (names.GATEWAY_BATCH_IN_FLIGHT, "Batch lines that hold a slot", in_flight),
            (names.GATEWAY_BATCH_JOBS, "Jobs of the cluster that have not ended", unfinished_jobs),
            (names.GATEWAY_BATCH_LATE_JOBS, "Unfinished jobs that are expected to miss their window", late_jobs),
            (names.GATEWAY_BATCH_LEFT_LINES, "Lines of unfinished jobs without an answer", left_lines),
            (names.GATEWAY_BATCH_DROPPED_EVENTS, "Events of unknown jobs for which there was no room", dropped_events),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)
