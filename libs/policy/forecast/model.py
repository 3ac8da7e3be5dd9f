"""The demand forecaster, which predicts arrivals, prompt tokens and output tokens with bands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np

from libs.policy.forecast.bands import LEVELS, BandState, Scale, fit_scale, follow_bands, states_of, warm_bands
from libs.policy.forecast.blend import LEARNED, Blender, HorizonBlend, checkpoints
from libs.policy.forecast.history import (
    DAY_S,
    SERIES,
    WEEK_S,
    DemandHistory,
    Floats,
    SeriesName,
    hold,
    running_means,
    without_outages,
)
from libs.policy.forecast.targets import LENGTH_HALF_LIVES_S, Targets, make_targets

# A fit uses the latest 8 weeks of 10-minute bins.
MOST_BINS: Final = 8064
# A daily season shows from the second day on.
LITTLE_HISTORY_S: Final = 2 * DAY_S
_OFFSET: Final = 0.01
# A series is shifted by this share of its median nonzero value, or of its mean move between bins if that is smaller,
# before logarithms are taken. With less, noise around zeros dominates the logarithm of a sparse series.
_OFFSET_OF_MOVES: Final = 0.6


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of one series from one origin."""

    horizons: tuple[int, ...]
    """Horizons in bins; 1 is the bin after the origin's."""
    quantiles: Floats
    """Rates per second at `LEVELS`, of shape [horizons, levels]; at least 0, sorted, never nan."""
    notes: tuple[str, ...]
    """Sentences for a reader of the forecast, such as that there is little history."""


@dataclass(frozen=True, slots=True)
class HorizonExplanation:
    """The candidates behind the forecast of one horizon."""

    horizon: int
    weights: dict[str, float]
    """Shares above 2 % by candidate, largest first."""
    since_s: float
    """The beginning of the bin since which the first candidate has had at least half of its weight, in the history's
    time.
    """
    errors: dict[str, float]
    """Mean absolute error by candidate in units of the series, with more weight on recent ones; nan if none is known
    yet.
    """


class FittedDemand(Protocol):
    """A model that predicts the demand of the history that it was fitted on, and of its continuation."""

    def forecast_at(self, history: DemandHistory, name: SeriesName, origins: Sequence[int]) -> Floats:
        """Return quantiles as in `Forecast`, of shape [origins, horizons, levels].

        Each forecast uses only bins up to and including its origin. `history` must begin where that of the fit
        did. Raise ValueError if it does not, or if an origin is outside it or before the fit's last bin.
        """
        ...


class Forecaster(Protocol):
    """A factory of fitted models of demand."""

    def fit(self, history: DemandHistory, horizons: tuple[int, ...]) -> FittedDemand:
        """Fit all bins of `history`; horizons are in bins, each at least 1."""
        ...


class DemandForecaster:
    """A forecaster of arrivals by their levels and seasons, and of tokens also as arrivals times lengths."""

    def fit(self, history: DemandHistory, horizons: tuple[int, ...]) -> "DemandModel":
        """Fit a model for each series; a history may be empty."""
        if not horizons or min(horizons) < 1:
            raise ValueError("horizons are whole bins, at least 1")
        start = max(len(history) - MOST_BINS, 0)
        arrivals = _fit(history, "requests", horizons, start, None)
        models: dict[SeriesName, _SeriesModel | None] = {"requests": arrivals}
        for name in SERIES[1:]:
            models[name] = _fit(history, name, horizons, start, arrivals)
        return DemandModel(len(history), history.start_s, history.step_s, horizons, models)


