"""Forecasts weighed by how well each has done of late on this series, at this horizon. Pure.

Besides the targets there are their median, two ridge regressions on them, and an autoregression; the learned ones are
fitted anew at checkpoints, so that every past forecast is made of earlier bins alone. A candidate weighs
prior * (its mean absolute error / the least)^-power, errors counting half as much after a day. The power grows with
the number of independent outcomes: in a short history all weigh alike. Fixed rules that track the best expert lose
little in hindsight (Herbster and Warmuth, Machine Learning 32, 1998); learned weights lost more in sixteen series.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.forecast.history import Floats

LOSS_HALF_LIFE_S: Final = 86_400.0
LEAST_HALF_LIFE: Final = 24.0
"""Bins, where they are long."""
MOST_POWER: Final = 80.0
POWER_OUTCOMES: Final = 40.0
"""Independent outcomes at which half of the most power is reached."""
OVERLAP: Final = 0.7
"""Outcomes h bins ahead overlap: h^0.7 of them tell as much as one."""
PRIOR_SHARE: Final = 0.15
"""Prior weight of the median, and of each regression; the others share the rest."""
RIDGES: Final = (30.0, 300.0)
"""Rows, one bin ahead, at which a regression is half way from the present to least squares."""
LAGS: Final = 12
LEARNED: Final = ("regression", "regression, cautious", "median of all", "autoregression")
LEAST_ROWS: Final = 144
"""Outcomes that a regression needs: with half a day of them it does more harm than good."""
_STEP: Final = 1.12
"""Between checkpoints, at least; in a short history it is a day."""
_BLOCK: Final = 64

Targets = Callable[[int, int], Floats]
"""(horizon, first) -> [n - first, names] Logarithms; see `libs.policy.forecast.targets.Targets.at`."""


def checkpoints(bins: int, day: int) -> list[int]:
    """Bins at which regressions are fitted anew: quarter and half a day, days, then every eighth of the history."""
    found, at = [day // 4, day // 2], day
    while at < bins:
        found.append(at)
        at = max(at + day, int(at * _STEP))
    return [at for at in found if 0 < at < bins]


@dataclass(frozen=True, slots=True)
class Learned:
    """What one fit of the regressions found."""

    ridges: Floats
    """[2, names] On targets less the present, and a constant."""
    lags: Floats
    """[LAGS] Of deviations from `mean`, to `horizon` bins ahead."""
    mean: float

    def predict(self, targets: Floats, log: Floats, places: NDArray[np.int64]) -> Floats:
        """[places, names + LEARNED] All candidates; log: the whole series, targets: rows at `places`."""
        if not len(self.ridges):
            now = targets[:, :1]
            return np.concatenate([targets, now, now, np.median(targets, axis=1)[:, None], now], axis=1)
        moves = targets - targets[:, :1]
        moves[:, 0] = 1.0
        lagged = log[np.maximum(places[:, None] - np.arange(LAGS), 0)] - self.mean
        low, high = targets.min(axis=1)[:, None], targets.max(axis=1)[:, None]
        learned = np.stack([*(targets[:, 0] + moves @ row for row in self.ridges), self.mean + lagged @ self.lags], 1)
        # No regression leaves the range of the simple forecasts: it would be extrapolating.
        learned = np.clip(learned, low, high)
        middle = np.median(targets, axis=1)[:, None]
        return np.concatenate([targets, learned[:, :2], middle, learned[:, 2:]], axis=1)


@dataclass(frozen=True, slots=True)
class HorizonBlend:
    """State of one horizon after the last bin of a fit."""

    horizon: int
    learned: Learned
    losses: Floats
    """[candidates] Discounted sums of absolute errors; `seen` is that of ones."""
    seen: float
    pending: Floats
    """[<= horizon, candidates] Candidates of the last origins of the fit, whose outcomes were still to come."""
    predicted: Floats
    """[fitted] What the weights of each origin's time said."""
    weights: Floats
    """[candidates] At the last origin."""
    leads_from: int
    """Bin from which on the heaviest candidate has had at least half of its present weight."""


