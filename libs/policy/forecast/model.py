"""The demand forecaster: fitted on a history, it predicts arrivals, prompt and output tokens with bands. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from libs.policy.forecast.bands import LEVELS, Scale, bands, fit_scale, states_of
from libs.policy.forecast.blend import learn
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, SeriesName, without_outages
from libs.policy.forecast.levels import hold
from libs.policy.forecast.targets import DAY_S, WEEK_S, make_targets

MOST_BINS: Final = 8064
"""That a fit looks at, the latest: 8 weeks of 10 minutes."""
_OFFSET: Final = 0.01
"""Of the median that is not zero, added before logarithms are taken."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of one series from one origin."""

    horizons: tuple[int, ...]
    """Bins ahead: 1 is the bin after the origin's."""
    quantiles: Floats
    """[horizons, levels] Per second, at `LEVELS`; at least 0, sorted, never nan."""
    notes: tuple[str, ...]
    """What a person should know, e.g. that there is little history."""


class FittedDemand(Protocol):
    """What predicts the demand whose history it was fitted on, and what came after."""

    def forecast_at(self, history: DemandHistory, name: SeriesName, origins: Sequence[int]) -> Floats:
        """[origins, horizons, levels] As `Forecast.quantiles`, each from the bins up to and with its origin alone.

        `history` begins where that of the fit did. Raises ValueError where it does not, or an origin is outside it or
        before the fit's last bin.
        """
        ...


class Forecaster(Protocol):
    """Makes models."""

    def fit(self, history: DemandHistory, horizons: tuple[int, ...]) -> FittedDemand:
        """From all bins of `history`; horizons in bins, each at least 1."""
        ...


class DemandForecaster:
    """Ours: arrivals by their own levels and seasons, tokens also by what arrivals will do."""

    def fit(self, history: DemandHistory, horizons: tuple[int, ...]) -> "DemandModel":
        """A model for each series; a history may be empty."""
        if not horizons or min(horizons) < 1:
            raise ValueError("horizons are whole bins, at least 1")
        start = max(len(history) - MOST_BINS, 0)
        models = {name: _fit(history, name, horizons, start) for name in SERIES}
        return DemandModel(len(history), history.start_s, history.step_s, horizons, models)


