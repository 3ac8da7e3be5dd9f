"""Uncertainty bands of forecasts, from past errors by state and corrected by their own coverage.

The shape comes from errors of past forecasts (split conformal prediction), of which old ones count less. Errors are
divided by a scale that grows with the restlessness of the series and its distance from its level. The size of errors
has a shorter memory than their shape, and follows a lasting change within hours. Each quantile's width then grows while
it is exceeded too often and shrinks while it is not (adaptive conformal inference: Gibbs and Candes, NeurIPS 2021).
Bursts are among the errors, so the bands contain them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.forecast.history import DAY_S, Floats, running_means
from libs.policy.forecast.targets import DAYS_BACK, FADE

LEVELS: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Quantiles of every forecast: bands of 50, 80 and 90 %, and the median."""
MEMORY_S: Final = 360_000.0
"""The half-life, in seconds, of the weight of a past error in the shape of bands."""
# A lasting change alters the size of errors far more than their shape. So sizes have a second, shorter memory. Its
# ratio to the long one is shrunk towards that of nearer horizons, which count as this many independent errors. Both
# were chosen on the tuning half of `make bench-forecast`.
RECENT_S: Final = 43_200.0
RECENT_PRIOR: Final = 15.0
PRIOR_ERROR: Final = 0.12
# The mean absolute error in logarithms before any evidence is 0.12 ten minutes ahead and grows with this power of
# the horizon. Both figures are from ServeGen's m-large, days 1 to 10.
PRIOR_GROWTH: Final = 0.3
# Beyond a day the hour of the day is known, and errors grow with this power.
PRIOR_GROWTH_FAR: Final = 0.15
# The prior weighs as much as this many horizons of history.
PRIOR_WINDOWS: Final = 2.0
# The weight of an error whose forecast was made within the first day, when no hour of the day was known.
UNLEARNED: Final = 0.1
# The weight of a shorter horizon's errors for a longer one falls with this power of their ratio, and is worth at most
# this many horizons of history. Both were chosen on the tuning half of `make bench-forecast`, with 1 to 7 days of
# history.
CARRY: Final = 0.3
MOST_CARRIED: Final = 1.0
# Mean absolute move, in logarithms, that a daily season may bring within `SEASON_S`. Chosen on the tuning half of
# `make bench-forecast`, cut into single days.
SEASON_MOVE: Final = 0.6
SEASON_S: Final = 21_600.0
WARM_BINS: Final = 288
"""The number of bins before the first forecast over which widths adapt."""
ANCHOR_BINS: Final = 6
"""The number of bins after which shapes are computed again."""
# The step of a quantile's log width for each outcome; smaller where outcomes of over `ADAPT_BINS` overlap.
ADAPT: Final = 0.03
ADAPT_BINS: Final = 9
# A log width adapts by at most this amount, a factor of 2.
MOST_WIDTH: Final = 0.7
LEAST_BLOCK: Final = 12
"""The horizon in bins from which on widths adapt by blocks of origins."""
# The variability of a series at a time of day is measured over this time before and after it.
AROUND_S: Final = 5400.0
_SMALL_ERROR: Final = 0.02
# Doublings of a weight after a fit; squares of weights stay finite.
_MOST_DOUBLINGS: Final = 400.0
_RIDGE: Final = 0.05
# Rounding differs with the length of arrays. Without this tolerance, the same past could give different results.
_SAME: Final = 1e-9
# The shape of errors before any evidence. A scale predicts the mean of log sizes, and mean sizes are 1.3 times
# that.
_LAPLACE: Final = 1.3 * np.array(
    [-np.log(2 - 2 * p) if p > 0.5 else np.log(2 * p) for p in np.linspace(0.025, 0.975, 20)]
)
_LAPLACE_SIZE: Final = float(np.abs(_LAPLACE).mean())


@dataclass(frozen=True, slots=True)
class Scale:
    """The expected size of an error by the state of the series."""

    centre: Floats
    weights: Floats
    """Regression weights, of shape [horizons, features] like the other matrix."""

    def at(self, states: Floats) -> Floats:
        """Return the expected sizes for these states, of shape [horizons, n]."""
        found = ((states - self.centre[:, None]) @ self.weights[:, :, None])[:, :, 0]
        return np.asarray(np.exp(np.clip(found, -5.0, 2.0)))


