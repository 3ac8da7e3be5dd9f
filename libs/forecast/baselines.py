"""Baseline forecasters that are fitted on the training days: simple ones in numpy, and heavy ones from optional
packages.

Each predicts one series from many origins. An unknown bin takes the last known value, so that a forecast depends on
bins up to its origin only.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol

import numpy as np

from libs.contracts.errors import InvalidRequest
from libs.lab.rivals.dynamo_predictors import FIRST_VARIANCE, LEVEL_NOISE, MEASUREMENT_NOISE, TREND_NOISE
from libs.policy.forecast.history import DemandHistory, Floats, SeriesName, hold, running_means

MOST_LAGS: Final = 36


@dataclass(frozen=True, slots=True)
class BaselineTask:
    """One series up to the last origin, and the forecasts to compute."""

    history: DemandHistory
    name: SeriesName
    fitted: int
    """The number of bins that may be used to fit parameters."""
    origins: Sequence[int]
    horizons: tuple[int, ...]

    @property
    def values(self) -> Floats:
        """The series, in which unknown bins have the last known value."""
        return held(self.history.series(self.name))

    def season(self, seconds: float) -> int:
        return max(round(seconds / self.history.step_s), 1)


def held(values: Floats) -> Floats:
    """Replace unknown bins by the last known value, or by 0 before the first known one."""
    known = np.isfinite(values)
    found = np.nan_to_num(hold(values))
    return np.where(np.cumsum(known) > 0, found, 0.0)


class Baseline(Protocol):
    """A simple forecaster of one series, to which Fulcrum's forecaster is compared."""

    name: str

    def predict(self, task: BaselineTask) -> Floats | None:
        """Return forecasts of shape [origins, horizons], none below 0, or None if the history is too short."""
        ...


class Persistence:
    """A forecaster that repeats the last value."""

    name = "persistence"

    def predict(self, task: BaselineTask) -> Floats | None:
        return np.repeat(task.values[np.asarray(task.origins)][:, None], len(task.horizons), axis=1)


