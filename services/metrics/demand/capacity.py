"""Capacity plans, made on request and periodically, so that alerts precede a shortage."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Final

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libs.capacity.inputs import input_json, input_of
from libs.contracts import metric_names as names
from libs.contracts.errors import FulcrumError, QueueFull
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import CapacityPlan as PlanMessage
from libs.demand.wire import plan_message
from libs.policy.alerts.rules import PoolAhead, capacity_conditions
from libs.policy.capacity import PHASES, CapacityPlan
from libs.runtime.clock import Clock
from libs.runtime.paths import cache_dir
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.demand.forecasts import FRESH_S, Forecasts, WorkerKinds, workers_there
from services.metrics.demand.keeping import DemandKeeper
from services.metrics.state import MetricsState

log = structlog.get_logger()

MAX_PLANS: Final = 8
"""The maximum number of plans that may wait; further ones are refused."""
MOST_MODELS: Final = 4
"""The maximum number of models that are planned for periodically, the busiest first."""
HORIZON_S: Final = 86_400.0
"""The time that capacity alerts look ahead."""
LEAST_EVERY_S: Final = 5.0
REPEAT_S: Final = 30.0
"""The interval at which plans are published again, for planners that have started meanwhile."""
PublishPlan = Callable[[PlanMessage], None]


@dataclass(frozen=True, slots=True)
class PlanWatch:
    """The parameters of the plans behind alerts."""

    slo: str
    """The service level to plan for; empty if no alerts are wanted."""
    confidence: float
    start_s: float
    """The time that a worker takes to start; 0 if unknown."""


class Capacity(Collector):
    """The capacity planner, which makes one plan at a time in a separate process."""

    def __init__(
        self,
        *,
        keeper: DemandKeeper,
        forecasts: Forecasts,
        kinds: WorkerKinds,
        state: MetricsState,
        desk: AlertEvaluator,
        clock: Clock,
        watch: PlanWatch,
        publish: PublishPlan,
        metrics_id: str,
    ) -> None:
        self.plans: dict[str, dict[str, Any]] = {}
        """The plan behind each model's last alerts."""
        self.failures = 0
        self._keeper = keeper
        self._forecasts = forecasts
        self._kinds = kinds
        self._state = state
        self._desk = desk
        self._clock = clock
        self._watch = watch
        self._publish = publish
        self._metrics_id = metrics_id
        self._published: dict[str, PlanMessage] = {}
        """The last published plan of each model."""
        self._pool: ProcessPoolExecutor | None = None
        self._lock = asyncio.Lock()
        self._plans = 0

    async def input(self, model: str, horizon_s: float) -> dict[str, Any]:
        """Return the input of a model's plan, or of the busiest model's if `model` is empty.

        Raise InvalidRequest, or QueueFull if too many forecasts wait.
        """
        demand, outlook = await self._forecasts.outlook(model, horizon_s)
        there = workers_there(self._state.fleet, demand.model, self._clock.now_ns())
        kind = self._kinds.kind(demand.model, self._clock.now_ns())
        return await asyncio.to_thread(lambda: input_json(input_of(demand, kind, there, outlook)))

    async def plan(self, model: str, query: dict[str, Any], device: str = "", *, check: bool = True) -> dict[str, Any]:
        """Make a plan once earlier ones are done (see `make_plan_row`). Raise InvalidRequest, or QueueFull if too many
        wait.
        """
        if self._plans >= MAX_PLANS:
            raise QueueFull(f"{MAX_PLANS} plans are being made or wait already", retry_after_s=30)
        self._plans += 1
        try:
            row = await self.input(model, query["horizon_s"])
            async with self._lock:
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_step_back)
                loop, folder = asyncio.get_running_loop(), str(cache_dir() / "capacity")
                making = loop.run_in_executor(self._pool, _made, row, query, (folder, device, check))
                found = await making
        finally:
            self._plans -= 1
        if isinstance(found, FulcrumError):
            raise found
        return found

    async def run(self) -> None:
        """Plan for the busiest models periodically, until cancelled."""
        every_s = max(FRESH_S / self._keeper.speed, LEAST_EVERY_S)
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except FulcrumError as error:  # no demand yet, or too little to plan for
                self.failures += 1
                log.info("no capacity plan", why=error.message)

    async def repeat(self) -> None:
        """Publish the last plans again periodically, until cancelled."""
        while True:
            await asyncio.sleep(REPEAT_S)
            for each in self._published.values():
                self._publish(each)

    async def look(self) -> None:
        """Plan once for each of the busiest models, update the alerts and publish the plans."""
        ahead: list[PoolAhead] = []
        query = {
            "slo": self._watch.slo,
            "horizon_s": HORIZON_S / self._keeper.speed,
            "confidence": self._watch.confidence,
        }
        for model in (await self._forecasts.busiest())[:MOST_MODELS]:
            row = await self.plan(model, query, check=False)
            self.plans.pop(model, None)
            self.plans[model] = row
            plan = await asyncio.to_thread(_plan_of, row)
            self._published[model] = plan_message(plan, model, self._metrics_id, self._clock.now_ns())
            self._publish(self._published[model])
            ahead += pools_ahead(row, self._watch.start_s)
        for model in list(self.plans)[:-MOST_MODELS]:
            del self.plans[model], self._published[model]
        self._desk.foresee(list(capacity_conditions(ahead, [in_words(each.at_unix_s) for each in ahead])))

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of the last plans behind alerts."""
        gauge = GaugeMetricFamily(
            names.CAPACITY_SHORT_GPUS, "GPUs that four of five forecasts lack within a day.", labels=("model", "phase")
        )
        for model, row in self.plans.items():
            for each in pools_ahead(row, 0.0):
                gauge.add_metric((model, each.phase), each.short_gpus)
        yield gauge
        yield CounterMetricFamily(
            names.CAPACITY_PLAN_FAILURES_TOTAL, "Capacity plans that could not be made.", self.failures
        )

    def close(self) -> None:
        if self._pool is not None:
            for child in list(self._pool._processes.values()):
                child.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)


# Planning imports the lab, which costs 6 MiB; the service imports it only when a plan is made.


def _step_back() -> None:
    from libs.capacity.planning import step_back  # noqa: PLC0415

    step_back()


def _plan_of(row: dict[str, Any]) -> CapacityPlan:
    from libs.capacity.planning import plan_from_json  # noqa: PLC0415

    return plan_from_json(row)


def _made(row: dict[str, Any], query: dict[str, Any], where: tuple[str, str, bool]) -> dict[str, Any] | FulcrumError:
    from libs.capacity.planning import make_plan_row  # noqa: PLC0415

    # Errors are returned, as not all of them can be pickled as exceptions.
    folder, device, check = where
    try:
        return make_plan_row(row, query, folder=folder, device=device, check=check)
    except FulcrumError as error:
        return error


def pools_ahead(row: dict[str, Any], start_s: float) -> Sequence[PoolAhead]:
    """Return the shortages in a plan's row, without pools whose number of workers is unknown."""
    shortages = {each["phase"]: each for each in row["shortages"]}
    found = []
    for phase in PHASES:
        pool, short = row["pools"][phase], shortages.get(phase)
        if pool["there"] is None:
            continue
        most = max(pool["short"], default=0.0)
        gpus, at_s, sure = (short["gpus"], short["at_unix_s"], short["sure"]) if short else (0, 0.0, 0.0)
        found.append(PoolAhead(row["model"], phase, gpus, at_s, sure, most, start_s))
    return found


def in_words(unix_s: float) -> str:
    """Format a time in the local time zone, such as "14:00 on Tue"."""
    local = time.localtime(unix_s)
    return time.strftime("%H:%M:%S on %a" if local.tm_sec else "%H:%M on %a", local)
