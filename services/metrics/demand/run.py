"""The routes of past and predicted demand and of capacity plans, and the assembly of the demand part."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Query
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from libs.contracts.errors import InvalidRequest
from libs.demand.counts import Counts, DemandKey
from libs.demand.wire import Deltas
from libs.keys.gate import ChangeGuard
from libs.runtime.clock import Clock
from libs.runtime.tasks import TaskOwner
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.demand.capacity import Capacity, PlanWatch, PublishPlan
from services.metrics.demand.forecasts import Forecasts, WorkerKinds
from services.metrics.demand.keeping import EVERY_S, DemandFile, DemandKeeper
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState, Take

Model = Annotated[str, Query(description="Of this model alone; without it of all, or of the one with most demand.")]
MOST_ROWS: Final = 10_080
"""The maximum number of bins in one answer, a week of minutes."""
MOST_BROUGHT: Final = 100_000
MOST_BROUGHT_BINS: Final = 400 * 1440
MOST_RATE: Final = 1e12
IMPORTED: Final = "imported"
"""Class and tenant of history imported from elsewhere."""
BAD: dict[int | str, dict[str, Any]] = {400: {"description": "the error names the allowed values"}}


class BroughtHistory(BaseModel):
    """Rates of consecutive bins, null where one is unknown."""

    model: str = Field(min_length=1, max_length=200)
    start_unix_s: float = Field(ge=0, le=1e11)
    step_s: float = Field(gt=0, le=86_400)
    requests_per_s: list[float | None] = Field(max_length=MOST_BROUGHT)
    prefill_tokens_per_s: list[float | None] = Field(max_length=MOST_BROUGHT)
    decode_tokens_per_s: list[float | None] = Field(max_length=MOST_BROUGHT)


def brought_rows(history: BroughtHistory, bin_ns: int) -> dict[int, dict[DemandKey, Counts]]:
    """Spread imported rates evenly over fine bins, as integers that add up to the total."""
    key = DemandKey(history.model, IMPORTED, IMPORTED)
    columns = (history.requests_per_s, history.prefill_tokens_per_s, history.decode_tokens_per_s)
    if len({len(column) for column in columns}) != 1:
        raise InvalidRequest("the lists of rates differ in length")
    if len(columns[0]) * history.step_s * 1e9 > MOST_BROUGHT_BINS * bin_ns:
        raise InvalidRequest(f"more than {MOST_BROUGHT_BINS} bins of {bin_ns / 1e9:g} s")
    rows: dict[int, dict[DemandKey, Counts]] = {}
    owed = [0.0, 0.0, 0.0]
    for place, rates in enumerate(zip(*columns, strict=True)):
        start_ns = round((history.start_unix_s + place * history.step_s) * 1e9)
        end_ns = round((history.start_unix_s + (place + 1) * history.step_s) * 1e9)
        if any(rate is None or not 0 <= rate < MOST_RATE for rate in rates):
            continue
        for number in range(-(-start_ns // bin_ns), -(-end_ns // bin_ns)):
            whole = []
            for column, rate in enumerate(rates):
                owed[column] += float(rate or 0.0) * bin_ns / 1e9
                whole.append(int(owed[column]))
                owed[column] -= whole[-1]
            requests, prompts, outputs = whole
            rows[number] = {key: Counts(requests, requests, prompts, 0, outputs, requests)}
    return rows


class DemandRoutes:
    def __init__(self, keeper: DemandKeeper, forecasts: Forecasts, capacity: Capacity, guard: ChangeGuard) -> None:
        """Create the routes; `guard` admits callers who import history."""
        self._keeper = keeper
        self._capacity = capacity
        self._guard = guard
        self._forecasts = forecasts

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")
        router.get("/demand", responses=BAD)(self.demand)
        router.get("/forecast", responses=BAD)(self.forecast)
        router.get("/capacity/input", responses=BAD)(self.plan_input)
        router.get("/capacity/plans")(self.plans)
        router.get("/capacity", responses=BAD)(self.plan)
        router.post("/demand", responses=BAD)(self.fill)
        return router

    async def plan_input(
        self,
        model: Model = "",
        horizon: Annotated[str, Query(description="Length of the forecast among other models.")] = "24h",
    ) -> dict[str, Any]:
        """Return the input of a model's capacity plan: its history, the shape of its requests, its workers."""
        return await self._capacity.input(model, parse_span_s(horizon))

    async def plans(self) -> list[dict[str, Any]]:
        """Return the plans behind the last capacity alerts, one per model; empty without a capacity SLO."""
        return list(self._capacity.plans.values())

    async def plan(
        self,
        *,
        model: Model = "",
        horizon: Annotated[str, Query(description="Time to plan ahead, e.g. 24h or 7d.")] = "24h",
        slo: Annotated[str, Query(max_length=200)] = "ttft=2s,tpot=50ms",
        confidence: Annotated[float, Query(ge=0.5, le=0.999)] = 0.95,
        traffic: Annotated[float, Query(ge=0.01, le=100)] = 1.0,
        isl: Annotated[float, Query(ge=0.01, le=100)] = 1.0,
        osl: Annotated[float, Query(ge=0.01, le=100)] = 1.0,
        growth: Annotated[float, Query(ge=1, le=100)] = 2.0,
        spare: Annotated[int, Query(ge=0, le=1000)] = 0,
        gpu_hour: Annotated[float, Query(ge=0)] = 0.0,
        device: Annotated[str, Query(max_length=80)] = "",
        check: bool = True,
    ) -> dict[str, Any]:
        """Return the GPUs needed by pool and hour, when the present ones run short, and the cost. New traffic is
        measured in the lab first, which takes some minutes.
        """
        query = {
            "slo": slo, "horizon_s": parse_span_s(horizon), "confidence": confidence, "traffic": traffic, "isl": isl,
            "osl": osl, "growth": growth, "spare": spare, "gpu_hour": gpu_hour,
        }  # fmt: skip
        return await self._capacity.plan(model, query, device, check=check)

    async def fill(self, history: BroughtHistory, authorization: Annotated[str, Header()] = "") -> dict[str, int]:
        """Import history for times without any of its own; needs the suite's token or an admin's key."""
        self._guard.admit(authorization, "bringing history", "admin")
        rows = await asyncio.to_thread(brought_rows, history, self._keeper.bin_ns)
        now = self._keeper.now_bin
        taken = await self._keeper.fill({number: row for number, row in rows.items() if number < now})
        return {"bins": len(rows), "taken": taken}

    async def demand(
        self,
        model: Model = "",
        window: Annotated[Literal["1m", "15m"], Query(description="Length of bins.")] = "1m",
        span: Annotated[str, Query(description="Time to look back, e.g. 6h or 14d.")] = "6h",
    ) -> dict[str, Any]:
        """Return arrivals by model, class and tenant, bin by bin: whole numbers, null where arrivals are unknown."""
        coarse = window == "15m"
        span_ns = round(parse_span_s(span) * 1e9)
        bin_ns = self._keeper.bin_ns * (15 if coarse else 1)
        if not 1 <= span_ns // bin_ns <= MOST_ROWS:
            raise InvalidRequest(f"span={span[:40]!r} is not 1 to {MOST_ROWS} bins of {bin_ns / 1e9:g} s", param="span")
        bins = await self._keeper.read(span_ns, coarse=coarse)
        return {
            "bin_s": bins.bin_ns / 1e9,
            "starts_unix_s": [(bins.first + at) * bins.bin_ns / 1e9 for at in range(len(bins))],
            "heard": (bins.covered_for(model) if model else bins.covered).tolist(),
            "series": [
                {**key._asdict(), **{name: row[:, place].tolist() for place, name in enumerate(Counts._fields)}}
                for key, row in sorted(bins.rows.items())
                if not model or key.model == model
            ],
        }

    async def forecast(
        self,
        model: Model = "",
        horizon: Annotated[str, Query(description="Time to look ahead, e.g. 24h or 7d.")] = "24h",
        by: Annotated[
            Literal["", "model", "tenant", "class"], Query(description="The parts to add; none if empty.")
        ] = "",
    ) -> dict[str, Any]:
        """Predict requests and tokens per second with bands, the busy GPUs that they need, and the recent trend.
        Medians of all models add up to those of the fleet, and those of a model's tenants or classes to the model's.
        """
        return await self._forecasts.report(model, parse_span_s(horizon), by or None)


