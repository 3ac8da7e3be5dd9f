"""How far a series may be from its forecast: past errors by state, kept honest by their own coverage. Pure.

Errors of past forecasts, divided by a scale that depends on how restless the series is and how far from its level,
give the shape (split conformal prediction); old ones count less. Each quantile's width then grows while it is passed
too often and shrinks while it is not (adaptive conformal inference: Gibbs and Candes, NeurIPS 2021). Bursts are in the
errors, so they are in the bands.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.forecast.history import Floats
from libs.policy.forecast.levels import running_means

LEVELS: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Quantiles of every forecast: bands of 50, 80 and 90 %, and the median."""
MEMORY_S: Final = 360_000.0
"""Half-life of an error's weight."""
PRIOR_ERROR: Final = 0.12
PRIOR_GROWTH: Final = 0.3
"""Mean absolute error in logarithms before any evidence: 0.12 ten minutes ahead, growing with this power of the
horizon. From ServeGen's m-large, days 1 to 10."""
PRIOR_WINDOWS: Final = 1.0
"""The prior counts like so many horizons of history."""
WARM_BINS: Final = 288
"""Before the first forecast over which widths adapt."""
ANCHOR_BINS: Final = 6
"""Shapes are taken anew every so many bins."""
ADAPT: Final = 0.06
"""Step of a quantile's log width for each outcome; less where outcomes of over `ADAPT_BINS` overlap."""
ADAPT_BINS: Final = 6
MOST_WIDTH: Final = 0.7
"""Of a log width that adapts: a factor of 2."""
_SMALL_ERROR: Final = 0.02
_RIDGE: Final = 0.05
_SAME: Final = 1e-9
"""Rounding differs with the length of arrays: what depends on it would not be the same for the same past."""
_LAPLACE: Final = 1.3 * np.array(
    [-np.log(2 - 2 * p) if p > 0.5 else np.log(2 * p) for p in np.linspace(0.025, 0.975, 20)]
)
"""Shape of errors before any evidence. A scale foretells the mean of log sizes, so mean sizes are 1.3 of it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Expected size of an error by the state of the series."""

    centre: Floats
    weights: Floats
    """[horizons, features]"""

    def at(self, states: Floats) -> Floats:
        """[horizons, n]"""
        return np.asarray(np.exp(np.clip(self.weights @ (states - self.centre).T, -5.0, 2.0)))


def states_of(log: Floats, step_s: float) -> Floats:
    """[n, 4] One, how far the series is from its hour, its hour from its days, and how restless it is."""
    hour, days = running_means(log, np.array([3600.0, 180_000.0]) / step_s)
    moves = running_means(np.abs(np.diff(log, prepend=log[0])), np.array([7200.0 / step_s]))[0]
    return np.stack([np.ones(len(log)), np.abs(log - hour), np.abs(hour - days), np.log(moves + _SMALL_ERROR)], axis=1)


def fit_scale(states: Floats, errors: Floats, horizons: tuple[int, ...], step_s: float) -> Scale:
    """Regression of log error sizes on states, by horizon; errors: [horizons, n], nan where not known."""
    recency = 0.5 ** (np.arange(len(states))[::-1] * step_s / MEMORY_S)
    centre = states.mean(axis=0)
    centre[0] = 0.0
    weights = np.zeros((len(horizons), states.shape[1]))
    for place, horizon in enumerate(horizons):
        known = np.isfinite(errors[place])
        weights[place, 0] = np.log(prior_error(horizon * step_s))
        if not known.any():
            continue
        rows, weight = states[known] - centre, recency[known] / recency[known].sum()
        sizes = np.log(np.abs(errors[place, known]) + _SMALL_ERROR)
        mean = float(weight @ sizes)
        # Few independent errors say little of what their size depends on.
        ridge = np.diag([1e-9, *[_RIDGE * (1 + horizon / 12)] * (states.shape[1] - 1)])
        solved = np.linalg.solve((rows * weight[:, None]).T @ rows + ridge, (rows * weight[:, None]).T @ (sizes - mean))
        weights[place] = solved
        weights[place, 0] += mean
    return Scale(centre, weights)


def prior_error(horizon_s: float) -> float:
    """Mean absolute error in logarithms to expect of a series of which nothing is known."""
    return float(PRIOR_ERROR * (horizon_s / 600.0) ** PRIOR_GROWTH)


