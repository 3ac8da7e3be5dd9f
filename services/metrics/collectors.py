"""Prometheus metrics of queues, verdict, shared telemetry and refilled history, read at each scrape."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.policy.metrics.gaps import Gaps
from libs.policy.verdict.cause import CauseCode
from libs.policy.verdict.state import ModelState
from libs.runtime.clock import Clock
from services.metrics.accounting.queues import phase_queues
from services.metrics.refill import Partition
from services.metrics.sharing import Sharing
from services.metrics.state import MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import MAX_PRESSURE, firing_codes


class GapCollector(Collector):
    """Gaps of the live reader as Prometheus metrics, read at each scrape."""

    def __init__(self, gaps: Gaps[Partition]) -> None:
        self._gaps = gaps

    def collect(self) -> Iterator[Metric]:
        # Every fate has a sample, so that 0 is shown.
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


class SharingCollector(Collector):
    """Rejected records of other instances as Prometheus metrics, read at each scrape."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def collect(self) -> Iterator[Metric]:
        left_out = CounterMetricFamily(
            names.SHARED_LEFT_OUT_TOTAL, "Sent by other instances and not taken.", labels=("reason",)
        )
        for reason, count in self._sharing.left_out.items():
            left_out.add_metric((reason.value,), count)
        yield left_out


LABELS = ("model", "phase")


class QueueCollector(Collector):
    """Queue lengths at each scrape; unknown values have no sample rather than zero."""

    def __init__(self, state: MetricsState, clock: Clock) -> None:
        self._state = state
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        requests = GaugeMetricFamily(names.QUEUE_REQUESTS, "Requests waiting at workers and gateways.", labels=LABELS)
        tokens = GaugeMetricFamily(names.QUEUE_PROMPT_TOKENS, "Prompt tokens to compute there.", labels=LABELS)
        fleet, now_ns = self._state.fleet, self._clock.now_ns()
        for queue in phase_queues(fleet.directory.loads(now_ns), fleet.clocks, self._state.gateways, now_ns):
            for family, count in ((requests, queue.requests), (tokens, queue.prompt_tokens)):
                if count is not None:
                    family.add_metric((queue.model, queue.phase), count)
        yield from (requests, tokens)


class VerdictCollector(Collector):
    """Pressures and the verdict at the last evaluation; unknown values have no sample rather than zero."""

    def __init__(self, verdicts: VerdictEvaluator) -> None:
        self._verdicts = verdicts

    def collect(self) -> Iterator[Metric]:
        pressure = GaugeMetricFamily(
            names.PRESSURE,
            "Work over what there is for it; above 1 it grows into a queue.",
            labels=("model", "phase"),
        )
        verdict = GaugeMetricFamily(names.VERDICT, "1 where it holds the model up.", labels=("model", "code"))
        seen = self._verdicts.seen
        firing = firing_codes(seen.verdict.causes) if seen else frozenset()
        for each in seen.models if seen else ():
            if isinstance(each, ModelState):
                found = each.pressures
                for phase, value in (
                    ("prefill", found.prefill),
                    ("decode", found.decode),
                    ("decode_batch", found.batch),
                    ("decode_kv", found.kv),
                    ("cluster", found.cluster),
                ):
                    pressure.add_metric((each.model, phase), min(value, MAX_PRESSURE))
            own = [code for model, code in firing if model == each.model]
            calm = (
                CauseCode.UNKNOWN
                if not isinstance(each, ModelState)
                else CauseCode.IDLE
                if each.at_rest
                else CauseCode.BALANCED
            )
            for code in CauseCode:
                verdict.add_metric((each.model, code), code in own or (not own and code is calm))
        yield pressure
        yield verdict