_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_span_s(text: str) -> float:
    """Return the seconds of a span such as "90s", "6h" or "14d". Raise InvalidRequest for other text."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    plain = number.isascii() and number.replace(".", "", 1).isdigit() and len(number) <= 9
    if unit in _UNITS and plain and float(number) > 0:
        return float(number) * _UNITS[unit]
    raise InvalidRequest(f"{text[:40]!r} is not a number and s, m, h or d, such as 24h")


@dataclass(frozen=True, slots=True)
class DemandService:
    """The parts of demand that the service runs and serves."""

    keeper: DemandKeeper
    kinds: WorkerKinds
    forecasts: Forecasts
    capacity: Capacity
    watched: bool
    """True if capacity plans are made for alerts."""
    guard: ChangeGuard
    """The guard of requests that import history."""
    sources: list[Callable[[], Deltas]] = field(default_factory=list)
    """Counts of arrivals that no gateway records."""

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

    def count_also(self, source: Callable[[], Deltas], tasks: TaskOwner) -> None:
        """Collect the bins of a source every few seconds, and once more at the end."""
        self.sources.append(source)
        tasks.spawn("demand of others", self._take_forever(source))

    async def _take_forever(self, source: Callable[[], Deltas]) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.keeper.add(source())

    async def close(self) -> None:
        """End the planning process and close the file, once no task uses them."""
        self.capacity.close()
        for source in self.sources:
            self.keeper.add(source())
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
    """Assemble the demand part. Demand is kept in memory if `file` is None; `publish` sends capacity plans to
    planners.
    """
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