@dataclass(frozen=True, slots=True)
class _SeriesModel:
    """The fitted model of one series, in logarithms."""

    first: int
    """The first bin used; nothing is known before it."""
    offset: float
    """The constant added before logarithms are taken."""
    arrivals: "_SeriesModel | None"
    """The model of the arrivals behind the tokens."""
    blends: tuple[HorizonBlend, ...]
    scale: Scale
    bands: BandState
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemandModel:
    """The fitted models of all series, made by `DemandForecaster`."""

    fitted: int
    """The number of bins of the history that the model was fitted on."""
    start_s: float
    step_s: float
    horizons: tuple[int, ...]
    models: dict[SeriesName, _SeriesModel | None]
    """Models by series; None if only zeros, or nothing, were seen."""

    def forecast(self, history: DemandHistory) -> dict[SeriesName, Forecast]:
        """Return the forecasts from the last bin of `history` on."""
        at = [len(history) - 1]
        empty = np.zeros((len(self.horizons), len(LEVELS)))
        return {
            name: Forecast(
                self.horizons,
                self.forecast_at(history, name, at)[0] if len(history) else empty,
                self.notes(history, name),
            )
            for name in SERIES
        }

    def forecast_at(self, history: DemandHistory, name: SeriesName, origins: Sequence[int]) -> Floats:
        if abs(history.start_s - self.start_s) > 1e-6 * self.step_s or history.step_s != self.step_s:
            raise ValueError("this history begins elsewhere than the one that the model was fitted on: fit anew")
        indices = np.asarray(origins, dtype=np.int64)
        if indices.size and (indices.min() < self.fitted - 1 or indices.max() >= len(history)):
            raise ValueError("an origin is outside the history, or before the end of the fit")
        model = self.models[name]
        if model is None or not indices.size:
            return np.zeros((indices.size, len(self.horizons), len(LEVELS)))
        seen = history.before(int(indices.max()) + 1)
        log, actual = _logs(seen, name, model.first, model.offset)
        point = _points(model, seen, name, self.fitted)
        scale = model.scale.at(states_of(log, self.horizons, self.step_s))
        own = self.fitted - model.first
        found = follow_bands(model.bands, point, actual, scale, self.horizons, step_s=self.step_s, fitted=own)
        ceiling = np.maximum.accumulate(log)[indices - model.first] + 3.0
        quantiles = np.exp(np.minimum(found[indices - self.fitted + 1], ceiling[:, None, None])) - model.offset
        return np.asarray(np.maximum(quantiles, 0.0))

    def notes(self, history: DemandHistory, name: SeriesName) -> tuple[str, ...]:
        """Return the notes that accompany a forecast of this series."""
        values = history.series(name)
        known = int(np.isfinite(values).sum())
        if not known:
            return ("no bin of this series is known: nothing is predicted",)
        if self.models[name] is None:
            return ("no demand so far: none is predicted",)
        span_s = _span_s(history, name)
        notes = []
        if np.nanmin(values) == np.nanmax(values):
            notes.append(
                f"{name}: the same in all {known} known bins: its band is narrow only as nothing has changed yet"
            )
        if span_s < LITTLE_HISTORY_S:
            notes.append(f"little history ({_age(span_s)}): no daily season is known yet, bands are wide")
        elif span_s < 2 * WEEK_S:
            notes.append(f"{_age(span_s)} of history: too short to know a weekly season")
        if known < 0.8 * len(values):
            notes.append(f"{1 - known / len(values):.0%} of the bins are not known")
        return tuple(notes)

    def explain(self, name: SeriesName) -> list[HorizonExplanation]:
        """Return the candidates behind each horizon, heaviest first; empty for a series without demand."""
        model = self.models[name]
        if model is None:
            return []
        found = []
        for blend in model.blends:
            order = np.argsort(-blend.weights, kind="stable")
            carried = {model.names[at]: round(float(blend.weights[at]), 3) for at in order if blend.weights[at] > 0.02}
            since_s = self.start_s + blend.leads_from * self.step_s
            error = blend.losses / blend.seen if blend.seen else np.full(len(order), np.nan)
            recent = {model.names[at]: float(error[at]) for at in order}
            found.append(HorizonExplanation(blend.horizon, carried, since_s, {each: recent[each] for each in carried}))
        return found


def _span_s(history: DemandHistory, name: SeriesName) -> float:
    known = np.isfinite(history.series(name))
    return (len(known) - int(known.argmax())) * history.step_s if known.any() else 0.0


def has_little_history(history: DemandHistory) -> bool:
    """Return whether requests are known for under two days, or none came."""
    return _span_s(history, "requests") < LITTLE_HISTORY_S or not np.nansum(history.requests)


def _age(span_s: float) -> str:
    return f"{span_s / DAY_S:.1f} days" if span_s >= DAY_S else f"{span_s / 3600:.1f} h"


def _fit(
    history: DemandHistory, name: SeriesName, horizons: tuple[int, ...], start: int, arrivals: _SeriesModel | None
) -> _SeriesModel | None:
    values = history.series(name)[start:]
    known = np.isfinite(values)
    if not (values[known] > 0).any():
        return None
    first = start + int(known.argmax())
    offset = _offset(values)
    log, actual = _logs(history, name, first, offset)
    targets = make_targets(log, history.step_s, len(log))
    names, driver = targets.names + LEARNED, None
    if arrivals is not None:
        driver = _Driver(arrivals, history, {each.horizon: each.predicted for each in arrivals.blends}, first, log)
        names = targets.names + _Driver.NAMES + LEARNED
    fits = checkpoints(len(log), max(round(DAY_S / history.step_s), 2))
    blends = Blender(log, actual, offset, history.step_s, targets.profile).fit(
        _rows(targets, driver), horizons, fits, first
    )
    points = _within_lengths(driver, [(each.horizon, each.predicted) for each in blends])
    errors = np.full(points.shape, np.nan)
    for row, point, horizon in zip(errors, points, horizons, strict=True):
        ended = max(len(log) - horizon, 0)
        row[:ended] = actual[horizon:] - point[:ended]
    states = states_of(log, horizons, history.step_s)
    scale = fit_scale(states, errors, horizons, history.step_s)
    bands = warm_bands(points, actual, scale.at(states), horizons, history.step_s)
    return _SeriesModel(first, offset, arrivals, tuple(blends), scale, bands, names)


