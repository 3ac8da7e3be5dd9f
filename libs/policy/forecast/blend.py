"""A blend of forecasts, weighted by their recent errors on this series at this horizon.

Candidates are the targets, their median, two ridge regressions on them, and an autoregression. The learned ones are
refitted at checkpoints, so every past forecast depends on earlier bins only.

A candidate's weight is prior * (its mean absolute error / the least)^-power, with errors halved in weight after a
day. The power grows with the number of independent outcomes, so in a short history all weigh alike. Fixed rules
that track the best expert lose little in hindsight (Herbster and Warmuth, Machine Learning 32, 1998); learned
weights lost more in sixteen series.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.forecast.history import Floats

LOSS_HALF_LIFE_S: Final = 86_400.0
LEAST_HALF_LIFE: Final = 24.0
"""The minimum half-life in bins, which applies if bins are long."""
MOST_POWER: Final = 80.0
POWER_OUTCOMES: Final = 40.0
"""The number of independent outcomes at which half of the greatest power is reached."""
# Outcomes h bins ahead overlap: h^0.7 of them carry as much information as one.
OVERLAP: Final = 0.7
# The prior weight of the median and of each regression; the other candidates share the rest.
PRIOR_SHARE: Final = 0.15
# The number of rows, one bin ahead, at which a regression is halfway between the present value and least squares.
RIDGES: Final = (30.0, 300.0)
LAGS: Final = 12
LEARNED: Final = ("regression", "regression, cautious", "median of all", "autoregression")
LEAST_ROWS: Final = 144
"""The minimum number of outcomes for a regression. With half a day of them, forecasts were worse than without it."""
FAR_S: Final = 43_200.0
"""The horizon from which the hour of the day tells more than the present, until a regression is learned."""
_STEP: Final = 1.12
"""The minimum factor between checkpoints; in a short history they are a day apart."""
_BLOCK: Final = 64

Targets = Callable[[int, int], Floats]
"""Forecasts in logarithms for (horizon, first), of shape [n - first, names]; see
`libs.policy.forecast.targets.Targets.at`.
"""


def checkpoints(bins: int, day: int) -> list[int]:
    """Return the bins at which regressions are refitted.

    These are a quarter and half of a day, days, and then every eighth of the history.
    """
    found, at = [day // 4, day // 2], day
    while at < bins:
        found.append(at)
        at = max(at + day, int(at * _STEP))
    return [at for at in found if 0 < at < bins]


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """The result of one fit of the regressions and the autoregression."""

    ridges: Floats
    """Weights of the targets less the present, and of a constant, of shape [2, names]."""
    lags: Floats
    """Weights of deviations from `mean`, up to `horizon` bins ahead, of shape [LAGS]."""
    mean: float
    unlearned: int = 0
    """The candidate that replaces all learned ones until they are learned."""

    def predict(self, simple: "SimpleForecasts", lags: Floats, part: slice) -> Floats:
        """Return all candidates of these origins, of shape [part, names + LEARNED].

        `lags` has the last `LAGS` bins at each origin, of shape [n, LAGS].
        """
        targets, middle = simple.targets[part], simple.middle[part]
        if not len(self.ridges):
            now = targets[:, self.unlearned : self.unlearned + 1]
            return np.concatenate([targets, now, now, middle, now], axis=1)
        learned = np.empty((len(targets), 3))
        learned[:, :2] = targets[:, :1] + simple.moves[part] @ self.ridges.T
        learned[:, 2] = self.mean + (lags[part] - self.mean) @ self.lags
        # A regression outside the range of the simple forecasts would extrapolate.
        learned = np.clip(learned, simple.low[part], simple.high[part])
        return np.concatenate([targets, learned[:, :2], middle, learned[:, 2:]], axis=1)


@dataclass(frozen=True, slots=True)
class SimpleForecasts:
    """The targets of one horizon, with the statistics that every fit needs."""

    targets: Floats
    """Simple forecasts, of shape [n, names], as are their `moves` from the present; a constant is the first."""
    moves: Floats
    low: Floats
    """Their least, median and largest, each of shape [n, 1]."""
    middle: Floats
    high: Floats

    @classmethod
    def of(cls, targets: Floats) -> "SimpleForecasts":
        moves = targets - targets[:, :1]
        moves[:, 0] = 1.0
        order, half = np.sort(targets, axis=1), targets.shape[1] // 2
        middle = order[:, half] if targets.shape[1] % 2 else (order[:, half - 1] + order[:, half]) / 2
        return cls(targets, moves, order[:, :1], middle[:, None], order[:, -1:])


@dataclass(frozen=True, slots=True)
class HorizonBlend:
    """The state of one horizon after the last bin of a fit."""

    horizon: int
    learned: FittedWeights
    losses: Floats
    """Discounted sums of absolute errors, of shape [candidates]; `seen` is the same sum of ones."""
    seen: float
    pending: Floats
    """Candidates of the fit's last origins whose outcomes were still to come, of shape [<= horizon, candidates]."""
    predicted: Floats
    """Forecasts of past origins by the weights at their time, of shape [fitted]."""
    weights: Floats
    """Weights at the last origin, of shape [candidates]."""
    leads_from: int
    """The bin since which the heaviest candidate has had at least half of its present weight."""


