"""A forecast of the GPUs that the models need at once in the next window, as a distribution learned from past
windows.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.reserve.arrivals import LAWS, POISSON_LAWS, ArrivalLaws, WindowArrivals
from libs.policy.reserve.counts import (
    Calibrator,
    CommonRate,
    Floats,
    HazardTable,
    Whole,
    gpu_units,
    mean_of,
    normal_miss,
    not_passed,
    sum_distribution,
)

REACHES: Final = np.array([0.02, 0.05, 0.1, 0.18, 0.3, 0.45, 0.65, 1.0])
"""The candidate reaches, as shares of the window: requests within one reach count as present at once."""
MIDDLES: Final = np.array([0.125, 0.375, 0.625, 0.875])
"""The points of the window, as shares, at which the expected number of active models is evaluated."""
QUARTERS: Final = 4
"""The points between the window's start and each middle at which a new request is checked for its end."""
REFRESH_WINDOWS: Final = 10
REACH_KEEP: Final = 0.999
"""The decay per window of the evidence for each reach."""
TRY_EVERY: Final = 4
"""The number of windows between comparisons of the reaches, after `OFTEN_WINDOWS`."""
COLD_WINDOWS: Final = 30
"""The initial windows whose errors do not count, because too little is known to learn from them."""
OFTEN_WINDOWS: Final = 60
"""The initial windows in which the reaches are compared every time."""
# Decay per window of the error of expected numbers, and the prior of no error, in models.
BIAS_KEEP, BIAS_PRIOR = 0.999, 5.0
RUNS_HALF_LIFE_S: Final = 7 * 86_400.0
NEW_HALF_LIFE_S: Final = 86_400.0
NEW_PRIOR_S: Final = 3600.0
"""The prior of the rate of new models, as seconds without one."""


@dataclass(frozen=True, slots=True, eq=False)
class ObservedWindow:
    """The observation of a window that has passed."""

    begin_s: float
    end_s: float
    arrivals: WindowArrivals
    ended_model: Whole
    """The models of the requests that ended in the window, in any order."""
    ended_start_s: Floats
    ended_s: Floats
    gpus: Floats
    """The GPUs that each model needs, by its index; models first seen in this window come last."""
    peak_gpus: float
    """The peak number of GPUs needed by models with a request in flight."""
    mean_models: float


@dataclass(frozen=True, slots=True, eq=False)
class WindowOutlook:
    """The forecast of active models and their GPUs for one window."""

    expected_models: float
    """The expected number of active models, averaged over the window."""
    peak_expected_gpus: float
    """The expected peak of GPUs needed at once."""
    reserve_gpus: int
    """The GPUs exceeded with a probability of at most 1 − confidence, after calibration."""
    uncalibrated_gpus: int
    """The same quantile of the distribution without calibration."""
    quantiles_gpus: tuple[int, int, int]
    """The p50, p90 and p99 of the distribution without calibration."""
    distribution: Floats
    """The distribution of the peak of GPUs needed at once, in `unit_gpus`."""
    unit_gpus: float


@dataclass(slots=True, eq=False)
class _Flight:
    """The requests in flight, sorted by model and start."""

    model: Whole
    start_s: Floats

    def take(self, arrivals: WindowArrivals, ended_model: Whole, ended_start_s: Floats) -> None:
        """Add a window's arrivals and remove the requests that have ended."""
        model = np.concatenate([self.model, arrivals.model])
        start_s = np.concatenate([self.start_s, arrivals.t_s])
        order = np.lexsort((start_s, model))
        model, start_s = model[order], start_s[order]
        gone = _indices(model, start_s, ended_model, ended_start_s)
        kept = np.ones(len(model), dtype=bool)
        kept[gone] = False
        self.model, self.start_s = model[kept], start_s[kept]


def _indices(model: Whole, start_s: Floats, ended_model: Whole, ended_start_s: Floats) -> Whole:
    """Return the indices of the ended requests among the sorted ones in flight; equal ones get an index each."""
    if not len(ended_model):
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((ended_start_s, ended_model))
    wanted_model, wanted_s = ended_model[order], ended_start_s[order]
    span = float(max(start_s.max(initial=0.0), 1.0)) * 2
    keys, wanted = model * span + start_s, wanted_model * span + wanted_s
    first = np.searchsorted(keys, wanted, side="left")
    is_new = np.ones(len(wanted), dtype=bool)
    is_new[1:] = wanted[1:] != wanted[:-1]
    begins = np.maximum.accumulate(np.where(is_new, np.arange(len(wanted)), 0))
    return np.asarray(np.minimum(first + np.arange(len(wanted)) - begins, len(keys) - 1), dtype=np.int64)


