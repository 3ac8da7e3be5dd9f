"""Assembly of the metrics service's demand part."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import APIRouter
from prometheus_client.registry import Collector

from libs.keys.gate import ChangeGuard
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.demand.api import DemandRoutes
from services.metrics.demand.capacity import Capacity, PlanWatch, PublishPlan
from services.metrics.demand.file import DemandFile
from services.metrics.demand.forecasts import Forecasts
from services.metrics.demand.keeping import DemandKeeper
from services.metrics.demand.kinds import WorkerKinds
from services.metrics.ingest import Take
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState


@dataclass(frozen=True, slots=True)
class DemandService:
    """The parts of demand that the service runs and serves."""

    keeper: DemandKeeper
    kinds: WorkerKinds
    forecasts: Forecasts
    capacity: Capacity
    watched: bool
    """Whether capacity plans are made for alerts."""
    guard: ChangeGuard
    """The guard that admits callers who import history."""

    @property
    def takers(self) -> tuple[Take, ...]:
        return self.keeper.take, self.kinds.take

    @property
    def collectors(self) -> tuple[Collector, ...]:
        return self.keeper, self.capacity

    def start(self, tasks: TaskOwner) -> None:
        tasks.spawn("demand", self.keeper.run())
        if self.watched:
            tasks.spawn("capacity", self.capacity.run())
            tasks.spawn("capacity plans", self.capacity.repeat())

    async def close(self) -> None:
        """End the planning process and close the file, once no task uses them."""
        self.capacity.close()
        await self.keeper.close()

    def routers(self) -> Iterable[APIRouter]:
        return (DemandRoutes(self.keeper, self.forecasts, self.capacity, self.guard).router(),)


def open_demand(
    file: DemandFile | None,
    settings: MetricsSettings,
    state: MetricsState,
    desk: AlertEvaluator,
    clock: Clock,
    *,
    guard: ChangeGuard,
    publish: PublishPlan,
) -> DemandService:
    """Assemble demand, kept in memory without a file; `publish` sends capacity plans to planners."""
    keeper = DemandKeeper(file or DemandFile(":memory:", settings.cluster), clock, settings.day_s)
    kinds = WorkerKinds()
    forecasts = Forecasts(keeper, kinds, clock)
    watch = PlanWatch(settings.capacity_slo, settings.capacity_confidence, settings.worker_start_s)
    capacity = Capacity(
        keeper=keeper,
        forecasts=forecasts,
        kinds=kinds,
        state=state,
        desk=desk,
        clock=clock,
        watch=watch,
        publish=publish,
        metrics_id=settings.id,
    )
    return DemandService(keeper, kinds, forecasts, capacity, bool(watch.slo), guard)