class Blender:
    """The learning and application of blends for one series.

    `log` has no unknown bin; `actual` is the same with nan where unknown. `profile` is the target that the series is
    expected to return to, the origin's bin if none is known.
    """

    def __init__(self, log: Floats, actual: Floats, offset: float, step_s: float, profile: int) -> None:
        self._log, self._actual, self._offset = log, actual, offset
        self._half_life = max(LOSS_HALF_LIFE_S / step_s, LEAST_HALF_LIFE)
        self._profile, self._far = profile, FAR_S / step_s
        self._keep = 0.5 ** (1 / self._half_life)
        self._lags = log[np.maximum(np.arange(len(log))[:, None] - np.arange(LAGS), 0)]

    def fit(self, targets: Targets, horizons: Sequence[int], points: Sequence[int], start: int) -> list[HorizonBlend]:
        """Fit one blend for each horizon over all bins.

        `points` are the `checkpoints`; `start` is the bin number of the first bin.
        """
        count = len(self._log)
        ends = [*points, count]
        autos = _autoregressions(self._log, ends)
        return [self._fit_one(targets(horizon, 0), horizon, ends, autos, start) for horizon in horizons]

    def _fit_one(
        self, rows: Floats, horizon: int, ends: list[int], autos: list[tuple[Floats, float]], start: int
    ) -> HorizonBlend:
        count = len(self._log)
        simple = SimpleForecasts.of(rows)
        learned = _regressions(simple.moves, self._log, self._actual, horizon, ends)
        values = np.empty((count, rows.shape[1] + len(LEARNED)))
        none, following = (
            FittedWeights(np.empty((0, 0)), np.empty(0), 0.0, self._profile if horizon >= self._far else 0),
            [*(at - 1 for at in ends), count],
        )
        fits = [none]
        for ridges, (lags, mean) in zip(learned, autos, strict=True):
            fits.append(FittedWeights(ridges, _ahead(lags, horizon), mean) if len(ridges) else none)
        for fit, first, last in zip(fits, [0, *following], following, strict=False):
            if last > first:
                values[first:last] = fit.predict(simple, self._lags, slice(first, last))
        losses, seen = self._losses(values, horizon)
        weights = self._weights(losses, seen, horizon)
        leader = weights[:, weights[-1].argmax()]
        others = np.flatnonzero(leader < leader[-1] / 2)
        return HorizonBlend(
            horizon, fits[-1], losses[-1], float(seen[-1]), values[max(count - horizon, 0) :].copy(),
            np.einsum("tc,tc->t", weights, values), weights[-1], start + (int(others[-1]) + 1 if len(others) else 0),
        )  # fmt: skip

    def _losses(self, values: Floats, horizon: int) -> tuple[Floats, Floats]:
        """Return discounted sums ([n, candidates] of errors, [n] of ones) by the bin in which they are known."""
        errors = np.zeros((len(values), values.shape[1] + 1))
        if horizon < len(values):
            errors[horizon:] = self._errors(values[:-horizon], slice(horizon, None))
        sums = _decayed(errors, self._keep)
        return sums[:, :-1], sums[:, -1]

    def _errors(self, values: Floats, bins: slice) -> Floats:
        """Return absolute errors in the series' units, and ones, of shape [bins, candidates + 1]; zeros where
        unknown.
        """
        actual = self._actual[bins]
        known = np.isfinite(actual)
        came = np.exp(np.where(known, actual, 0.0)) - self._offset
        off = np.abs(np.maximum(np.exp(values) - self._offset, 0.0) - came[:, None])
        return np.concatenate([off, np.ones((len(off), 1))], axis=1) * known[:, None]

    def _weights(self, losses: Floats, seen: Floats, horizon: int) -> Floats:
        """Return the weights of candidates, of shape [n, candidates]; each row sums to 1."""
        outcomes = seen / horizon**OVERLAP
        power = (MOST_POWER * outcomes / (outcomes + POWER_OUTCOMES))[:, None]
        logs = losses / np.maximum(seen, 1e-9)[:, None]
        logs += 1e-12
        np.log(logs, out=logs)
        logs -= logs.min(axis=1, keepdims=True)
        logs *= -power
        logs += np.log(prior_weights(losses.shape[1]))
        logs -= logs.max(axis=1, keepdims=True)
        weights = np.exp(logs, out=logs)
        weights /= weights.sum(axis=1, keepdims=True)
        return weights

    def follow(self, blend: HorizonBlend, targets: Targets, fitted: int) -> Floats:
        """Return forecasts of the fit's last origin and all later ones, of shape [n - fitted + 1].

        The losses continue over the later bins.
        """
        first = fitted - 1
        simple = SimpleForecasts.of(targets(blend.horizon, first))
        values = blend.learned.predict(simple, self._lags[first:], slice(None))
        # Candidates of the origins whose outcomes come after the fit, in order: those of the fit, then new ones.
        before = np.concatenate([blend.pending, values[1:]])
        skip = blend.horizon - len(
            blend.pending
        )  # nonzero if the history is shorter than the horizon, without outcomes yet
        scored = before[: max(len(values) - 1 - skip, 0)]
        errors = np.zeros((len(values) - 1, values.shape[1] + 1))
        errors[len(errors) - len(scored) :] = self._errors(scored, slice(len(self._log) - len(scored), None))
        state = np.append(blend.losses, blend.seen)
        sums = np.empty((len(values), len(state)))
        sums[0] = state
        for index, row in enumerate(errors, start=1):
            state = self._keep * state + row
            sums[index] = state
        return np.asarray(np.einsum("tc,tc->t", self._weights(sums[:, :-1], sums[:, -1], blend.horizon), values))