class Blender:
    """Learns and applies blends of one series.

    log: no bin unknown; actual: the same, nan where unknown; levels(log) gives back the series' own units.
    """

    def __init__(self, log: Floats, actual: Floats, offset: float, step_s: float) -> None:
        self._log, self._actual, self._offset = log, actual, offset
        self._half_life = max(LOSS_HALF_LIFE_S / step_s, LEAST_HALF_LIFE)
        self._keep = 0.5 ** (1 / self._half_life)

    def fit(self, targets: Targets, horizons: Sequence[int], points: Sequence[int], start: int) -> list[HorizonBlend]:
        """One blend for each horizon, over all bins; points: `checkpoints`; start: bin number of the first bin."""
        count = len(self._log)
        ends = [*points, count]
        autos = [_autoregression(self._log[:at]) for at in ends]
        return [self._fit_one(targets(horizon, 0), horizon, ends, autos, start) for horizon in horizons]

    def _fit_one(
        self, rows: Floats, horizon: int, ends: list[int], autos: list[tuple[Floats, float]], start: int
    ) -> HorizonBlend:
        count = len(self._log)
        learned = _regressions(rows, self._log, self._actual, horizon, ends)
        values = np.empty((count, rows.shape[1] + len(LEARNED)))
        none, following = Learned(np.empty((0, 0)), np.empty(0), 0.0), [*(at - 1 for at in ends), count]
        fits = [none]
        for ridges, (lags, mean) in zip(learned, autos, strict=True):
            fits.append(Learned(ridges, _ahead(lags, horizon), mean) if len(ridges) else none)
        for fit, first, last in zip(fits, [0, *following], following, strict=False):
            if last > first:
                values[first:last] = fit.predict(rows[first:last], self._log, np.arange(first, last))
        losses, seen = self._losses(values, horizon)
        weights = self._weights(losses, seen, horizon)
        leader = weights[:, weights[-1].argmax()]
        others = np.flatnonzero(leader < leader[-1] / 2)
        return HorizonBlend(
            horizon, fits[-1], losses[-1], float(seen[-1]), values[max(count - horizon, 0) :].copy(),
            np.einsum("tc,tc->t", weights, values), weights[-1], start + (int(others[-1]) + 1 if len(others) else 0),
        )  # fmt: skip

    def _losses(self, values: Floats, horizon: int) -> tuple[Floats, Floats]:
        """([n, candidates], [n]) Discounted sums, of errors and of ones, by the bin in which they are known."""
        errors = np.zeros((len(values), values.shape[1] + 1))
        if horizon < len(values):
            errors[horizon:] = self._errors(values[:-horizon], slice(horizon, None))
        sums = _decayed(errors, self._keep)
        return sums[:, :-1], sums[:, -1]

    def _errors(self, values: Floats, bins: slice) -> Floats:
        """[bins, candidates + 1] Absolute errors in the series' units, and 1, or zeros where the outcome is unknown."""
        actual = self._actual[bins]
        known = np.isfinite(actual)
        came = np.exp(np.where(known, actual, 0.0)) - self._offset
        off = np.abs(np.maximum(np.exp(values) - self._offset, 0.0) - came[:, None])
        return np.concatenate([off, np.ones((len(off), 1))], axis=1) * known[:, None]

    def _weights(self, losses: Floats, seen: Floats, horizon: int) -> Floats:
        """[n, candidates] Each row of sum 1."""
        outcomes = seen / horizon**OVERLAP
        power = (MOST_POWER * outcomes / (outcomes + POWER_OUTCOMES))[:, None]
        logs = np.log(losses / np.maximum(seen, 1e-9)[:, None] + 1e-12)
        wanted = np.log(prior_weights(losses.shape[1])) - power * (logs - logs.min(axis=1, keepdims=True))
        weights = np.exp(wanted - wanted.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def follow(self, blend: HorizonBlend, targets: Targets, fitted: int) -> Floats:
        """[n - fitted + 1] Forecasts of the fit's last origin and of all after it, the losses going on."""
        first = fitted - 1
        rows = targets(blend.horizon, first)
        values = blend.learned.predict(rows, self._log, np.arange(first, len(self._log)))
        # Candidates of the origins whose outcomes come after the fit, in order: those of the fit, then new ones.
        before = np.concatenate([blend.pending, values[1:]])
        skip = blend.horizon - len(blend.pending)  # a history shorter than the horizon: no outcome yet
        due = before[: max(len(values) - 1 - skip, 0)]
        errors = np.zeros((len(values) - 1, values.shape[1] + 1))
        errors[len(errors) - len(due) :] = self._errors(due, slice(len(self._log) - len(due), None))
        state = np.append(blend.losses, blend.seen)
        sums = np.empty((len(values), len(state)))
        sums[0] = state
        for place, row in enumerate(errors, start=1):
            state = self._keep * state + row
            sums[place] = state
        return np.asarray(np.einsum("tc,tc->t", self._weights(sums[:, :-1], sums[:, -1], blend.horizon), values))


def prior_weights(candidates: int) -> Floats:
    """Weights before any evidence; the learned candidates come last."""
    found = np.full(candidates, (1 - 3 * PRIOR_SHARE) / (candidates - 3))
    found[-4:-1] = PRIOR_SHARE
    return found


def _regressions(rows: Floats, log: Floats, actual: Floats, horizon: int, ends: Sequence[int]) -> list[Floats]:
    """Weights [2, names] of the moves of each end's earlier outcomes on targets less the present; empty where few."""
    moves = rows - rows[:, :1]
    moves[:, 0] = 1.0
    came = actual[horizon:] - log[: max(len(log) - horizon, 0)]
    known = np.isfinite(came)
    came = np.where(known, came, 0.0)
    names = rows.shape[1]
    gram, cross, seen, done = np.zeros((names, names)), np.zeros(names), 0, 0
    grams, crosses, counts = [], [], []
    for end in ends:
        last = max(end - horizon, 0)
        part = moves[done:last] * known[done:last, None]
        gram, cross = gram + part.T @ part, cross + part.T @ came[done:last]
        seen, done = seen + int(known[done:last].sum()), max(done, last)
        grams.append(gram)
        crosses.append(cross)
        counts.append(seen)
    enough = [at for at, count in enumerate(counts) if count >= LEAST_ROWS]
    found: list[Floats] = [np.empty((0, 0))] * len(ends)
    if enough:
        stacked = np.stack([grams[at] for at in enough])
        diagonal = np.einsum("eii->ei", stacked)
        unit = diagonal + 0.1 * diagonal.mean(axis=1, keepdims=True) + 1e-9
        rows_seen = np.array([counts[at] for at in enough], dtype=np.float64)[:, None]
        solved = []
        for ridge in RIDGES:
            drawn = stacked + (ridge * horizon**0.5 * unit / rows_seen)[:, :, None] * np.eye(names)
            solved.append(np.linalg.solve(drawn, np.stack([crosses[at] for at in enough])[:, :, None])[:, :, 0])
        for place, at in enumerate(enough):
            found[at] = np.stack([each[place] for each in solved])
    return found


def _autoregression(log: Floats) -> tuple[Floats, float]:
    """(weights of the last `LAGS` deviations from the mean, the mean), by least squares; zeros where there are few."""
    mean = float(log.mean())
    if len(log) < 3 * LAGS:
        return np.zeros(LAGS), mean
    windows = np.lib.stride_tricks.sliding_window_view(log - mean, LAGS + 1)
    before, came = windows[:, LAGS - 1 :: -1][:, :LAGS], windows[:, LAGS]
    gram = before.T @ before
    drawn = gram + (1e-3 * np.trace(gram) / LAGS + 1e-9) * np.eye(LAGS)
    return np.asarray(np.linalg.solve(drawn, before.T @ came)), mean


def _ahead(lags: Floats, horizon: int) -> Floats:
    """Weights of the same lags for `horizon` steps ahead."""
    companion = np.eye(LAGS, k=-1)
    companion[0] = lags
    return np.asarray(np.clip(np.nan_to_num(np.linalg.matrix_power(companion, horizon)[0]), -1e6, 1e6))


def _decayed(values: Floats, keep: float) -> Floats:
    """[n, columns] sum over s <= t of keep^(t-s) * values[s], in blocks: far faster than a loop over bins."""
    count, columns = values.shape
    blocks = -(-count // _BLOCK)
    padded = np.zeros((blocks * _BLOCK, columns))
    padded[:count] = values
    gap = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    within = np.where(gap >= 0, keep ** np.maximum(gap, 0), 0.0)
    sums = within @ padded.reshape(blocks, _BLOCK, columns)
    fade = keep ** np.arange(1, _BLOCK + 1)[:, None]
    carry = np.zeros(columns)
    for at in range(blocks):
        sums[at] += carry * fade
        carry = sums[at, -1]
    return np.asarray(sums.reshape(-1, columns)[:count])