@dataclass(frozen=True, slots=True)
class _SeriesModel:
    """Model of one series, in logarithms."""

    first: int
    """First bin that is looked at: before it nothing is known."""
    offsets: tuple[float, float]
    """Added before logarithms are taken: to the series, and to the arrivals that drive it (0: none do)."""
    weights: Floats
    predicted: Floats
    """[horizons, fitted bins] What weights learned before each origin said."""
    scale: Scale
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemandModel:
    """Fitted by `DemandForecaster`."""

    fitted: int
    """Bins of the history it was fitted on."""
    start_s: float
    step_s: float
    horizons: tuple[int, ...]
    models: dict[SeriesName, _SeriesModel | None]
    """None: nothing but zeros, or nothing at all, was seen."""

    def forecast(self, history: DemandHistory) -> dict[SeriesName, Forecast]:
        """From the last bin of `history` on."""
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
        """See `FittedDemand`."""
        if abs(history.start_s - self.start_s) > 1e-6 * self.step_s or history.step_s != self.step_s:
            raise ValueError("this history begins elsewhere than the one that the model was fitted on: fit anew")
        places = np.asarray(origins, dtype=np.int64)
        if places.size and (places.min() < self.fitted - 1 or places.max() >= len(history)):
            raise ValueError("an origin is outside the history, or before the end of the fit")
        model = self.models[name]
        if model is None or not places.size:
            return np.zeros((places.size, len(self.horizons), len(LEVELS)))
        log, actual, driver = _logs(history, name, model.first, int(places.max()) + 1, model.offsets)
        targets = make_targets(log, driver, self.horizons, self.step_s, self.fitted - model.first)
        known = model.predicted.shape[1] - 1  # the weights were learned with the last one
        following = (targets.values[:, known:] @ model.weights[:, :, None])[:, :, 0]
        point = np.concatenate([model.predicted[:, :known], following], axis=1)
        scale = model.scale.at(states_of(log, self.horizons, self.step_s))
        first = int(places.min()) - model.first
        found = bands(point, actual, scale, self.horizons, self.step_s, first=first, fitted=self.fitted - model.first)
        ceiling = np.maximum.accumulate(log)[places - model.first] + 3.0
        quantiles = np.exp(np.minimum(found[places - model.first - first], ceiling[:, None, None])) - model.offsets[0]
        return np.asarray(np.maximum(quantiles, 0.0))

    def notes(self, history: DemandHistory, name: SeriesName) -> tuple[str, ...]:
        """What to know of a forecast of this series."""
        values = history.series(name)
        known = int(np.isfinite(values).sum())
        if not known:
            return ("no bin of this series is known: nothing is predicted",)
        if self.models[name] is None:
            return ("no demand so far: none is predicted",)
        span_s = (len(values) - int(np.isfinite(values).argmax())) * history.step_s
        notes = []
        if span_s < 2 * DAY_S:
            notes.append(f"little history ({_age(span_s)}): no daily season is known yet, bands are wide")
        elif span_s < 2 * WEEK_S:
            notes.append(f"{_age(span_s)} of history: too short to know a weekly season")
        if known < 0.8 * len(values):
            notes.append(f"{1 - known / len(values):.0%} of the bins are not known")
        return tuple(notes)

    def explain(self, name: SeriesName) -> list[dict[str, float]]:
        """Weights of the candidates behind each horizon, those above 2 %."""
        model = self.models[name]
        if model is None:
            return [{} for _ in self.horizons]
        pairs = [dict(zip(model.targets, map(float, row), strict=True)) for row in model.weights]
        return [{target: round(weight, 3) for target, weight in each.items() if weight > 0.02} for each in pairs]


def _age(span_s: float) -> str:
    return f"{span_s / DAY_S:.1f} days" if span_s >= DAY_S else f"{span_s / 3600:.1f} h"


def _fit(history: DemandHistory, name: SeriesName, horizons: tuple[int, ...], start: int) -> _SeriesModel | None:
    values = history.series(name)[start:]
    known = np.isfinite(values)
    if not (values[known] > 0).any():
        return None
    first = start + int(known.argmax())
    offsets = _offset(values), _offset(history.requests[first:]) if name != "requests" else 0.0
    log, actual, driver = _logs(history, name, first, len(history), offsets)
    targets = make_targets(log, driver, horizons, history.step_s, len(log))
    weights, predicted = learn(targets, actual, horizons, max(round(DAY_S / history.step_s), 2))
    errors = np.full(predicted.shape, np.nan)
    for place, horizon in enumerate(horizons):
        errors[place, : max(len(actual) - horizon, 0)] = actual[horizon:] - predicted[place, : -horizon or None]
    scale = fit_scale(states_of(log, horizons, history.step_s), errors, horizons, history.step_s)
    return _SeriesModel(first, offsets, weights, predicted, scale, targets.names)


def _offset(values: Floats) -> float:
    """What is added before logarithms are taken; 0 where nothing but zeros is known."""
    seen = values[np.isfinite(values) & (values > 0)]
    return _OFFSET * float(np.median(seen)) if seen.size else 0.0


def _logs(
    history: DemandHistory, name: SeriesName, first: int, last: int, offsets: tuple[float, float]
) -> tuple[Floats, Floats, Floats | None]:
    """(the series without unknown bins, with them, the arrivals that drive it), of bins `first` to `last`.

    offsets: added before logarithms are taken, of the series and of arrivals; 0: they do not drive it.
    """
    offset, driver_offset = offsets
    actual = np.log(without_outages(history.series(name)[:last], history.step_s)[first:] + offset)
    if not driver_offset:
        return hold(actual), actual, None
    arrivals = hold(without_outages(history.requests[:last], history.step_s)[first:])
    return hold(actual), actual, np.log(arrivals + driver_offset)
