"""Predictions of each model's next request: several arrival laws side by side, each model's chosen by how well it
predicted.

A law yields the cumulative hazard of every model's next arrival over the seconds ahead. `constant` is a Poisson
process. `hourly` is one whose rate follows the hour of the day as the total of all models does. `gamma` is a
renewal process with gamma gaps, and `renewal` one with the observed gaps, which captures sessions followed by
silence. The rates of models with little history are shrunk towards the others' (a Gamma prior by moments: empirical
Bayes).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.reserve.counts import Floats, HazardTable, Whole, gamma_cdf

HOUR_S: Final = 3600.0
HOURS: Final = 24
MEMORIES_S: Final = (3 * HOUR_S, 24 * HOUR_S, 7 * 24 * HOUR_S)
"""The half-lives of the evidence for rates."""
LAWS: Final = ("constant 3h", "constant 24h", "constant 7d", "hourly", "gamma", "renewal")
POISSON_LAWS: Final = 4
"""The number of leading laws that are Poisson processes, given the factor common to all rates."""
PENALTY: Final = np.array([0.0, 0.0, 0.0, 2.0, 2.0, 4.0])
"""The nats by which a richer law must predict better to be chosen."""
SHARED_WEIGHT: Final = 3.0
"""The weight, in models, of the mean evidence added to each model's own.

A new model thus gets the law that suits most models.
"""
COLD_WINDOWS: Final = 10
"""The windows after a model's first arrival in which its laws know too little to be judged."""
MOST_NATS: Final = 6.0
"""The maximum evidence that one window may give against a law."""
JUDGED_S: Final = 24 * HOUR_S
"""The half-life of the evidence for laws."""
HOUR_PRIOR: Final = 50.0
"""The weight, in requests, of the mean rate in the estimate of each hour's rate."""
MOST_DISPERSION: Final = 16.0
_CVS: Final = np.array([1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0])
_GRID: Final = np.geomspace(1e-5, 1e3, 200)
LEAST_LEFT: Final = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class WindowArrivals:
    """The arrivals of one window, in order of time within each model."""

    t_s: Floats
    model: Whole


def _gamma_tables() -> Floats:
    """Return the cumulative hazards of gamma gaps of mean 1, of shape [cv, grid]."""
    rows = []
    for cv in _CVS.tolist():
        shape = 1 / (cv * cv)
        left = 1 - gamma_cdf(shape, _GRID * shape)
        hazard = -np.log(np.maximum(left, LEAST_LEFT))
        # Beyond the range in which the series is exact, the tail is nearly exponential.
        rows.append(np.where(left > LEAST_LEFT * 10, hazard, -np.log(LEAST_LEFT) + (_GRID - _GRID[0]) * shape))
    return np.asarray(np.maximum.accumulate(np.array(rows), axis=1))


