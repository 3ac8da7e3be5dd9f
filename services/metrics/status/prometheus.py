from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from libs.policy.verdict.cause import CauseCode
from libs.policy.verdict.state import ModelState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import MAX_PRESSURE, firing_codes


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
