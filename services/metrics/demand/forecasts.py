"""Forecasts by model, recomputed periodically off the event loop, and the kinds of workers that take the work."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from libs.bus.port import Record
from libs.contracts.errors import InvalidRequest, QueueFull
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, StepBatch
from libs.demand.history import REQUESTS, DemandBins, models_of
from libs.demand.parts import By, FleetOutlook, fleet_outlook, parts_json
from libs.demand.report import DemandOutlook, ModelDemand, forecast_report, model_demand
from libs.perfmodel.learner import FittedModel, StepKind, combine
from libs.perfmodel.wire import fitted_model
from libs.policy.capacity import PHASES, Phase, WorkerKind
from libs.policy.newest import put_newest
from libs.policy.speed import Speed, image_ns
from libs.policy.worker.saturation import knee_of
from libs.runtime.clock import Clock
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.gateways import ImageArrivals
from libs.telemetry.recent import RecentCounts, recent_sums
from services.metrics.accounting.queues import pool_indices
from services.metrics.demand.keeping import DAY_S, DemandKeeper

LOOK_NS: Final = 30_000_000_000
"""The interval at which a worker's reported step times are read."""
MAX_WORKERS: Final = 256
"""The maximum number of workers of a model that are remembered, the most recently read."""
MAX_MODELS: Final = 64
MOST_CHUNK_TOKENS: Final = 8192
KV_BLOCK_TOKENS: Final = 16
"""The tokens of a KV block, whose size telemetry does not report: the default of our engines."""
MAX_SEQUENCES: Final = 256
"""Sequences assumed for a worker that does not report how many it runs."""


@dataclass(slots=True)
class _ReportedWorker:
    read_ns: int
    fitted: FittedModel
    gpus: int
    max_sequences: int
    kv_tokens: int
    images: RecentCounts
    """The images of the worker's prompts and the nanoseconds of encoding them."""


@dataclass(slots=True)
class WorkerKinds:
    """The latest reports of workers, by model, and the images that arrive for them."""

    _workers: OrderedDict[str, OrderedDict[str, _ReportedWorker]] = field(default_factory=OrderedDict)
    _images: ImageArrivals = field(default_factory=ImageArrivals)

    def take(self, record: Record, now_ns: int) -> None:
        """Record a worker's description, at most once every `LOOK_NS`, or a gateway's arrivals."""
        value = record.value
        if isinstance(value, GatewayQueues):
            self._images.take(value, now_ns)
        if not isinstance(value, StepBatch):
            return
        of_model = self._workers.get(value.assignment.model)
        known = None if of_model is None else of_model.get(value.worker_id)
        if known is not None and now_ns - known.read_ns < LOOK_NS:
            return
        if not value.HasField("step_time") or not value.assignment.model:
            return
        fitted = fitted_model(value.step_time)
        if fitted is None:
            return
        if of_model is None:
            of_model = OrderedDict()
            put_newest(self._workers, value.assignment.model, of_model, MAX_MODELS)
        images = RecentCounts() if known is None else known.images
        images.add(now_ns, value.load.images_used, value.load.image_encode_ns)
        worker = _ReportedWorker(
            now_ns,
            fitted,
            max(value.gpus, 1),
            value.max_sequences or MAX_SEQUENCES,
            value.kv_blocks * KV_BLOCK_TOKENS,
            images,
        )
        put_newest(of_model, value.worker_id, worker, MAX_WORKERS)

    def kind(self, model: str, now_ns: int) -> WorkerKind | None:
        """Return the kind of a model's workers; None if none has reported.

        Each part of the step-time model comes from the worker that has seen most such steps.
        """
        workers = list(self._workers.get(model, {}).values())
        if not workers:
            return None
        fits = {each: max((one.fitted for one in workers), key=lambda fit: fit.of(each).steps) for each in StepKind}
        step_time = combine(workers[-1].fitted.model, fits)
        chunk = knee_of(step_time, MOST_CHUNK_TOKENS)[0]
        each_ns = image_ns([recent_sums((each.images for each in workers), now_ns)])
        return WorkerKind(
            Speed(step_time, max(chunk, 1), measured=True),
            max(each.gpus for each in workers),
            min(each.max_sequences for each in workers),
            min(each.kv_tokens for each in workers),
            self._images.per_token(model, now_ns) * each_ns,
        )


def workers_there(fleet: FleetTelemetry, model: str, now_ns: int) -> dict[Phase, int]:
    """Count the live workers that serve each phase; return an empty dict if there are none."""
    loads = fleet.directory.loads(now_ns)
    there: dict[Phase, int] = {}
    for phase in PHASES:
        indices = pool_indices(loads.listing, model, phase)
        there[phase] = int(np.count_nonzero(loads.reporting[indices] & ~loads.listing.left[indices]))
    return there if any(there.values()) else {}