class ArrivalLaws:
    """The arrival laws of all models, learned from each window's arrivals."""

    def __init__(self, shortest_s: float) -> None:
        """Create laws whose finest distinguishable gap is `shortest_s`."""
        self._gaps = HazardTable(shortest_s, 0.5 ** (1 / MEMORIES_S[-1]))
        self._tables = _gamma_tables()
        self.last_s: Floats = np.zeros(0)
        """The time of each model's last arrival, or of its addition."""
        self._count: Floats = np.zeros((len(MEMORIES_S), 0))
        self._spent_s: Floats = np.zeros((len(MEMORIES_S), 0))
        self._hour_count: Floats = np.zeros(HOURS)
        self._hour_expected: Floats = np.zeros(HOURS)
        self._this_hour = 0
        self._this_count = self._this_expected = 0.0
        self._gap_moments: Floats = np.zeros((3, 0))
        self._evidence: Floats = np.zeros((len(LAWS), 0))
        self._rates: Floats = np.zeros((len(MEMORIES_S), 0))
        self._cv_index: Whole = np.zeros(0, dtype=np.int64)
        self.chosen: Whole = np.zeros(0, dtype=np.int64)
        """The index into `LAWS` of each model's law."""

    def __len__(self) -> int:
        return len(self.last_s)

    def grow(self, models: int, now_s: float) -> None:
        """Add models up to this number, first requested at `now_s`."""
        more = models - len(self.last_s)
        if more <= 0:
            return
        self.last_s = np.append(self.last_s, np.full(more, now_s))
        self._count = np.pad(self._count, ((0, 0), (0, more)))
        self._spent_s = np.pad(self._spent_s, ((0, 0), (0, more)))
        self._gap_moments = np.pad(self._gap_moments, ((0, 0), (0, more)))
        self._evidence = np.pad(self._evidence, ((0, 0), (0, more)))
        self._gaps.grow(models)
        self.refresh()

    def hazards(self, now_s: float, ahead_s: Floats) -> Floats:
        """Return the cumulative hazards of the next arrival, of shape [law, seconds ahead, model]."""
        models = np.arange(len(self))
        since_s = np.maximum(now_s - self.last_s, 0.0)
        found = np.empty((len(LAWS), len(ahead_s), len(self)))
        found[: len(MEMORIES_S)] = self._rates[:, None, :] * ahead_s[None, :, None]
        found[3] = found[1] * self._season(now_s)
        rate = self._rates[2]
        later_s = since_s + ahead_s[:, None]
        found[4] = self._gamma(later_s * rate) - self._gamma(since_s * rate)
        found[5] = self._gaps.cumulative(models, later_s) - self._gaps.cumulative(models, since_s)
        return np.maximum(found, 1e-12)

    def _season(self, now_s: float) -> float:
        hour = int(now_s / HOUR_S) % HOURS
        mean = self._hour_count.sum() / max(self._hour_expected.sum(), 1e-9) if self._hour_count.sum() else 1.0
        return float((self._hour_count[hour] + HOUR_PRIOR) / (self._hour_expected[hour] * mean + HOUR_PRIOR))

    def _gamma(self, gaps: Floats) -> Floats:
        at = np.clip(gaps, _GRID[0], _GRID[-1])
        exact = np.log(at / _GRID[0]) / np.log(_GRID[1] / _GRID[0])
        below = np.minimum(exact.astype(np.int64), len(_GRID) - 2)
        low, high = self._tables[self._cv_index, below], self._tables[self._cv_index, below + 1]
        return np.asarray(np.where(gaps < _GRID[0], low * gaps / _GRID[0], low + (high - low) * (exact - below)))

    def learn(self, begin_s: float, end_s: float, arrivals: WindowArrivals, common: float) -> None:
        """Learn from a window that has passed; `common` is the factor on all models' rates during it."""
        length_s = end_s - begin_s
        counts = np.bincount(arrivals.model, minlength=len(self)).astype(np.float64)
        hazard = self.hazards(begin_s, np.array([length_s]))[:, 0, :] * common
        nats = np.where(counts[None, :] > 0, np.log(-np.expm1(-hazard)), -hazard)
        nats[:, self._spent_s[-1] < COLD_WINDOWS * length_s] = 0.0
        self._evidence = self._evidence * 0.5 ** (length_s / JUDGED_S) + np.maximum(nats, -MOST_NATS)
        self._learn_gaps(begin_s, end_s, arrivals)
        self._learn_hour(int(begin_s / HOUR_S), float(counts.sum()), float(self._rates[2].sum()) * length_s)
        for index, memory_s in enumerate(MEMORIES_S):
            keep = 0.5 ** (length_s / memory_s)
            self._count[index] = self._count[index] * keep + counts
            self._spent_s[index] = self._spent_s[index] * keep + length_s

    def _learn_hour(self, hour: int, arrivals: float, expected: float) -> None:
        # An hour counts once it is over, so that it predicts the same hour of other days but not itself.
        if hour != self._this_hour:
            index = self._this_hour % HOURS
            self._hour_count[index] += self._this_count
            self._hour_expected[index] += self._this_expected
            self._this_hour, self._this_count, self._this_expected = hour, 0.0, 0.0
        self._this_count += arrivals
        self._this_expected += expected

    def _learn_gaps(self, begin_s: float, end_s: float, arrivals: WindowArrivals) -> None:
        order = np.lexsort((arrivals.t_s, arrivals.model))
        t_s, model = arrivals.t_s[order], arrivals.model[order]
        is_first = np.ones(len(model), dtype=bool)
        is_first[1:] = model[1:] != model[:-1]
        before_s = np.where(is_first, self.last_s[model], np.roll(t_s, 1)) if len(model) else t_s
        gap_s = t_s - before_s
        watched_s = np.where(is_first, begin_s - before_s, 0.0)
        self._gaps.forget(end_s - begin_s)
        self._gaps.learn(model, np.maximum(watched_s, 0.0), gap_s, np.ones(len(model)))
        for row, values in zip(self._gap_moments, (np.ones(len(gap_s)), gap_s, gap_s * gap_s), strict=True):
            np.add.at(row, model, values)
        np.maximum.at(self.last_s, model, t_s)
        models = np.arange(len(self))
        since_s = end_s - self.last_s
        watched_s = np.maximum(begin_s - self.last_s, 0.0)
        self._gaps.learn(models, watched_s, since_s, np.zeros(len(models)))

    def refresh(self) -> None:
        """Re-estimate the rates and shapes, and choose each model's law."""
        self._gaps.refresh()
        gaps, total_s, squares = self._gap_moments
        mean = total_s / np.maximum(gaps, 1)
        squared = np.where(gaps > 1, squares / np.maximum(gaps, 1) / np.maximum(mean * mean, 1e-12) - 1, 1.0)
        shared = float((squared * gaps).sum() / gaps.sum()) if gaps.sum() else 1.0
        dispersion = min(max(shared, 1.0), MOST_DISPERSION)
        self._rates = np.stack(
            [shrunk_rates(count, spent, dispersion) for count, spent in zip(self._count, self._spent_s, strict=True)]
        )
        cv = np.sqrt(np.maximum((squared * gaps + shared * 20) / (gaps + 20), 1e-6))
        self._cv_index = np.abs(np.log(cv[:, None] / _CVS[None, :])).argmin(axis=1)
        reported = self._evidence.mean(axis=1, keepdims=True) * SHARED_WEIGHT if len(self) else 0.0
        self.chosen = (self._evidence + reported - PENALTY[:, None]).argmax(axis=0)


def shrunk_rates(count: Floats, spent_s: Floats, dispersion: float = 1.0) -> Floats:
    """Return each model's rate given its count over its seconds, with a Gamma prior over models (empirical Bayes).

    The prior has the mean of all models, and the variance of their rates beyond that of counting. `dispersion` is
    the variance over the mean of a model's counts; bursts need that many times more arrivals to determine a rate.
    """
    if not len(count):
        return count
    mean = (float(count.sum()) + 0.5) / (float(spent_s.sum()) + 1.0)
    weight = spent_s / max(float(spent_s.sum()), 1e-9)
    rate = count / np.maximum(spent_s, 1e-9)
    noise = dispersion * mean * float((weight / np.maximum(spent_s, 1e-9)).sum())
    variance = max(float((weight * (rate - mean) ** 2).sum()) - noise, 0.01 * mean * mean)
    effective_count, effective_s = count / dispersion, spent_s / dispersion
    return (effective_count + mean * mean / variance) / (effective_s + mean / variance)