class ReserveForecaster:
    """A forecaster for a set of models, which alternates between `ahead` and `learn`.

    A model is active at the window's peak if a request in flight is still there, or the next one comes, within a
    learned reach. A reach of 0 counts the models active now; a reach of the whole window counts every model active at
    some time in it. Given the factor common to all rates, models are independent. The calibration corrects the errors
    of these assumptions.
    """

    def __init__(self, window_s: float, confidence: float, *, common: bool = True, calibrated: bool = True) -> None:
        """Create a forecaster. Setting `common` or `calibrated` to False omits that part, to measure its value."""
        self._window_s, self._confidence = window_s, confidence
        self._laws = ArrivalLaws(window_s / 16)
        self._runs = HazardTable(window_s / 16, 0.5 ** (1 / RUNS_HALF_LIFE_S))
        self._common = CommonRate() if common else None
        self._calibrator = Calibrator(confidence) if calibrated else None
        self._flight = _Flight(np.zeros(0, dtype=np.int64), np.zeros(0))
        self._gpus: Floats = np.zeros(0)
        self._reach_evidence: Floats = np.zeros(len(REACHES))
        self._reaches: Floats = np.zeros((0, 0))
        self._units: tuple[Whole, float] = (np.zeros(0, dtype=np.int64), 1.0)
        self._new_models = 0.0
        self._watched_s = 0.0
        self._windows = 0
        self._bias = [0.0, 0.0]
        self._outlook: WindowOutlook | None = None
        self._expected_raw = 0.0

    def ahead(self, now_s: float) -> WindowOutlook:
        """Return the forecast for the window that begins now."""
        values, chances = self._common.ahead() if self._common else (np.ones(1), np.ones(1))
        self._units = gpu_units(np.append(self._gpus, self._new_gpus())) if len(self._gpus) else (np.ones(1, int), 1.0)
        best = int(self._reach_evidence.argmax())
        is_trial = self._windows % TRY_EVERY == 0 or self._windows < OFTEN_WINDOWS
        tried = np.arange(len(REACHES)) if is_trial else np.array([best])
        ahead_s = np.append(REACHES[tried], MIDDLES) * self._window_s
        hazards, gone, reaches = self._hazards(now_s, ahead_s), self._gone(now_s, ahead_s), len(tried)
        rows = self._distributions(hazards[:reaches], gone[:reaches], values, chances, tried)
        self._reaches = rows if is_trial else np.zeros((0, 0))
        distribution = rows[best] if is_trial else rows[0]
        self._expected_raw = self._expected(hazards[reaches:], gone[reaches:], values, chances)
        miss = normal_miss(self._calibrator.deviate) if self._calibrator else 1 - self._confidence
        unit = self._units[1]
        misses = (0.5, 0.1, 0.01, 1 - self._confidence, miss)
        reported = [int(np.ceil(not_passed(distribution, each) * unit - 1e-9)) for each in misses]
        bias = (self._bias[0] + BIAS_PRIOR) / (self._bias[1] + BIAS_PRIOR)
        self._outlook = WindowOutlook(
            self._expected_raw * bias, mean_of(distribution) * unit, reported[4], reported[3],
            (reported[0], reported[1], reported[2]), distribution, unit,
        )  # fmt: skip
        return self._outlook

    def learn(self, seen: ObservedWindow) -> None:
        """Learn from the window that `ahead` last forecast."""
        known = len(self._gpus)
        length_s = seen.end_s - seen.begin_s
        self._judge(seen)
        counts = np.bincount(seen.arrivals.model, minlength=len(seen.gpus))[:known].astype(np.float64)
        common = 1.0
        if self._common and known and self._windows >= COLD_WINDOWS:
            hazard = self._hazards(seen.begin_s, np.array([length_s]))[0]
            common = self._common.learn(hazard, counts, self._laws.chosen < POISSON_LAWS)
        self._gpus = seen.gpus
        self._laws.grow(len(seen.gpus), seen.begin_s)
        self._runs.grow(len(seen.gpus))
        self._laws.learn(seen.begin_s, seen.end_s, seen.arrivals, common)
        ran_s = seen.ended_s - seen.ended_start_s
        self._runs.forget(length_s)
        self._runs.learn(seen.ended_model, np.zeros(len(ran_s)), ran_s, np.ones(len(ran_s)))
        self._flight.take(seen.arrivals, seen.ended_model, seen.ended_start_s)
        keep = 0.5 ** (length_s / NEW_HALF_LIFE_S)
        self._new_models = self._new_models * keep + len(seen.gpus) - known
        self._watched_s = self._watched_s * keep + length_s
        if self._windows % REFRESH_WINDOWS == 0 or len(seen.gpus) > known:
            self._laws.refresh()
            self._runs.refresh()
        self._windows += 1

    def _judge(self, seen: ObservedWindow) -> None:
        """Compare the last forecast with the outcome."""
        outlook = self._outlook
        if outlook is None:
            return
        came = int(np.ceil(seen.peak_gpus / outlook.unit_gpus - 1e-9))
        if self._calibrator and self._windows >= COLD_WINDOWS:
            covered = seen.peak_gpus <= outlook.reserve_gpus + 1e-9
            self._calibrator.learn(outlook.distribution, came, covered=covered)
        if len(self._reaches):
            # Widened a little, so that one surprise does not settle the choice.
            at = min(came, self._reaches.shape[1] - 1)
            reported = self._reaches[:, max(at - 1, 0) : at + 2].mean(axis=1)
            self._reach_evidence = self._reach_evidence * REACH_KEEP + np.log(reported + 1e-6)
        came_models, expected_models = self._bias
        self._bias = [came_models * BIAS_KEEP + seen.mean_models, expected_models * BIAS_KEEP + self._expected_raw]

    def _hazards(self, now_s: float, ahead_s: Floats) -> Floats:
        """Return the cumulative hazards under each model's chosen law, of shape [seconds ahead, model]."""
        if not len(self._gpus):
            return np.zeros((len(ahead_s), 0))
        every = self._laws.hazards(now_s, ahead_s)
        return every[self._laws.chosen, :, np.arange(len(self._gpus))].T

    def _gone(self, now_s: float, ahead_s: Floats) -> Floats:
        """Return the probability that all of a model's requests in flight have ended, [seconds ahead, model]."""
        gone = np.ones((len(ahead_s), len(self._gpus)))
        model = self._flight.model
        if not len(model):
            return gone
        ran_s = now_s - self._flight.start_s
        before = self._runs.cumulative(model, ran_s)
        for index, seconds in enumerate(ahead_s.tolist()):
            ended = -np.expm1(before - self._runs.cumulative(model, ran_s + seconds))
            np.multiply.at(gone[index], model, ended)
        return gone

    def _distributions(self, hazards: Floats, gone: Floats, values: Floats, chances: Floats, tried: Whole) -> Floats:
        """Return the distributions of the peak of units, of shape [reach, units]."""
        idle = gone[:, None, :] * np.exp(-hazards[:, None, :] * values[None, :, None])
        new = np.exp(-self._new_rate() * REACHES[tried] * self._window_s)
        new = np.repeat(new[:, None, None], len(values), axis=1)
        active = (1 - np.concatenate([idle, new], axis=2)).reshape(len(tried) * len(values), -1)
        rows = sum_distribution(active, self._units[0])
        return np.asarray(np.einsum("rvu,v->ru", rows.reshape(len(tried), len(values), -1), chances))

    def _expected(self, hazards: Floats, gone: Floats, values: Floats, chances: Floats) -> float:
        """Return the mean number of active models over the window; a new request counts for as long as it runs."""
        if not len(self._gpus):
            return 0.0
        models = np.arange(len(self._gpus))[None, :]
        seconds = MIDDLES * self._window_s
        points = np.outer(seconds, (np.arange(QUARTERS) + 0.5) / QUARTERS).reshape(-1, 1)
        left = np.exp(-self._runs.cumulative(models, points)).reshape(len(seconds), QUARTERS, -1).mean(axis=1)
        come = hazards * left
        idle = gone * np.einsum("vpm,v->pm", np.exp(-values[:, None, None] * come), chances)
        total = float((1 - idle).sum())
        return total / len(seconds) + self._new_rate() * self._window_s / 2

    def _new_rate(self) -> float:
        return self._new_models / (self._watched_s + NEW_PRIOR_S)

    def _new_gpus(self) -> float:
        return float(np.quantile(self._gpus, 0.5, method="higher")) if len(self._gpus) else 1.0

    def laws(self) -> dict[str, int]:
        """Return the number of models by their law of arrival."""
        return {name: int((self._laws.chosen == index).sum()) for index, name in enumerate(LAWS)}

    def common_setting(self) -> tuple[float, float] | None:
        """Return the setting of the factor that all rates share; see `CommonRate.setting`."""
        return self._common.setting if self._common else None
