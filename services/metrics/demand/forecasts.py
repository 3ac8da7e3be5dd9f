"""Forecasts of each model, made anew now and then, off the event loop."""

import asyncio
from typing import Any, Final

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.demand.history import REQUESTS, DemandBins, models_of
from libs.demand.report import ModelDemand, forecast_report, model_demand
from libs.runtime.clock import Clock
from services.metrics.demand.keeping import DAY_S, DemandKeeper
from services.metrics.demand.kinds import WorkerKinds

COARSE_FROM_S: Final = 43_200.0
"""With so much history forecasts are of quarters of an hour, before of minutes."""
LOOK_BACK_S: Final = 56 * DAY_S
FRESH_S: Final = 300.0
"""A forecast is made anew no sooner, in a day of usual length."""
MOST_HORIZON_S: Final = 14 * DAY_S
MAX_WAITING: Final = 16
"""Forecasts that are being made or wait for their turn; more are refused."""
MAX_KEPT: Final = 64
"""Forecasts, by model and horizon."""
TPOT_S: Final = 0.05
"""For which decode's GPU-seconds are predicted, where nothing else is asked for."""


class Forecasts:
    """Answers are kept while they are fresh; one is made at a time."""

    def __init__(self, keeper: DemandKeeper, kinds: WorkerKinds, clock: Clock) -> None:
        self._keeper = keeper
        self._kinds = kinds
        self._clock = clock
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._kept: dict[tuple[str, float], tuple[int, dict[str, Any]]] = {}

    async def report(self, model: str, horizon_s: float) -> dict[str, Any]:
        """See `forecast_report`. Raises InvalidRequest for a horizon that is none, and where there is no demand, and
        QueueFull."""
        speed = self._keeper.speed
        if not horizon_s * speed <= MOST_HORIZON_S:
            raise InvalidRequest(f"a horizon of {horizon_s:g} s is over {MOST_HORIZON_S / speed:g} s", param="horizon")
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} forecasts are being made or wait already", retry_after_s=5)
        self._waiting += 1
        try:
            return await self._in_turn(model, horizon_s)
        finally:
            self._waiting -= 1

    async def _in_turn(self, model: str, horizon_s: float) -> dict[str, Any]:
        speed = self._keeper.speed
        async with self._lock:
            now_ns = self._clock.now_ns()
            kept = self._kept.get((model, horizon_s))
            if kept is not None and now_ns - kept[0] < FRESH_S / speed * 1e9:
                return kept[1]
            demand = await self.demand(model)
            kind = self._kinds.kind(demand.model)
            try:
                found = await asyncio.to_thread(forecast_report, demand, kind, horizon_s=horizon_s, tpot_s=TPOT_S)
            except ValueError as error:
                raise InvalidRequest(str(error), param="horizon") from None
            self._kept.pop((model, horizon_s), None)
            self._kept[model, horizon_s] = (now_ns, found)
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            return found

    async def demand(self, model: str) -> ModelDemand:
        """What is kept of a model; "": of the one with most requests. Raises InvalidRequest where there is none."""
        bins = await self._bins()
        return await asyncio.to_thread(_demand_of, bins, model, self._keeper.speed)

    async def busiest(self) -> list[str]:
        """Models by requests of the last day, the most first."""
        bins = await self._keeper.read(round(DAY_S / self._keeper.speed * 1e9), coarse=True)
        return sorted(models_of(bins.rows), key=lambda each: -_requests(bins, each))

    async def _bins(self) -> DemandBins:
        speed = self._keeper.speed
        first_ns = await self._keeper.first_ns(coarse=True)
        age_s = 0.0 if first_ns is None else (self._clock.now_ns() - first_ns) / 1e9 * speed
        coarse = age_s >= COARSE_FROM_S
        span_s = min(age_s + 900.0, LOOK_BACK_S if coarse else COARSE_FROM_S)
        return await self._keeper.read(round(span_s / speed * 1e9), coarse=coarse)


def _demand_of(bins: DemandBins, model: str, speed: float) -> ModelDemand:
    models = models_of(bins.rows)
    if not models:
        raise InvalidRequest("no demand is known yet: ask again after some requests, or `fulcrum forecast import` some")
    if model and model not in models:
        raise InvalidRequest(f"no demand is known of model {model[:80]!r}; there is {', '.join(models)}", param="model")
    if not model:
        totals = dict.fromkeys(models, 0)
        for key, row in bins.rows.items():
            totals[key.model] += int(row[:, 0].sum())
        model = max(totals, key=lambda each: totals[each])
    return model_demand(bins, model, speed)


def _requests(bins: DemandBins, model: str) -> int:
    return int(bins.sums(lambda key: key.model == model)[:, REQUESTS].sum())