def bands(
    point: Floats,
    actual: Floats,
    scale: Floats,
    horizons: tuple[int, ...],
    step_s: float,
    *,
    first: int,
    fitted: int,
) -> Floats:
    """[n - first, horizons, levels] Sorted quantiles, in logarithms, of origins from `first` on.

    point, scale: [horizons, n] by origin. actual: [n], nan where unknown. fitted: bins that the model was fitted on;
    widths adapt from `WARM_BINS` before it, so that an origin's bands depend on nothing after it.
    """
    count = point.shape[1]
    start = max(min(fitted - WARM_BINS, first), 0)
    raw = np.stack(
        [_shapes(point[k], actual, scale[k], h, step_s=step_s, start=start) for k, h in enumerate(horizons)], axis=1
    )  # [n - start, horizons, levels] offsets in logarithms
    steps = np.array(horizons)
    rate = ADAPT * np.minimum(1.0, ADAPT_BINS / steps)[:, None]
    levels = np.array(LEVELS)
    outward = np.sign(levels - 0.5)
    width = np.zeros((len(steps), len(levels)))
    out = np.empty_like(raw)
    rows = np.arange(len(steps))
    for origin in range(start, count):
        due = origin - steps
        ripe = due >= start
        if ripe.any() and np.isfinite(actual[origin]):
            below = actual[origin] <= out[np.maximum(due, start) - start, rows] + _SAME
            width += np.where(ripe[:, None], rate * outward * (levels - below), 0.0)
            np.clip(width, -MOST_WIDTH, MOST_WIDTH, out=width)
        out[origin - start] = point[:, origin, None] + raw[origin - start] * np.exp(width)
    return np.asarray(np.sort(out[first - start :], axis=2))


def _shapes(point: Floats, actual: Floats, scale: Floats, horizon: int, *, step_s: float, start: int) -> Floats:
    """[n - start, levels] Offsets of quantiles from the forecast of each origin, before they adapt."""
    count = len(point)
    ended = max(count - horizon, 0)
    places = np.flatnonzero(np.isfinite(actual[horizon:]))[: ended or None]
    relative = (actual[places + horizon] - point[places]) / scale[places]
    weight = 0.5 ** ((start - places) * step_s / MEMORY_S)  # of one reference, whatever follows
    anchors = np.arange(start - start % ANCHOR_BINS, count, ANCHOR_BINS)
    seen = np.searchsorted(places, anchors - horizon, side="right")  # errors known at each anchor
    total, squares, sizes = (_sum_before(each, seen) for each in (weight, weight**2, weight * np.abs(relative)))
    windows = total**2 / np.maximum(squares, 1e-300) / horizon
    size = np.where(total > 0, np.maximum(sizes / np.maximum(total, 1e-300), 1e-6), 1.0)
    # The prior's share, in size and in shape, shrinks with the horizons that were seen.
    expected = prior_error(horizon * step_s) / np.exp(np.log(scale[: start + 1]).mean())
    shrunk = np.exp((windows * np.log(size) + PRIOR_WINDOWS * np.log(expected)) / (windows + PRIOR_WINDOWS))
    few = 1 + 1.55 / np.maximum(windows + PRIOR_WINDOWS, 1.5)  # near Student's t over the normal at 95 %
    merged = np.concatenate([relative, _LAPLACE])
    order = np.argsort(merged, kind="stable")
    known_from = np.concatenate([places + horizon, np.full(len(_LAPLACE), -1)])[order]
    base = np.concatenate([weight, np.zeros(len(_LAPLACE))])[order]
    pseudo = np.concatenate([np.zeros(len(places)), np.full(len(_LAPLACE), 1 / len(_LAPLACE))])[order]
    share = np.where(total > 0, PRIOR_WINDOWS / (windows + PRIOR_WINDOWS), 1.0)
    own = ((1 - share) / np.maximum(total, 1e-300))[:, None]
    reached = np.cumsum(np.where(known_from <= anchors[:, None], base, 0.0) * own + share[:, None] * pseudo, axis=1)
    at = [np.searchsorted(row, np.array(LEVELS) * row[-1] - _SAME) for row in reached]
    out = merged[order][np.minimum(np.stack(at), len(merged) - 1)] * (shrunk / size * few)[:, None]
    out[:, LEVELS.index(0.5)] = 0.0  # the blend was learned as a median; one of few past errors is worse
    return np.asarray(out[(np.arange(start, count) - anchors[0]) // ANCHOR_BINS] * scale[start:, None])


def _sum_before(values: Floats, places: NDArray[np.intp]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])[places]
