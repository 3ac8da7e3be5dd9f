"""Forecasts by model, recomputed periodically off the event loop."""

import asyncio
from typing import Any, Final

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.demand.history import REQUESTS, DemandBins, models_of
from libs.demand.report import ModelDemand, forecast_report, model_demand
from libs.runtime.clock import Clock
from services.metrics.demand.keeping import DAY_S, DemandKeeper
from services.metrics.demand.kinds import WorkerKinds

COARSE_FROM_S: Final = 43_200.0
"""The age of history from which forecasts use bins of a quarter of an hour instead of a minute."""
LOOK_BACK_S: Final = 56 * DAY_S
FRESH_S: Final = 300.0
"""The time for which a forecast is reused, in a day of usual length."""
MOST_HORIZON_S: Final = 14 * DAY_S
MAX_WAITING: Final = 16
"""The most forecasts in progress or waiting their turn; more are refused."""
MAX_KEPT: Final = 64
"""The most cached forecasts, each of one model and horizon."""
TPOT_S: Final = 0.05
"""The TPOT for which decode's GPU-seconds are predicted unless another is requested."""


class Forecasts:
    """The forecasts of all models, made one at a time and cached while fresh."""

    def __init__(self, keeper: DemandKeeper, kinds: WorkerKinds, clock: Clock) -> None:
        self._keeper = keeper
        self._kinds = kinds
        self._clock = clock
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._kept: dict[tuple[str, float], tuple[int, dict[str, Any]]] = {}

    async def report(self, model: str, horizon_s: float) -> dict[str, Any]:
        """Return a cached or new forecast (see `forecast_report`).

        Raise InvalidRequest for a bad horizon or without any demand, and QueueFull if too many wait.
        """
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
        """Return a model's known demand, or the busiest model's if `model` is empty.

        Raise InvalidRequest if there is none.
        """
        bins = await self._bins()
        return await asyncio.to_thread(_demand_of, bins, model, self._keeper.speed)

    async def busiest(self) -> list[str]:
        """Return the models by requests of the last day, the most first."""
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