def states_of(log: Floats, horizons: tuple[int, ...], step_s: float) -> Floats:
    """Return the states at all origins, of shape [horizons, n, 5].

    The features are a constant, the distance of the series from its hour, and that of its hour from its days. Then come
    its restlessness, and its excess at the predicted time on earlier days.
    """
    hour, days = running_means(log, np.array([3600.0, 180_000.0]) / step_s)
    moved = np.abs(np.diff(log, prepend=log[0]))
    restless = np.log(running_means(moved, np.array([7200.0 / step_s]))[0] + _SMALL_ERROR)
    same = [np.ones(len(log)), np.abs(log - hour), np.abs(hour - days), restless]
    at_time = _restless_at_time(moved, horizons, step_s)
    return np.stack([np.stack([*same, row], axis=1) for row in at_time])


def _restless_at_time(moved: Floats, horizons: tuple[int, ...], step_s: float) -> Floats:
    """Return the log ratio of the mean move around the predicted time on earlier days to that of all bins before.

    The shape is [horizons, n]; values are 0 without an earlier day.
    """
    day, around = round(DAY_S / step_s), max(round(AROUND_S / step_s), 1)
    sums = np.concatenate([[0.0], np.cumsum(moved)])
    indices = np.arange(len(moved))
    usual = np.log(sums[1:] / (indices + 1) + _SMALL_ERROR)
    out = np.zeros((len(horizons), len(moved)))
    if day <= 2 * around:
        return out
    for row, horizon in zip(out, horizons, strict=True):
        total, weights = np.zeros(len(moved)), np.zeros(len(moved))
        first = -(-(horizon + around) // day)
        for back in range(first, first + DAYS_BACK):
            last = indices + horizon + around - back * day  # the end of a window that is complete at the origin
            seen = last - 2 * around >= 0
            window = (sums[last[seen] + 1] - sums[last[seen] - 2 * around]) / (2 * around + 1)
            total[seen] += FADE ** (back - first) * window
            weights[seen] += FADE ** (back - first)
        known = weights > 0
        row[known] = np.log(total[known] / weights[known] + _SMALL_ERROR) - usual[known]
    return out


def fit_scale(states: Floats, errors: Floats, horizons: tuple[int, ...], step_s: float) -> Scale:
    """Fit a regression of log error sizes on states.

    `states` is [horizons, n, features]; `errors` is [horizons, n], nan where unknown.
    """
    origins = np.arange(states.shape[1])
    recency = _knew(origins, step_s) * 0.5 ** (origins[::-1] * step_s / MEMORY_S)
    centre = states.mean(axis=1)
    centre[:, 0] = 0.0
    weights = np.zeros((len(horizons), states.shape[2]))
    for index, horizon in enumerate(horizons):
        known = np.isfinite(errors[index])
        weights[index, 0] = np.log(prior_error(horizon * step_s))
        if not known.any():
            continue
        rows, weight = states[index, known] - centre[index], recency[known] / recency[known].sum()
        sizes = np.log(np.abs(errors[index, known]) + _SMALL_ERROR)
        mean = float(weight @ sizes)
        # A few independent errors say little about the factors behind their size.
        ridge = np.diag([1e-9, *[_RIDGE * (1 + horizon / 12)] * 3, _RIDGE])
        solved = np.linalg.solve((rows * weight[:, None]).T @ rows + ridge, (rows * weight[:, None]).T @ (sizes - mean))
        weights[index] = solved
        weights[index, 0] += mean
    return Scale(centre, weights)


def _knew(origins: NDArray[np.intp], step_s: float) -> Floats:
    """Return the weights of errors. Origins of the first day count less, because no daily profile was known."""
    return np.where(origins * step_s < DAY_S, UNLEARNED, 1.0)


def prior_error(horizon_s: float) -> float:
    """Return the expected mean absolute error in logarithms of an unknown series."""
    near_s = min(horizon_s, DAY_S)
    return float(PRIOR_ERROR * (near_s / 600.0) ** PRIOR_GROWTH * (horizon_s / near_s) ** PRIOR_GROWTH_FAR)


def unseen_season(horizon_s: float, known_s: Floats) -> Floats:
    """Return the size of errors, in logarithms, that a daily season may cause after `known_s` of history.

    Errors of a first day do not show it, because they are of other hours than the predicted ones.
    """
    # A day ahead, the time of day is the same.
    ahead = min(horizon_s / SEASON_S, max(DAY_S - horizon_s, 0.0) / (DAY_S - SEASON_S))
    return np.asarray(SEASON_MOVE * ahead * np.clip(2.5 - 2 * known_s / DAY_S, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class BandState:
    """The adapted widths after a bin, and the bands whose outcomes are pending."""

    width: Floats
    """Logarithms of factors on widths, of shape [horizons, calm or restless, levels]."""
    usual: Floats
    """The median scale of the fit, of shape [horizons, 1]; above it a state is restless."""
    pending: Floats
    """Bands of the last origins, of shape [<= longest horizon, horizons, levels]; nan where none was made."""


def warm_bands(point: Floats, actual: Floats, scale: Floats, horizons: tuple[int, ...], step_s: float) -> BandState:
    """Adapt widths over the last `WARM_BINS` of a fit (for the arguments see `follow_bands`)."""
    count = point.shape[1]
    fresh = BandState(
        np.zeros((len(horizons), 2, len(LEVELS))),
        np.median(scale, axis=1, keepdims=True),
        np.empty((0, len(horizons), len(LEVELS))),
    )
    start = max(count - WARM_BINS, 0)
    out, width = _adapt(fresh, point, actual, scale, horizons, step_s=step_s, start=start, fitted=count)
    # The last origin of a fit is predicted again with the widths learned from it.
    return BandState(width, fresh.usual, out[:-1][-max(horizons) :])


def follow_bands(
    state: BandState, point: Floats, actual: Floats, scale: Floats, horizons: tuple[int, ...], *,
    step_s: float, fitted: int,
) -> Floats:  # fmt: skip
    """Return quantiles in logarithms for the fit's last origin and those after it.

    Their shape is [n - fitted + 1, horizons, levels], sorted by level. `point` and `scale` are [horizons, n] by
    origin. `actual` is [n], nan where unknown. `fitted` is the number of bins of the fit.
    """
    out, _ = _adapt(state, point, actual, scale, horizons, step_s=step_s, start=fitted - 1, fitted=fitted)
    return np.asarray(np.sort(out, axis=2))


def _adapt(
    state: BandState, point: Floats, actual: Floats, scale: Floats, horizons: tuple[int, ...], *,
    step_s: float, start: int, fitted: int,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return (bands of shape [n - start, horizons, levels], widths after the last bin)."""
    known = [
        _evidence(point[k], actual, scale[k], h, step_s=step_s, start=start, fitted=fitted)
        for k, h in enumerate(horizons)
    ]
    sizes, counts = _expected(known, horizons, step_s)
    shapes = [
        _shapes(each, scale[k], size, few, start=start)
        for k, (each, size, few) in enumerate(zip(known, sizes, counts, strict=True))
    ]
    raw = np.stack(shapes, axis=1)  # [n - start, horizons, levels] offsets in logarithms
    # Calm and restless states adapt separately, or errors in opposite directions would cancel.
    restless = (scale > state.usual).astype(np.intp)  # [horizons, n]
    out, width = np.empty_like(raw), np.empty_like(state.width)
    for row, horizon in enumerate(horizons):
        bands = state.pending[:, row], raw[:, row]
        series = point[row, start:], actual[start:], restless[row]
        adapt = adapt_singly if horizon < LEAST_BLOCK else adapt_in_blocks
        out[:, row], width[row] = adapt(state.width[row], bands, series, horizon)
    return out, width


def adapt_in_blocks(
    width: Floats, bands: tuple[Floats, Floats], series: tuple[Floats, Floats, NDArray[np.intp]], horizon: int
) -> tuple[Floats, Floats]:
    """Return one horizon's (bands of shape [n - start, levels], widths after the last bin).

    `bands` holds the pending bands and the offsets of the new ones. `series` holds point forecasts and outcomes from
    the first new origin on, and the states of all origins.
    """
    pending, offsets = bands
    point, actual, restless = series
    lead, count = len(pending), len(point)
    start = len(restless) - count
    said = np.concatenate([pending, np.empty_like(offsets)])
    rate = ADAPT * min(1.0, ADAPT_BINS / horizon) * np.sign(np.array(LEVELS) - 0.5)
    below, above = rate * (np.array(LEVELS) - 1), rate * np.array(LEVELS)
    width = width.copy()
    # The bands of a whole horizon of origins depend on earlier bands only.
    for first in range(0, count, horizon):
        part = np.arange(first, min(first + horizon, count))
        target = part - horizon + lead
        seen = (target >= 0) & np.isfinite(actual[part])
        if lead and not first:
            seen[0] = False  # the widths after a fit already include the outcome of its last bin
        made = said[np.maximum(target, 0)]
        seen &= np.isfinite(made[:, 0])
        moves = np.where(actual[part, None] <= made + _SAME, below, above)
        was = restless[np.maximum(part + start - horizon, 0)]
        now = restless[part + start]
        wide = np.empty_like(moves)
        for state in range(len(width)):
            mine = np.where((seen & (was == state))[:, None], moves, 0.0)
            steps = _clipped_sums(width[state], mine)
            wide[now == state] = steps[now == state]
            width[state] = steps[-1]
        said[part + lead] = point[part, None] + offsets[part] * np.exp(wide)
    return said[lead:], width


def adapt_singly(
    width: Floats, bands: tuple[Floats, Floats], series: tuple[Floats, Floats, NDArray[np.intp]], horizon: int
) -> tuple[Floats, Floats]:
    """Return the result of `adapt_in_blocks`, computed in single floats. That is faster for near horizons, whose blocks
    are small.
    """
    rate = ADAPT * min(1.0, ADAPT_BINS / horizon) * np.sign(np.array(LEVELS) - 0.5)
    below, above = (rate * (np.array(LEVELS) - 1)).tolist(), (rate * np.array(LEVELS)).tolist()
    widths, said, offsets = width.tolist(), bands[0].tolist(), bands[1].tolist()
    point, actual, restless = (each.tolist() for each in series)
    start = len(restless) - len(point)
    lead, moving = len(said), [level for level, quantile in enumerate(LEVELS) if quantile != 0.5]
    for at, (middle, came) in enumerate(zip(point, actual, strict=True)):
        target = at - horizon + lead
        # The widths after a fit already include the outcome of its last bin.
        if target >= 0 and isfinite(came) and (at or not lead) and isfinite(said[target][0]):
            own, made = widths[restless[max(at + start - horizon, 0)]], said[target]
            for level in moving:
                moved = own[level] + (below[level] if came <= made[level] + _SAME else above[level])
                own[level] = moved if -MOST_WIDTH < moved < MOST_WIDTH else MOST_WIDTH if moved > 0 else -MOST_WIDTH
        now = widths[restless[at + start]]
        said.append([middle + off * exp(wide) for off, wide in zip(offsets[at], now, strict=True)])
    return np.array(said[lead:]), np.array(widths)


def _clipped_sums(first: Floats, moves: Floats) -> Floats:
    """Return the sums of `first` and the moves so far, each within `MOST_WIDTH`, in the shape of `moves`."""
    sums = np.cumsum(np.concatenate([first[None], moves]), axis=0)[1:]
    if np.abs(sums).max() <= MOST_WIDTH:
        return np.asarray(sums)
    for row, move in enumerate(moves):
        first = np.clip(first + move, -MOST_WIDTH, MOST_WIDTH)
        sums[row] = first
    return np.asarray(sums)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """The past errors of one horizon, as known at each anchor."""

    anchors: NDArray[np.intp]
    ends: NDArray[np.intp]
    """The bin in which each error became known."""
    relative: Floats
    """Errors over their scale."""
    weight: Floats
    total: Floats
    """The sum of the weights known at each anchor."""
    windows: Floats
    """The number of independent errors that carry the same information, at each anchor."""
    size: Floats
    """Mean size of the relative errors at each anchor; that of the prior's shape if unknown."""
    recent_windows: Floats
    """The number of independent errors within the short memory, at each anchor."""
    growth: Floats
    """The size of errors within the short memory over that within the long one, in logarithms."""
    usual: float
    """Usual scale, in logarithms of the series."""


def _evidence(
    point: Floats, actual: Floats, scale: Floats, horizon: int, *, step_s: float, start: int, fitted: int
) -> _Evidence:
    count = len(point)
    ended = max(count - horizon, 0)
    indices = np.flatnonzero(np.isfinite(actual[horizon:]))[: ended or None]
    relative = (actual[indices + horizon] - point[indices]) / scale[indices]
    # Weights refer to one instant, whatever follows.
    weight = _knew(indices, step_s) * 0.5 ** ((start - indices) * step_s / MEMORY_S)
    anchors = np.arange(start - start % ANCHOR_BINS, count, ANCHOR_BINS)
    seen = np.searchsorted(indices, anchors - horizon, side="right")  # errors known at each anchor
    total, squares, sizes = _weighted(weight, relative, seen)
    doublings = np.minimum((indices - start) * step_s / RECENT_S, _MOST_DOUBLINGS)
    recent, recent_squares, recent_sizes = _weighted(_knew(indices, step_s) * np.exp2(doublings), relative, seen)
    known = relative[indices + horizon < fitted]
    # Beyond a day, the history holds too few horizons to show for how many bins errors are correlated.
    alike = horizon if horizon * step_s > DAY_S else _bins_alike(known, horizon)
    windows, recent_windows = _outcomes(total, squares) / alike, _outcomes(recent, recent_squares) / alike
    size, recent_size = _mean_size(sizes, total), _mean_size(recent_sizes, recent)
    usual = float(np.exp(np.log(scale[: start + 1]).mean()))
    growth = np.log(recent_size / size)
    return _Evidence(anchors, indices + horizon, relative, weight, total, windows, size, recent_windows, growth, usual)


def _weighted(weight: Floats, errors: Floats, seen: NDArray[np.intp]) -> tuple[Floats, Floats, Floats]:
    """Return the sums of weights, of their squares and of weighted sizes of the first `seen` errors."""
    return _sum_before(weight, seen), _sum_before(weight**2, seen), _sum_before(weight * np.abs(errors), seen)


def _outcomes(total: Floats, squares: Floats) -> Floats:
    return np.asarray(total**2 / np.maximum(squares, 1e-300))


def _mean_size(sizes: Floats, total: Floats) -> Floats:
    return np.where(total > 0, np.maximum(sizes / np.maximum(total, 1e-300), 1e-6), _LAPLACE_SIZE)


def _expected(
    known: Sequence[_Evidence], horizons: tuple[int, ...], step_s: float
) -> tuple[list[Floats], list[Floats]]:
    """Return (sizes of relative errors, numbers of errors behind them) at each anchor, by horizon.

    A shorter horizon stands in for a longer one whose errors are not known yet. A series that is calm or restless an
    hour ahead is also so a day ahead. The same holds for errors that have grown recently.
    """
    sizes, counts = [np.empty(0)] * len(horizons), [np.empty(0)] * len(horizons)
    ratio, growth, count = (np.zeros(len(known[0].anchors)) for _ in range(3))
    before = 0
    for at in sorted(range(len(horizons)), key=horizons.__getitem__):
        each, horizon = known[at], horizons[at]
        fade = (before / horizon) ** CARRY
        prior = prior_error(horizon * step_s) / each.usual
        lately = each.recent_windows
        growth = (lately * each.growth + RECENT_PRIOR * fade * growth) / (lately + RECENT_PRIOR)
        own = np.log(each.size / prior) + growth
        ratio = (each.windows * own + PRIOR_WINDOWS * fade * ratio) / (each.windows + PRIOR_WINDOWS)
        count = each.windows + np.minimum(count, MOST_CARRIED)
        unseen = unseen_season(horizon * step_s, np.asarray(each.anchors * step_s, dtype=np.float64)) / each.usual
        sizes[at], counts[at], before = np.hypot(prior * np.exp(ratio), unseen), count, horizon
    return sizes, counts


def _shapes(known: _Evidence, scale: Floats, expected: Floats, counts: Floats, *, start: int) -> Floats:
    """Return the offsets of quantiles from each origin's forecast before they adapt, of shape [n - start, levels]."""
    anchors, relative, total, windows = known.anchors, known.relative, known.total, known.windows
    few = 1 + 1.55 / np.maximum(counts + PRIOR_WINDOWS, 1.5)  # near Student's t over the normal at 95 %
    merged = np.concatenate([relative, _LAPLACE])
    order = np.argsort(merged, kind="stable")
    known_from = np.concatenate([known.ends, np.full(len(_LAPLACE), -1)])[order]
    base = np.concatenate([known.weight, np.zeros(len(_LAPLACE))])[order]
    pseudo = np.concatenate([np.zeros(len(relative)), np.full(len(_LAPLACE), 1 / len(_LAPLACE))])[order]
    # The prior's share, in size and in shape, shrinks with the horizons seen.
    share = np.where(total > 0, PRIOR_WINDOWS / (windows + PRIOR_WINDOWS), 1.0)
    own = (1 - share) / np.maximum(total, 1e-300)
    at = reaching(known_from, (base, pseudo), anchors, (own, share))
    out = merged[order][at] * (expected / known.size * few)[:, None]
    # the blend already estimates a median, better than the median of a few past errors does
    out[:, LEVELS.index(0.5)] = 0.0
    return np.asarray(out[(np.arange(start, len(scale)) - anchors[0]) // ANCHOR_BINS] * scale[start:, None])


def reaching(
    known_from: NDArray[np.intp], weights: tuple[Floats, Floats], anchors: NDArray[np.intp],
    shares: tuple[Floats, Floats],
) -> NDArray[np.intp]:  # fmt: skip
    """Return the first places at which summed weights reach each of `LEVELS`, of shape [anchors, levels].

    `weights` are of errors, which count from the anchor at `known_from` on, and of the prior. Each anchor has a factor
    for both, in `shares`. Anchors ascend.
    """
    (errors, prior), (own, share) = weights, (each[:, None] for each in shares)
    # Most errors are known at every anchor: only sums of the others differ.
    late = known_from > anchors[0]
    early, priors, ranks = np.cumsum(np.where(late, 0.0, errors)), np.cumsum(prior), np.cumsum(late)
    later = np.zeros((len(anchors), int(ranks[-1]) + 1))
    np.cumsum(errors[late] * (known_from[late] <= anchors[:, None]), axis=1, out=later[:, 1:])
    whole = own * (early[-1] + later[:, -1:]) + share * priors[-1]
    wanted = np.array(LEVELS) * whole - _SAME
    flat, rows = later.ravel(), np.arange(len(anchors))[:, None] * later.shape[1]
    low = np.zeros(wanted.shape, dtype=np.intp)
    high = np.full(wanted.shape, len(errors) - 1, dtype=np.intp)
    for _ in range(len(errors).bit_length()):
        middle = (low + high) >> 1
        summed = own * (early[middle] + flat[rows + ranks[middle]]) + share * priors[middle]
        reached = summed >= wanted
        high, low = np.where(reached, middle, high), np.where(reached, low, middle + 1)
    return high


def _bins_alike(errors: Floats, horizon: int) -> float:
    """Return the number of neighbouring errors that carry the information of one, at most `horizon`.

    It is their integrated autocorrelation time, by eighths of the horizon, averaged in logarithms with the horizon. Few
    errors determine their correlation poorly.
    """
    lag = max(horizon // 8, 1)
    if len(errors) < 2 * horizon:
        return float(horizon)
    off = errors - errors.mean()
    whole = float(off @ off) + 1e-12
    alike = sum(max(float(off[at:] @ off[:-at]) / whole, 0.0) for at in range(lag, horizon, lag))
    return float(np.sqrt(min(lag * (1 + 2 * alike), horizon) * horizon))


def _sum_before(values: Floats, indices: NDArray[np.intp]) -> Floats:
    return np.asarray(np.concatenate([[0.0], np.cumsum(values)])[indices])
