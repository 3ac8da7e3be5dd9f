"""Rolling-origin backtests, in which each forecast uses only data known at its origin. Pure: no clock, no I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from libs.forecast.baselines import Baseline, BaselineTask
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, SeriesName, hold, without_outages
from libs.policy.forecast.model import Forecaster

RESAMPLES: Final = 400
# The minimum length of bootstrap blocks, because errors of neighbouring bins are correlated.
BLOCK_BINS: Final = 36


def wape(actual: Floats, point: Floats) -> float:
    """Return the sum of absolute errors divided by the sum of outcomes, or nan if that sum is 0."""
    whole = float(np.abs(actual).sum())
    return float(np.abs(actual - point).sum()) / whole if whole else float("nan")


def mase(actual: Floats, point: Floats, naive_error: float) -> float:
    """Return the mean absolute error divided by that of the naive forecast on the training days.

    Source: Hyndman and Koehler 2006.
    """
    return float(np.abs(actual - point).mean()) / naive_error if naive_error > 0 else float("nan")


def pinball(actual: Floats, quantiles: Floats) -> float:
    """Return the mean quantile loss over outcomes and `LEVELS`, for quantiles of shape [outcomes, levels]."""
    levels = np.array(LEVELS)
    short = actual[:, None] - quantiles
    return float(np.maximum(levels * short, (levels - 1) * short).mean())


def interval_score(actual: Floats, quantiles: Floats) -> float:
    """Return the weighted interval score (Bracher et al., PLOS Comp. Biology 2021).

    With the weights of that paper, it is twice the mean quantile loss.
    """
    return 2 * pinball(actual, quantiles)


def inside(actual: Floats, quantiles: Floats) -> Floats:
    """Return 1 for each outcome within the 90 % band and 0 for all others."""
    return ((actual >= quantiles[:, 0]) & (actual <= quantiles[:, -1])).astype(np.float64)


def block_error(held: Floats, block: int, seed: int = 1) -> float:
    """Return the standard error of the mean of ordered outcomes, from a moving block bootstrap.

    Blocks have at least `BLOCK_BINS` bins, but at most a third of all outcomes, because the bootstrap needs several
    blocks.
    """
    length = max(min(max(block, BLOCK_BINS), len(held) // 3), 1)
    if not len(held):
        return float("nan")
    blocks = -(-len(held) // length)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(held) - length + 1, (RESAMPLES, blocks))
    sums = np.concatenate([[0.0], np.cumsum(held)])
    return float(((sums[starts + length] - sums[starts]).sum(axis=1) / (blocks * length)).std())


HORIZONS_S: Final = (600, 3600, 10_800, 86_400)
TEST_S: Final = 4 * 86_400.0
REFIT_S: Final = 86_400.0
LEAST_BINS: Final = 24
LEAST_FIT: Final = 6
"""The minimum number of bins for the first fit."""
_LEAST_ERRORS: Final = 12
"""The minimum number of errors from which a baseline's band is computed."""
_HOURS: Final = 3
"""The number of hours in each group of hours for which coverage is reported."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BacktestPlan:
    """The division of a history into parts for fitting, choosing a baseline and scoring."""

    horizons: tuple[int, ...]
    """The horizons in bins for which the history is long enough."""
    valid_from: int
    """The first bin whose outcome is used to choose the best baseline."""
    test_from: int
    """The first bin whose outcome is scored."""
    fits: tuple[int, ...]
    """The number of bins known at each successive fit. A fit is used until the next one."""


@dataclass(frozen=True, slots=True)
class BacktestForecasts:
    """The forecasts from all origins; nan where there is none."""

    history: DemandHistory
    plan: BacktestPlan
    ours: dict[SeriesName, Floats]
    """Fulcrum's forecasts by series, of shape [n, horizons, levels]."""
    baselines: dict[str, dict[SeriesName, Floats]]
    """The baselines' forecasts by baseline and series, of shape [n, horizons]."""