COARSE_FROM_S: Final = 43_200.0
"""The age of history from which forecasts use bins of a quarter of an hour instead of a minute."""
LOOK_BACK_S: Final = 56 * DAY_S
FRESH_S: Final = 300.0
"""The time for which a forecast is reused, if a day has its usual length."""
MOST_HORIZON_S: Final = 14 * DAY_S
MAX_WAITING: Final = 16
"""The maximum number of forecasts in progress or waiting their turn; more are refused."""
MAX_KEPT: Final = 64
"""The maximum number of cached forecasts, each of one model and horizon."""
MAX_FLEETS: Final = 4
"""The maximum number of cached forecasts of all models, each of one horizon."""
NO_DEMAND: Final = "no demand is known yet: ask again after some requests, or `fulcrum forecast import` some"
TPOT_S: Final = 0.05
"""The TPOT for which decode's GPU-seconds are predicted unless another is requested."""


@dataclass(frozen=True, slots=True)
class _CachedFleet:
    made_ns: int
    outlook: FleetOutlook


class Forecasts:
    """The forecasts of all models, made one at a time and cached while fresh."""

    def __init__(self, keeper: DemandKeeper, kinds: WorkerKinds, clock: Clock) -> None:
        self._keeper = keeper
        self._kinds = kinds
        self._clock = clock
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._fleets: OrderedDict[float, _CachedFleet] = OrderedDict()
        """The forecasts behind all reports of a horizon, so that sums over models agree."""
        self._kept: OrderedDict[tuple[str, float, By | None], tuple[int, dict[str, Any]]] = OrderedDict()

    async def report(self, model: str, horizon_s: float, by: By | None = None) -> dict[str, Any]:
        """Return a cached or new forecast (see `forecast_report`), with its parts (see `parts_json`) if `by` is given.

        Raise InvalidRequest for a bad horizon or without any demand, and QueueFull if too many wait.
        """
        async with self._turn(horizon_s):
            return await self._report(model, horizon_s, by)

    async def outlook(self, model: str, horizon_s: float) -> tuple[ModelDemand, DemandOutlook | None]:
        """Return a model's demand and its forecast among other models; no forecast if it is the only model.

        Raise the errors of `report`.
        """
        async with self._turn(horizon_s):
            bins = await self._bins()
            if len(models_of(bins.rows)) < 2:
                return await asyncio.to_thread(_demand_of, bins, model, self._keeper.speed), None
            fleet = (await self._fleet(horizon_s)).outlook
            demand = await asyncio.to_thread(_demand_of, fleet.bins, model, fleet.speed)
            return demand, await asyncio.to_thread(fleet.model, demand.model)

    @asynccontextmanager
    async def _turn(self, horizon_s: float) -> AsyncIterator[None]:
        """Wait until no other forecast is in progress."""
        speed = self._keeper.speed
        if not horizon_s * speed <= MOST_HORIZON_S:
            raise InvalidRequest(f"a horizon of {horizon_s:g} s is over {MOST_HORIZON_S / speed:g} s", param="horizon")
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} forecasts are being made or wait already", retry_after_s=5)
        self._waiting += 1
        try:
            async with self._lock:
                yield
        except ValueError as error:
            raise InvalidRequest(str(error), param="horizon") from None
        finally:
            self._waiting -= 1

    async def _report(self, model: str, horizon_s: float, by: By | None) -> dict[str, Any]:
        fleet = await self._fleet(horizon_s)
        kept = self._kept.get((model, horizon_s, by))
        if kept is not None and kept[0] == fleet.made_ns:
            return kept[1]
        found = await asyncio.to_thread(self._reported, fleet.outlook, model, by)
        put_newest(self._kept, (model, horizon_s, by), (fleet.made_ns, found), MAX_KEPT)
        return found

    def _reported(self, fleet: FleetOutlook, model: str, by: By | None) -> dict[str, Any]:
        demand = _demand_of(fleet.bins, model, fleet.speed)
        kind, outlook = self._kinds.kind(demand.model, self._clock.now_ns()), fleet.model(demand.model)
        found = forecast_report(demand, kind, horizon_s=fleet.horizon_s, tpot_s=TPOT_S, outlook=outlook)
        return found if by is None else {**found, "parts": parts_json(by, *fleet.parts(demand.model, by))}

    async def _fleet(self, horizon_s: float) -> _CachedFleet:
        speed, now_ns = self._keeper.speed, self._clock.now_ns()
        kept = self._fleets.get(horizon_s)
        if kept is not None and now_ns - kept.made_ns < FRESH_S / speed * 1e9:
            return kept
        bins = await self._bins()
        if not bins.rows:
            raise InvalidRequest(NO_DEMAND)
        made = _CachedFleet(now_ns, await asyncio.to_thread(fleet_outlook, bins, horizon_s, speed))
        put_newest(self._fleets, horizon_s, made, MAX_FLEETS)
        return made

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
        raise InvalidRequest(NO_DEMAND)
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
