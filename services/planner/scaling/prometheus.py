from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.contracts import metric_names as names
from services.planner.inputs.plans import HeardPlans
from services.planner.scaling.scaler import Scaler
from services.planner.state import PlannerState


class ScalerCollector(Collector):
    """The scaler's metrics, read at each scrape."""

    def __init__(self, scaler: Scaler, state: PlannerState, plans: HeardPlans) -> None:
        self._scaler = scaler
        self._state = state
        self._plans = plans

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            names.PLANNER_ACTUATOR_CALLS_TOTAL, "Times that an actuator was asked.", labels=("outcome",)
        )
        for outcome, count in self._scaler.asked.items():
            calls.add_metric((outcome.value,), count)
        yield calls
        wished = GaugeMetricFamily(names.PLANNER_WISHED_WORKERS, "Workers that are to have a role.", labels=("model",))
        for model, wish in self._state.wishes.items():
            wished.add_metric((model,), wish.serving)
        yield wished
        forecast = GaugeMetricFamily(
            names.PLANNER_FORECAST_WORKERS,
            "Workers that a capacity plan wishes by the time that they could have started.",
            labels=("model", "phase"),
        )
        for model, pools in self._scaler.forecast.items():
            for phase, count in pools.items():
                forecast.add_metric((model, phase), count)
        yield forecast
        heard = CounterMetricFamily(
            names.PLANNER_CAPACITY_PLANS_TOTAL, "Capacity plans that came over the bus.", labels=("outcome",)
        )
        for taken, count in self._plans.taken.items():
            heard.add_metric((taken.value,), count)
        yield heard