class SeasonalNaive:
    """A forecaster that repeats the value of a day or a week before."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._seconds = seconds

    def predict(self, task: BaselineTask) -> Floats | None:
        """Return the value at the same time in the latest known season."""
        season = task.season(self._seconds)
        horizons = np.array(task.horizons)
        back = -(-horizons // season) * season
        indices = np.asarray(task.origins)[:, None] + (horizons - back)[None]
        if not len(task.origins) or indices.min() < 0:
            return None
        return np.asarray(task.values[indices])


class ExponentialSmoothing:
    """Additive level, damped trend and optional daily season: Holt-Winters, or ETS without a season.

    The smoothing parameters are those of a grid with the least squared one-step error on the training days.
    """

    def __init__(self, name: str, season_s: float = 0.0) -> None:
        self.name = name
        self._season_s = season_s

    def predict(self, task: BaselineTask) -> Floats | None:
        season = task.season(self._season_s) if self._season_s else 1
        if task.fitted < max(2 * season, 12):
            return None
        seasonal = (0.0, 0.05, 0.2, 0.5) if season > 1 else (0.0,)
        grid = np.array([
            (level, trend, share, damping)
            for level in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
            for share in seasonal
            for trend, damping in ((0.0, 0.0), (0.02, 0.98), (0.1, 0.98), (0.1, 0.9), (0.3, 0.8))
        ])  # fmt: skip
        errors, _ = _smooth(task.values[: task.fitted], grid, season, ())
        best = grid[[int(np.argmin(errors))]]
        _, states = _smooth(task.values[: max(task.origins) + 1], best, season, task.origins)
        damping = best[0, 3]
        found = np.empty((len(task.origins), len(task.horizons)))
        for row, (origin, (level, trend, seasons)) in enumerate(zip(task.origins, states, strict=True)):
            for column, horizon in enumerate(task.horizons):
                run = damping * (1 - damping**horizon) / (1 - damping) if damping else 0.0
                found[row, column] = level + run * trend + seasons[(origin + horizon) % season]
        return np.maximum(found, 0.0)


def _smooth(
    values: Floats, grid: Floats, season: int, origins: Sequence[int]
) -> tuple[Floats, list[tuple[float, float, Floats]]]:
    """Return the squared one-step errors for each row of the grid.

    Also return the level, trend and seasons after each origin, for the first row.
    """
    level_rate, trend_rate, season_rate, damping = grid.T
    level = np.full(len(grid), float(values[:season].mean()))
    trend = np.zeros(len(grid))
    seasons = np.repeat((values[:season] - values[:season].mean())[:, None], len(grid), axis=1)
    errors = np.zeros(len(grid))
    kept: dict[int, tuple[float, float, Floats]] = {}
    wanted = set(origins)
    for index, value in enumerate(values):
        slot = index % season
        expected = level + damping * trend
        error = value - expected - seasons[slot]
        if index >= season:
            errors += error * error
        before = level
        level = expected + level_rate * error
        trend = damping * trend + trend_rate * ((level - before) - damping * trend)
        seasons[slot] += season_rate * (1 - level_rate) * error if season > 1 else 0.0
        if index in wanted:
            kept[index] = float(level[0]), float(trend[0]), seasons[:, 0].copy()
    return errors, [kept[origin] for origin in origins]


class Theta:
    """The theta method: a fitted daily season, a smoothed level and half the trend.

    Source: Assimakopoulos and Nikolopoulos, International Journal of Forecasting 16, 2000.
    """

    name = "theta"

    def predict(self, task: BaselineTask) -> Floats | None:
        """Return the level plus the season plus half the slope of the training days."""
        day, values = task.season(86_400.0), task.values
        train = values[: task.fitted]
        if len(train) < 12:
            return None
        season = np.zeros(day)
        if len(train) >= 2 * day:
            by_time = np.resize(
                np.concatenate([train, np.full(-len(train) % day, np.nan)]), (-(-len(train) // day), day)
            )
            season = np.nanmean(by_time, axis=0) - train.mean()
        plain = values - season[np.arange(len(values)) % day]
        slope = float(np.polyfit(np.arange(len(train)), plain[: len(train)], 1)[0])
        half_lives = np.array([0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 16.0, 48.0])
        levels = running_means(plain, half_lives)
        best = levels[np.abs(levels[:, : len(train) - 1] - plain[1 : len(train)]).mean(axis=1).argmin()]
        origins, horizons = np.asarray(task.origins), np.array(task.horizons)
        ahead = best[origins][:, None] + 0.5 * slope * horizons
        found: Floats = np.maximum(ahead + season[(origins[:, None] + horizons) % day], 0.0)
        return found


class Autoregression:
    """An ARIMA(p, 0, 0) model: a mean and deviations that depend on their last p values.

    Akaike's criterion determines p.
    """

    name = "ar"

    def predict(self, task: BaselineTask) -> Floats | None:
        """Return forecasts computed one step at a time up to the longest horizon."""
        train = task.values[: task.fitted]
        if task.fitted < 2 * MOST_LAGS or not train.any():
            return None
        mean = float(train.mean())
        lagged = np.lib.stride_tricks.sliding_window_view(train - mean, MOST_LAGS + 1)
        best: Floats = np.zeros(1)
        least = float("inf")
        for lags in (1, 2, 3, 4, 6, 9, 12, 18, 24, MOST_LAGS):
            rows, wanted = lagged[:, MOST_LAGS - lags : MOST_LAGS][:, ::-1], lagged[:, MOST_LAGS]
            weights = np.asarray(np.linalg.lstsq(rows, wanted, rcond=None)[0], dtype=np.float64)
            criterion = len(wanted) * np.log(((wanted - rows @ weights) ** 2).mean() + 1e-12) + 2 * lags
            if criterion < least:
                best, least = weights, float(criterion)
        values = task.values - mean
        state = np.stack([values[np.maximum(np.asarray(task.origins) - lag, 0)] for lag in range(len(best))], axis=1)
        found = np.empty((len(task.origins), len(task.horizons)))
        for step in range(1, max(task.horizons) + 1):
            following = state @ best
            state = np.concatenate([following[:, None], state[:, :-1]], axis=1)
            for column in (at for at, horizon in enumerate(task.horizons) if horizon == step):
                found[:, column] = following
        return np.maximum(np.clip(found + mean, 0.0, 10 * train.max()), 0.0)


class DynamoKalman:
    """The Kalman planner of Dynamo: level and trend of requests, prompt lengths and output lengths."""

    name = "kalman-dynamo"

    def predict(self, task: BaselineTask) -> Floats | None:
        """Return the level plus a multiple of the trend. Tokens are requests times lengths."""
        last = max(task.origins) + 1
        requests = held(task.history.requests[:last])
        per_bin = task.history.step_s
        found = _kalman(requests * per_bin, task.origins, task.horizons) / per_bin
        if task.name == "requests":
            return found
        lengths = np.where(requests > 0, task.history.series(task.name)[:last] / np.maximum(requests, 1e-12), np.nan)
        return found * _kalman(held(lengths), task.origins, task.horizons)


def _kalman(values: Floats, origins: Sequence[int], horizons: Sequence[int]) -> Floats:
    level, trend = float(values[0]), 0.0
    level_variance = trend_variance = FIRST_VARIANCE
    covariance = 0.0
    states = np.empty((len(values), 2))
    states[0] = level, trend
    for index, value in enumerate(values[1:].tolist(), start=1):
        level += trend
        level_variance += 2 * covariance + trend_variance + LEVEL_NOISE
        covariance += trend_variance
        trend_variance += TREND_NOISE
        error, whole = value - level, level_variance + MEASUREMENT_NOISE
        gain, trend_gain = level_variance / whole, covariance / whole
        level += gain * error
        trend += trend_gain * error
        trend_variance -= trend_gain * covariance
        covariance *= 1 - gain
        level_variance *= 1 - gain
        states[index] = level, trend
    at = states[np.asarray(origins)]
    return np.asarray(np.maximum(at[:, :1] + at[:, 1:] * np.array(horizons), 0.0))


def light_baselines() -> list[Baseline]:
    """Return the baselines that need no packages beyond those of `make up`."""
    return [
        Persistence(), SeasonalNaive("seasonal-day", 86_400.0), SeasonalNaive("seasonal-week", 604_800.0),
        ExponentialSmoothing("holt-winters", 86_400.0), ExponentialSmoothing("ets"), Theta(), Autoregression(),
        DynamoKalman(),
    ]  # fmt: skip


# The first three are from statsforecast (Nixtla). Dynamo stands for ai-dynamo 1.6.1, planner/core/load/predictors.py
# with its defaults. It fits auto_arima once and then updates it, and its Prophet sees the last 50 intervals. Both
# predict requests, prompt lengths and output lengths separately. Dynamo predicts one step, whereas these predict all
# horizons.


PROPHET_WINDOW: Final = 50
"""The number of intervals that Dynamo's Prophet sees."""
MOST_SEEN: Final = 2016
"""The maximum number of bins before an origin that a model sees."""
_DAY_S: Final = 86_400.0


