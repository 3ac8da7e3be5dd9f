"""The use of models as it happens, to predict each model's next request and the number of active models.

The arrival laws and the forecast are those of the backtests (arrivals.py, forecaster.py), updated tick by tick.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.reserve.arrivals import ArrivalLaws, WindowArrivals
from libs.policy.reserve.counts import Floats, Whole, mean_of, quantile, sum_distribution
from libs.policy.reserve.forecaster import ObservedWindow, ReserveForecaster, WindowOutlook

# Keeping a model loaded pays if the cold start it is likely to save costs more than the GPU time it is expected to
# take. With a falling hazard, as in sessions, this gives each model its own keep-alive. If the hazard rises again, the
# model is loaded again before the request.


Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ModelPool:
    """The models of a pool as parallel arrays, indexed by model number."""

    gpus: Floats
    """The GPUs that each model needs while it is loaded."""
    loaded: Bools
    busy: Bools
    """True if a request is in flight, so that the model must stay."""
    floor: Bools
    """True if the model is kept loaded regardless of its worth."""
    worth: Floats
    """The worth of keeping a loaded model or of loading another one; see `worth_of`."""


def worth_of(hazard: Floats, ahead_s: Floats, gpus: Floats, cold_cost_gpu_s: float, load_s: Floats | float) -> Floats:
    """Return the value of a saved cold start over the GPU time held for it, at the best time to give up.

    - hazard: cumulative hazard of the next request, of shape [seconds ahead, model]
    - cold_cost_gpu_s: the GPU seconds that one cold start is worth
    - load_s: the GPU time to load the model first; 0 if it is loaded

    Holding pays above 1.
    """
    left = np.exp(-hazard)
    steps_s = np.diff(ahead_s, prepend=0.0)
    before = np.concatenate([np.ones((1, left.shape[1])), left[:-1]])
    held_s = np.cumsum((before + left) / 2 * steps_s[:, None], axis=0)
    return np.asarray(((1 - left) * cold_cost_gpu_s / (gpus * (held_s + load_s))).max(axis=0))


def choose(pool: ModelPool, room_gpus: float) -> Bools:
    """Return which models should be loaded within `room_gpus`.

    Busy models come first, then floors, then those that pay, by worth. If the busy ones alone exceed the room, they
    stay and no other model does.
    """
    kept = pool.busy | pool.floor
    left = room_gpus - float(pool.gpus[pool.busy].sum())
    for index in np.flatnonzero(pool.floor & ~pool.busy):
        kept[index] = pool.gpus[index] <= left
        left -= float(pool.gpus[index]) * kept[index]
    asking = np.flatnonzero(~kept & (pool.worth > 1) & ~(pool.floor | pool.busy))
    for index in asking[np.argsort(-pool.worth[asking], kind="stable")]:
        if pool.gpus[index] <= left:
            kept[index] = True
            left -= float(pool.gpus[index])
    return kept


AHEAD: Final = np.geomspace(0.02, 60.0, 24)
"""The horizons at which holding a model is valued, in units of the cold start's cost."""
REFRESH_TICKS: Final = 6
MAX_PLACES: Final = 4_000
"""The maximum number of models that are remembered; beyond it, learning starts over."""
MAX_STARTS: Final = 10_000
"""The maximum number of requests in flight per model whose start times are remembered."""
RUN_KEEP: Final = 0.98
"""The decay of the remembered run times with each request that ends."""
MOST_NEW: Final = 1_000
"""The maximum number of arrivals of one model counted between two samples; more add no information."""
NEVER_S: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class ModelCount:
    """The requests of one model counted over all gateways."""

    arrivals: int
    """The number of requests since the first sample, which never decreases."""
    in_flight: int
    last_s: float
    """The time of the last arrival; 0 before the first."""


@dataclass(frozen=True, slots=True)
class ModelPrediction:
    """The prediction for one model from now on."""

    soon: float
    """The probability that the model is requested within the horizon."""
    worth: float
    """The worth of keeping it loaded; see `worth_of`."""
    worth_ahead: float
    """The worth of loading the model before it is requested; see `worth_of`."""
    next_s: float | None
    """The median time until the next request; None if it is more than a week."""


UNKNOWN: Final = ModelPrediction(0.5, 2.0, 0.0, None)
"""The prediction before a window has passed: loaded models stay, and no model is loaded ahead."""