def make_plan(history: DemandHistory, horizons_s: Sequence[float], test_s: float = TEST_S) -> BacktestPlan:
    """Plan a backtest that scores the last `test_s` of a history, but at most half of it.

    The best baseline is chosen on an equally long part before that. Raise ValueError if there are fewer than
    `LEAST_BINS` bins or no horizon fits.
    """
    count = len(history)
    if count < LEAST_BINS:
        raise ValueError(f"{count} bins are too few for a backtest: at least {LEAST_BINS} are needed")
    test = min(round(test_s / history.step_s), count // 2)
    test_from = count - test
    valid_from = test_from - min(test, test_from // 2)
    wanted = sorted({round(each / history.step_s) for each in horizons_s})
    horizons = tuple(each for each in wanted if 1 <= each <= valid_from - LEAST_FIT)
    if not horizons:
        raise ValueError(f"no horizon is from one bin, {history.step_s:g} s, to {valid_from - LEAST_FIT} bins")
    first = max(valid_from - max(horizons), LEAST_FIT)
    refit = max(min(round(REFIT_S / history.step_s), count // 8), 1)
    return BacktestPlan(horizons, valid_from, test_from, tuple(range(first, count, refit)))


def run(
    history: DemandHistory,
    plan: BacktestPlan,
    forecaster: Forecaster,
    baselines: Sequence[Baseline],
    *,
    every: int = 1,
    note: Note = lambda line: None,
) -> BacktestForecasts:
    """Predict the history with Fulcrum's forecaster and each baseline, at one in `every` origins."""
    count = len(history)
    ours = {name: np.full((count, len(plan.horizons), len(LEVELS)), np.nan) for name in SERIES}
    theirs: dict[str, dict[SeriesName, Floats]] = {
        each.name: {name: np.full((count, len(plan.horizons)), np.nan) for name in SERIES} for each in baselines
    }
    for number, fitted in enumerate(plan.fits, start=1):
        until = plan.fits[number] if number < len(plan.fits) else count
        origins = [at for at in range(fitted - 1, until - 1) if (at - plan.fits[0]) % every == 0]
        if not origins:
            continue
        model = forecaster.fit(history.before(fitted), plan.horizons)
        for name in SERIES:
            ours[name][origins] = model.forecast_at(history, name, origins)
        note(f"fit {number} of {len(plan.fits)}: ours")
        for each in baselines:
            for name in SERIES:
                said = each.predict(BaselineTask(history.before(until), name, fitted, origins, plan.horizons))
                if said is not None:
                    theirs[each.name][name][origins] = said
            note(f"fit {number} of {len(plan.fits)}: {each.name}")
    return BacktestForecasts(history, plan, ours, theirs)


def score(found: BacktestForecasts) -> list[dict[str, Any]]:
    """Return a record for each series and horizon that can be scored; see docs/forecast-design.md."""
    records = []
    for name in SERIES:
        for index in range(len(found.plan.horizons)):
            record = _record(found, name, index)
            if record is not None:
                records.append(record)
    return records


def _record(found: BacktestForecasts, name: SeriesName, index: int) -> dict[str, Any] | None:
    history, horizon = found.history, found.plan.horizons[index]
    actual = without_outages(history.series(name), history.step_s)  # the first hour of an outage is unpredictable
    quantiles = found.ours[name][:, index]
    origins = _scored(actual, quantiles[:, 0], horizon, found.plan.test_from, len(history))
    chosen_on = _scored(actual, quantiles[:, 0], horizon, found.plan.valid_from, found.plan.test_from)
    if not len(origins) or not actual[origins + horizon].any():
        return None
    came, said = actual[origins + horizon], quantiles[origins]
    naive = _naive_error(actual[: found.plan.test_from], round(86_400.0 / history.step_s))
    baselines: dict[str, dict[str, float | None]] = {}
    for baseline, points in found.baselines.items():
        point = points[name][:, index]
        if np.isnan(point[origins]).any():
            continue
        known = chosen_on[np.isfinite(point[chosen_on])]
        bands = _conformal(actual, point, origins, horizon)
        baselines[baseline] = {
            "wape": wape(came, point[origins]),
            "training_wape": wape(actual[known + horizon], point[known]) if len(known) else None,
            "mase": mase(came, point[origins], naive),
            "wis": interval_score(came, bands) if bands is not None else None,
        }
    best = _least(baselines, "training_wape") or _least(baselines, "wape")
    held, starts_s = inside(came, said), history.start_s + (origins + horizon) * history.step_s
    return {
        "series": name,
        "horizon_s": horizon * history.step_s,
        "bins": len(origins),
        "wape": wape(came, said[:, LEVELS.index(0.5)]),
        "mase": mase(came, said[:, LEVELS.index(0.5)], naive),
        "pinball": pinball(came, said),
        "wis": interval_score(came, said),
        "coverage90": float(held.mean()),
        "coverage90_error": block_error(held, horizon),
        "coverage90_by_hour": _by_hour(held, starts_s, history.step_s),
        "coverage90_by_level": _by_level(held, _levels(actual, origins), horizon),
        "best_baseline": best,
        "best_baseline_wape": baselines[best]["wape"] if best else None,
        "best_in_hindsight": _least(baselines, "wape"),
        "baselines": baselines,
    }


def _scored(actual: Floats, said: Floats, horizon: int, first: int, last: int) -> Any:
    """Return the origins whose forecast and outcome are known, for outcomes in [first, last)."""
    origins = np.arange(max(first - horizon, 0), last - horizon)
    return origins[np.isfinite(said[origins]) & np.isfinite(actual[origins + horizon])]


def _levels(actual: Floats, origins: Any) -> Floats:
    """Return the mean of the six bins up to each origin, by which coverage is grouped."""
    held = np.nan_to_num(hold(actual))
    return np.array([held[max(at - 5, 0) : at + 1].mean() for at in origins.tolist()])


def _naive_error(train: Floats, day: int) -> float:
    """Return the mean absolute error of the seasonal naive forecast.

    With fewer than two days of training data, use persistence instead.
    """
    lag = day if len(train) >= 2 * day else 1
    moved = np.abs(train[lag:] - train[:-lag])
    return float(np.nanmean(moved)) if np.isfinite(moved).any() else 0.0


def _least(baselines: Mapping[str, Mapping[str, float | None]], key: str) -> str | None:
    found = {name: value for name, each in baselines.items() if (value := each[key]) is not None and np.isfinite(value)}
    return min(found, key=lambda name: found[name]) if found else None


def _conformal(actual: Floats, point: Floats, origins: Any, horizon: int) -> Floats | None:
    """Return a baseline's band, of shape [origins, levels], or None if there are too few errors.

    The band is the point forecast times the quantiles of its relative errors that were known at each origin.
    """
    seen = np.flatnonzero(np.isfinite(point[: len(point) - horizon]) & np.isfinite(actual[horizon:]))
    offset = 0.01 * float(np.nanmedian(actual[seen + horizon])) + 1e-12 if len(seen) else 1.0
    errors = np.log((actual[seen + horizon] + offset) / (point[seen] + offset))
    out = np.empty((len(origins), len(LEVELS)))
    for row, origin in enumerate(origins.tolist()):
        known = int(np.searchsorted(seen, origin - horizon, side="right"))
        if known < _LEAST_ERRORS:
            return None
        if not row % 6 or row == len(origins) - 1:
            factors = np.exp(np.quantile(errors[:known], LEVELS))
            factors[LEVELS.index(0.5)] = 1.0
        out[row] = (point[origin] + offset) * factors - offset
    return np.sort(np.maximum(out, 0.0), axis=1)


def _by_hour(held: Floats, starts_s: Floats, step_s: float) -> list[dict[str, float]]:
    hours = (starts_s % 86_400.0 // (3600 * _HOURS)).astype(int)
    block = max(int(_HOURS * 3600 / step_s), 1)  # bins of one group are correlated
    return [
        {"from_h": hour * _HOURS, **_held(held[hours == hour], block)}
        for hour in range(24 // _HOURS)
        if (hours == hour).any()
    ]


def _by_level(held: Floats, levels: Floats, horizon: int) -> list[dict[str, Any]]:
    thirds = np.argsort(np.argsort(levels, kind="stable"), kind="stable") * 3 // len(levels)
    return [
        {"level": name, **_held(held[thirds == third], horizon)}
        for third, name in enumerate(("low", "middle", "high"))
        if (thirds == third).any()
    ]


def _held(held: Floats, block: int) -> dict[str, float]:
    return {"coverage90": float(held.mean()), "error": block_error(held, block), "bins": len(held)}