def heavy_names() -> list[str]:
    return list(_MAKERS)


def heavy_baselines(names: Sequence[str]) -> list[Baseline]:
    """Return the named baselines. Raise InvalidRequest if a package is not installed."""
    try:
        return [_MAKERS[name]() for name in names]
    except ImportError as error:
        raise InvalidRequest(
            f"baselines {', '.join(names)} need {error.name or error}: pip install 'fulcrum-serving[forecast]'"
        ) from None


class _Forwarded:
    """A statsforecast model that is fitted on the training days and then run to each origin with fixed parameters."""

    def __init__(self, name: str, make: Callable[[int], Any]) -> None:
        self.name = name
        self._make = make

    def predict(self, task: BaselineTask) -> Floats | None:
        day = task.season(_DAY_S)
        if task.fitted < 2 * day + 1:
            return None
        values = task.values
        model = self._make(day)
        found = np.zeros((len(task.origins), len(task.horizons)))
        indices = np.array(task.horizons) - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(y=values[max(task.fitted - MOST_SEEN, 0) : task.fitted])
            for row, origin in enumerate(task.origins):
                seen = values[max(origin + 1 - MOST_SEEN, 0) : origin + 1]
                found[row] = model.forward(y=seen, h=int(indices.max()) + 1)["mean"][indices]
        return np.maximum(np.nan_to_num(found), 0.0)


class _DynamoStyle:
    """Separate forecasts of requests and of their prompt or output lengths, whose product is the forecast of tokens."""

    def __init__(self, name: str, predict_one: Callable[[Floats, BaselineTask], Floats]) -> None:
        self.name = name
        self._one = predict_one
        self._requests: tuple[tuple[int, int], Floats] | None = None

    def predict(self, task: BaselineTask) -> Floats | None:
        if task.fitted < 5:  # with fewer bins Dynamo predicts the last value
            return None
        last = max(task.origins) + 1
        requests = held(task.history.requests[:last])
        key = (task.fitted, last)
        if self._requests is None or self._requests[0] != key:  # all three series need the same forecast
            self._requests = key, self._one(requests * task.history.step_s, task) / task.history.step_s
        if task.name == "requests":
            return self._requests[1]
        lengths = np.where(requests > 0, task.history.series(task.name)[:last] / np.maximum(requests, 1e-12), np.nan)
        return self._requests[1] * self._one(held(lengths), task)