def _points(model: _SeriesModel, history: DemandHistory, name: SeriesName, fitted: int) -> Floats:
    """Return forecasts in logarithms for all origins from the model's first bin on, of shape [horizons, n]."""
    log, actual = _logs(history, name, model.first, model.offset)
    own = fitted - model.first
    targets, driver = make_targets(log, history.step_s, own), None
    if model.arrivals is not None:
        found = _points(model.arrivals, history, "requests", fitted)
        points = {each.horizon: row for each, row in zip(model.arrivals.blends, found, strict=True)}
        driver = _Driver(model.arrivals, history, points, model.first, log)
    blender, rows = Blender(log, actual, model.offset, history.step_s, targets.profile), _rows(targets, driver)
    ahead = [(each.horizon, np.append(each.predicted[:-1], blender.follow(each, rows, own))) for each in model.blends]
    return _within_lengths(driver, ahead)


class _Driver:
    """The arrivals behind tokens, and the tokens per request, in the bins of the tokens' model."""

    NAMES: ClassVar = tuple(f"arrivals, lengths of {each:g} s" for each in LENGTH_HALF_LIVES_S)

    def __init__(
        self, arrivals: _SeriesModel, history: DemandHistory, points: dict[int, Floats], first: int, log: Floats
    ) -> None:
        """Create the driver from forecasts of arrivals by horizon (`points`) and tokens from bin `first` on (`log`)."""
        self._shift = first - arrivals.first
        self._points = points
        came, _ = _logs(history, "requests", arrivals.first, arrivals.offset)
        half_lives = np.array([max(each / history.step_s, 0.5) for each in LENGTH_HALF_LIVES_S])
        lengths = log - self._aligned(came)
        self._lengths = running_means(lengths, half_lives)
        self._least, self._most = np.minimum.accumulate(lengths), np.maximum.accumulate(lengths)

    def _aligned(self, values: Floats) -> Floats:
        lead = max(-self._shift, 0)  # tokens are known before arrivals, so the first arrivals stand in
        return np.concatenate([np.repeat(values[:1], lead), values])[max(self._shift, 0) :]

    def rows(self, horizon: int, first: int) -> Floats:
        """Return predicted arrivals times the lengths of an hour and of a day, of shape [n - first, 2]."""
        arrivals = self._aligned(self._points[horizon])[first:]
        return np.stack([arrivals + each[first:] for each in self._lengths], axis=1)

    def within(self, horizon: int, tokens: Floats) -> Floats:
        """Return the forecast of tokens, limited to lengths that have been seen so far."""
        arrivals = self._aligned(self._points[horizon])
        return np.asarray(np.clip(tokens, arrivals + self._least, arrivals + self._most))


def _within_lengths(driver: _Driver | None, ahead: Sequence[tuple[int, Floats]]) -> Floats:
    """Return forecasts limited to lengths that have been seen, of shape [horizons, n]."""
    return np.stack([values if driver is None else driver.within(horizon, values) for horizon, values in ahead])


def _rows(targets: Targets, driver: _Driver | None) -> Callable[[int, int], Floats]:
    if driver is None:
        return targets.at
    return lambda horizon, first: np.concatenate([targets.at(horizon, first), driver.rows(horizon, first)], axis=1)


def _offset(values: Floats) -> float:
    """Return the constant to add before taking logarithms: small compared with usual values, larger if bins vary."""
    seen = values[np.isfinite(values) & (values > 0)]
    usual = float(np.median(seen))
    moved = np.abs(np.diff(hold(values)))
    return float(
        np.clip(
            _OFFSET_OF_MOVES * float(moved[np.isfinite(moved)].mean() if moved.size else 0.0), _OFFSET * usual, usual
        )
    )


def _logs(history: DemandHistory, name: SeriesName, first: int, offset: float) -> tuple[Floats, Floats]:
    """Return (the series with unknown bins filled, the series with nan) from bin `first` on, in logarithms."""
    actual = np.log(without_outages(history.series(name), history.step_s)[first:] + offset)
    return hold(actual), actual