def prior_weights(candidates: int) -> Floats:
    """Return the weights of candidates before any evidence, those of the learned candidates last."""
    found = np.full(candidates, (1 - 3 * PRIOR_SHARE) / (candidates - 3))
    found[-4:-1] = PRIOR_SHARE
    return found


def _regressions(moves: Floats, log: Floats, actual: Floats, horizon: int, ends: Sequence[int]) -> list[Floats]:
    """Return weights of shape [2, names], by each end's earlier outcomes; empty if there are too few.

    The regression is of moves on targets less the present.
    """
    came = actual[horizon:] - log[: max(len(log) - horizon, 0)]
    known = np.isfinite(came)
    came = np.where(known, came, 0.0)
    names = moves.shape[1]
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
        for index, at in enumerate(enough):
            found[at] = np.stack([each[index] for each in solved])
    return found


def _autoregressions(log: Floats, ends: Sequence[int]) -> list[tuple[Floats, float]]:
    """Fit (weights of the last `LAGS` deviations from the mean, the mean) by least squares on the bins before each end.

    Weights are zero with few bins.
    """
    # Sums of squares of all bins grow from end to end; centred on a bin's value, they lose no digits to a large mean.
    around, width = float(log[0]) if len(log) else 0.0, LAGS + 1
    off = log - around
    windows = np.lib.stride_tricks.sliding_window_view(off, width) if len(log) >= width else np.empty((0, width))
    squares, sums, done = np.zeros((width, width)), np.zeros(width), 0
    found = []
    for end in ends:
        last = max(end - LAGS, 0)
        part = windows[done:last]
        squares, sums, done = squares + part.T @ part, sums + part.sum(axis=0), max(done, last)
        mean = float(log[:end].mean())
        if end < 3 * LAGS:
            found.append((np.zeros(LAGS), mean))
            continue
        shift = mean - around
        centred = squares - shift * (sums[:, None] + sums) + last * shift * shift
        gram, cross = centred[LAGS - 1 :: -1, LAGS - 1 :: -1], centred[LAGS - 1 :: -1, LAGS]
        drawn = gram + (1e-3 * np.trace(gram) / LAGS + 1e-9) * np.eye(LAGS)
        found.append((np.asarray(np.linalg.solve(drawn, cross)), mean))
    return found


def _ahead(lags: Floats, horizon: int) -> Floats:
    """Return the weights of the same lags for a forecast `horizon` steps ahead."""
    companion = np.eye(LAGS, k=-1)
    companion[0] = lags
    return np.asarray(np.clip(np.nan_to_num(np.linalg.matrix_power(companion, horizon)[0]), -1e6, 1e6))


def _decayed(values: Floats, keep: float) -> Floats:
    """Return the sums over s <= t of keep^(t-s) * values[s], of shape [n, columns].

    They are computed in blocks, which is far faster than a loop over bins.
    """
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