def _arima(values: Floats, task: BaselineTask) -> Floats:
    pmdarima = import_module("pmdarima")
    train = values[max(task.fitted - MOST_SEEN, 0) : task.fitted]
    found = np.empty((len(task.origins), len(task.horizons)))
    if len(set(train.tolist())) == 1:
        found[:] = train[0]
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = pmdarima.auto_arima(train, suppress_warnings=True, error_action="ignore")
        in_log = model.order[0] == model.order[2] == 0  # in this case Dynamo fits the logarithm
        if in_log:
            train, values = np.log1p(train), np.log1p(values)
            model = pmdarima.auto_arima(train, suppress_warnings=True, error_action="ignore")
        state, seen = model.arima_res_, task.fitted
        for row, origin in enumerate(task.origins):
            if origin + 1 > seen:
                state, seen = state.extend(values[seen : origin + 1]), origin + 1
            ahead = np.asarray(state.forecast(max(task.horizons)))
            found[row] = ahead[np.array(task.horizons) - 1]
    return np.maximum(np.expm1(found) if in_log else found, 0.0)


def _windowed_prophet(values: Floats, task: BaselineTask) -> Floats:
    return np.stack([
        prophet_ahead(values[max(origin + 1 - PROPHET_WINDOW, 0) : origin + 1], task.horizons, task.history.step_s)
        for origin in task.origins
    ])  # fmt: skip


def prophet_ahead(seen: Floats, horizons: Sequence[int], step_s: float) -> Floats:
    """Fit Prophet to the bins in `seen` and predict later ones."""
    pandas, prophet = import_module("pandas"), import_module("prophet")
    for name in ("prophet", "cmdstanpy"):
        logging.getLogger(name).setLevel(logging.ERROR)
    start = pandas.Timestamp("2024-01-01")
    times = start + pandas.to_timedelta(np.arange(len(seen) + max(horizons)) * step_s, unit="s")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = prophet.Prophet().fit(pandas.DataFrame({"ds": times[: len(seen)], "y": seen}))
        wanted = times[np.array(horizons) + len(seen) - 1]
        found = model.predict(pandas.DataFrame({"ds": wanted}))["yhat"].to_numpy()
    return np.maximum(np.asarray(found, dtype=np.float64), 0.0)


class _Prophet:
    """Prophet, fitted to all bins known at each fit. It uses no new data between fits."""

    name = "prophet"

    def predict(self, task: BaselineTask) -> Floats | None:
        if task.fitted < 24:
            return None
        ahead = tuple(range(1, max(task.origins) - task.fitted + max(task.horizons) + 2))
        path = prophet_ahead(task.values[: task.fitted], ahead, task.history.step_s)
        indices = np.asarray(task.origins)[:, None] + np.array(task.horizons)[None] - task.fitted
        return np.asarray(path[np.maximum(indices, 0)])


def _statsforecast(name: str, make: Callable[[Any, int], Any]) -> Callable[[], Baseline]:
    def made() -> Baseline:
        models = import_module("statsforecast.models")
        return _Forwarded(name, lambda day: make(models, day))

    return made


def _needing(libraries: Sequence[str], make: Callable[[], Baseline]) -> Callable[[], Baseline]:
    def made() -> Baseline:
        for library in libraries:
            import_module(library)
        return make()

    return made


# AutoETS has no season here, because that of statsforecast supports at most 24 steps per season.
_MAKERS: Final[dict[str, Callable[[], Baseline]]] = {
    "auto-arima": _statsforecast("auto-arima", lambda m, _day: m.AutoARIMA(season_length=1, approximation=True)),
    "auto-ets": _statsforecast("auto-ets", lambda m, _day: m.AutoETS(season_length=1)),
    "mstl": _statsforecast("mstl", lambda m, day: m.MSTL(season_length=[day], trend_forecaster=m.AutoETS(model="ZZN"))),
    "arima-dynamo": _needing(["pmdarima"], lambda: _DynamoStyle("arima-dynamo", _arima)),
    "prophet-dynamo": _needing(["pandas", "prophet"], lambda: _DynamoStyle("prophet-dynamo", _windowed_prophet)),
    "prophet": _needing(["pandas", "prophet"], _Prophet),
}