@dataclass(frozen=True, slots=True)
class CountDistribution:
    """The distribution of an uncertain number of models."""

    mean: float
    p50: int
    p90: int
    p99: int


@dataclass(slots=True)
class _TrackedModel:
    index: int
    arrivals: int
    starts: deque[float] = field(default_factory=deque)


class UseFollower:
    """The usage statistics of one catalogue.

    All times are seconds of one clock. With Unix time, hours of the day are meaningful.
    """

    def __init__(self, *, window_s: float, confidence: float = 0.99) -> None:
        """Create the statistics, which forecast the peak number of active models per window of `window_s`.

        Arrival laws are updated ten times as often.
        """
        self._window_s, self._confidence = window_s, confidence
        self._tick_s = window_s / 10
        self._reset()

    def _reset(self) -> None:
        self._laws = ArrivalLaws(self._tick_s / 8)
        self._forecaster = ReserveForecaster(self._window_s, self._confidence)
        self._models: dict[str, _TrackedModel] = {}
        self._tick_from_s = self._window_from_s = 0.0
        self._ticks = 0
        self._new: list[tuple[float, int]] = []
        self._window_new: list[tuple[float, int]] = []
        self._ended: list[tuple[int, float, float]] = []
        self._peak = 0.0
        self._active_s = 0.0
        self._looked_s = 0.0
        self._active = 0
        self._run_s = 0.0
        self._runs = 0.0
        self.windows = 0
        """The number of windows learned from."""
        self.ahead: WindowOutlook | None = None
        """The forecast for the current window; None before the first."""

    def look(self, now_s: float, counts: Mapping[str, ModelCount]) -> None:
        """Record a sample of the counts. Call it often, with times that never decrease."""
        if not self._looked_s:
            self._tick_from_s = self._window_from_s = self._looked_s = now_s
        self._active_s += self._active * (now_s - self._looked_s)
        for name, count in counts.items():
            self._take(now_s, name, count)
        self._active = sum(bool(each.starts) for each in self._models.values())
        self._peak = max(self._peak, float(self._active))
        self._looked_s = now_s
        if now_s - self._tick_from_s >= self._tick_s:
            self._end_tick(now_s)
        if now_s - self._window_from_s >= self._window_s:
            self._end_window(now_s)

    @property
    def active(self) -> int:
        """The number of models with a request in flight."""
        return self._active

    @property
    def runs_s(self) -> float | None:
        """The recent mean duration of requests, including the wait for their model; None before one has ended."""
        return self._run_s / self._runs if self._runs else None

    def chances(
        self, now_s: float, *, horizon_s: float, cold_cost_gpu_s: float, load_s: Mapping[str, float]
    ) -> dict[str, ModelPrediction]:
        """Return the prediction for every model of `load_s`, which maps models to their load times."""
        names = [name for name in load_s if name in self._models]
        if not names or not self.windows:
            return dict.fromkeys(load_s, UNKNOWN)
        ahead_s = np.append(AHEAD * cold_cost_gpu_s, [horizon_s, NEVER_S])
        order = np.argsort(ahead_s, kind="stable")
        ahead_s = ahead_s[order]
        hazard = self._hazard(now_s, ahead_s)[:, [self._models[name].index for name in names]]
        gpus = np.ones(len(names))
        loads_s: Floats = np.array([load_s[name] for name in names])
        weighed = slice(0, len(ahead_s) - 1)
        worth = worth_of(hazard[weighed], ahead_s[weighed], gpus, cold_cost_gpu_s, 0.0)
        worth_ahead = worth_of(hazard[weighed], ahead_s[weighed], gpus, cold_cost_gpu_s, loads_s)
        at = int(np.flatnonzero(ahead_s == horizon_s)[0])
        soon = 1 - np.exp(-hazard[at])
        found = dict.fromkeys(load_s, UNKNOWN)
        for index, name in enumerate(names):
            next_s = _median_s(ahead_s, hazard[:, index])
            found[name] = ModelPrediction(float(soon[index]), float(worth[index]), float(worth_ahead[index]), next_s)
        return found

    def requested_within(self, now_s: float, seconds: float) -> CountDistribution | None:
        """Return the number of models that are active or requested within the seconds ahead; None before a window has
        passed.
        """
        if not self._models or not self.windows:
            return None
        hazard = self._hazard(now_s, np.array([seconds]))[0]
        busy = np.zeros(len(hazard), dtype=bool)
        for each in self._models.values():
            busy[each.index] = bool(each.starts)
        chance = np.where(busy, 1.0, 1 - np.exp(-hazard))
        return spread(sum_distribution(chance[None, :], np.ones(len(chance), dtype=np.int64))[0])

    def _hazard(self, now_s: float, ahead_s: Floats) -> Floats:
        """Return the cumulative hazards under each model's law, of shape [seconds ahead, model]."""
        every = self._laws.hazards(now_s, ahead_s)
        return np.asarray(every[self._laws.chosen, :, np.arange(len(self._laws))].T)

    def _take(self, now_s: float, name: str, count: ModelCount) -> None:
        tracked = self._models.get(name)
        if tracked is None:
            if len(self._models) >= MAX_PLACES:
                self._reset()
                self._tick_from_s = self._window_from_s = self._looked_s = now_s
            # The times of arrivals before the first sample are unknown.
            tracked = self._models[name] = _TrackedModel(len(self._models), count.arrivals)
            self._laws.grow(len(self._models), now_s)
        new = min(max(count.arrivals - tracked.arrivals, 0), MOST_NEW)
        tracked.arrivals = count.arrivals
        last_s = min(max(count.last_s, self._looked_s), now_s)
        for number in range(new):
            at_s = self._looked_s + (last_s - self._looked_s) * (number + 1) / new
            self._new.append((at_s, tracked.index))
            self._window_new.append((at_s, tracked.index))
            tracked.starts.append(at_s)
        gone = len(tracked.starts) - count.in_flight
        for _ in range(max(gone, len(tracked.starts) - MAX_STARTS, 0)):
            # It is unknown which request ended; assuming the first preserves the mean run time.
            began_s = tracked.starts.popleft()
            self._ended.append((tracked.index, began_s, now_s))
            self._run_s, self._runs = self._run_s * RUN_KEEP + now_s - began_s, self._runs * RUN_KEEP + 1

    def _end_tick(self, now_s: float) -> None:
        arrivals = _arrivals(self._new)
        self._new = []
        if len(self._laws):
            self._laws.learn(self._tick_from_s, now_s, arrivals, 1.0)
            if self._ticks % REFRESH_TICKS == 0:
                self._laws.refresh()
        self._tick_from_s = now_s
        self._ticks += 1

    def _end_window(self, now_s: float) -> None:
        length_s = now_s - self._window_from_s
        arrivals = _arrivals(self._window_new)
        gpus = np.ones(len(self._models))
        seen = ObservedWindow(
            begin_s=self._window_from_s,
            end_s=now_s,
            arrivals=arrivals,
            ended_model=np.array([model for model, _, _ in self._ended], dtype=np.int64),
            ended_start_s=np.array([start for _, start, _ in self._ended]),
            ended_s=np.array([end for _, _, end in self._ended]),
            gpus=gpus,
            peak_gpus=self._peak,
            mean_models=self._active_s / length_s,
        )
        if self.ahead is None:
            self._forecaster.ahead(self._window_from_s)
        self._forecaster.learn(seen)
        self.ahead = self._forecaster.ahead(now_s)
        self.windows += 1
        self._window_new, self._ended = [], []
        self._window_from_s, self._active_s, self._peak = now_s, 0.0, float(self._active)


def spread(distribution: Floats) -> CountDistribution:
    """Return the mean and quantiles of a distribution."""
    p50, p90, p99 = (quantile(distribution, level) for level in (0.5, 0.9, 0.99))
    return CountDistribution(mean_of(distribution), p50, p90, p99)


def _arrivals(found: list[tuple[float, int]]) -> WindowArrivals:
    model: Whole = np.array([index for _, index in found], dtype=np.int64)
    t_s: Floats = np.array([at_s for at_s, _ in found], dtype=np.float64)
    order = np.lexsort((t_s, model))
    return WindowArrivals(t_s[order], model[order])


def _median_s(ahead_s: Floats, hazard: Floats) -> float | None:
    half = float(np.log(2))
    if hazard[-1] < half:
        return None
    return float(np.interp(half, np.append(0.0, hazard), np.append(0.0, ahead_s)))
