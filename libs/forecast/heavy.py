"""Baselines from libraries: AutoARIMA, AutoETS, MSTL, and ARIMA and Prophet as used by Dynamo's planner.

The first three are statsforecast's (Nixtla). Dynamo means ai-dynamo 1.6.1, planner/core/load/predictors.py with its
defaults: auto_arima fitted once and then updated, Prophet on the last 50 intervals, each on requests, prompt
lengths and output lengths separately. It predicts one step there and all requested steps here.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np

from libs.contracts.errors import InvalidRequest
from libs.forecast.baselines import Baseline, BaselineTask, held
from libs.policy.forecast.history import Floats

PROPHET_WINDOW: Final = 50
"""The number of intervals that Dynamo's Prophet sees."""
MOST_SEEN: Final = 2016
"""The most bins before an origin that a model uses."""
_DAY_S: Final = 86_400.0


def heavy_names() -> list[str]:
    return list(_MAKERS)


def heavy_baselines(names: Sequence[str]) -> list[Baseline]:
    """Return the named baselines; raise InvalidRequest if a library is not installed."""
    try:
        return [_MAKERS[name]() for name in names]
    except ImportError as error:
        raise InvalidRequest(
            f"baselines {', '.join(names)} need {error.name or error}: pip install 'fulcrum[forecast]'"
        ) from None


class _Forwarded:
    """A statsforecast model, fitted on the training days and run forward to each origin with fixed parameters."""

    def __init__(self, name: str, make: Callable[[int], Any]) -> None:
        self.name = name
        self._make = make

    def predict(self, asked: BaselineTask) -> Floats | None:
        day = asked.season(_DAY_S)
        if asked.fitted < 2 * day + 1:
            return None
        values = asked.values
        model = self._make(day)
        found = np.zeros((len(asked.origins), len(asked.horizons)))
        places = np.array(asked.horizons) - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(y=values[max(asked.fitted - MOST_SEEN, 0) : asked.fitted])
            for row, origin in enumerate(asked.origins):
                seen = values[max(origin + 1 - MOST_SEEN, 0) : origin + 1]
                found[row] = model.forward(y=seen, h=int(places.max()) + 1)["mean"][places]
        return np.maximum(np.nan_to_num(found), 0.0)


class _DynamoStyle:
    """Separate forecasts of requests and of their prompt or output lengths, multiplied to tokens."""

    def __init__(self, name: str, predict_one: Callable[[Floats, BaselineTask], Floats]) -> None:
        self.name = name
        self._one = predict_one
        self._requests: tuple[tuple[int, int], Floats] | None = None

    def predict(self, asked: BaselineTask) -> Floats | None:
        if asked.fitted < 5:  # with fewer bins Dynamo predicts the last value
            return None
        last = max(asked.origins) + 1
        requests = held(asked.history.requests[:last])
        key = (asked.fitted, last)
        if self._requests is None or self._requests[0] != key:  # all three series need the same forecast
            self._requests = key, self._one(requests * asked.history.step_s, asked) / asked.history.step_s
        if asked.name == "requests":
            return self._requests[1]
        lengths = np.where(requests > 0, asked.history.series(asked.name)[:last] / np.maximum(requests, 1e-12), np.nan)
        return self._requests[1] * self._one(held(lengths), asked)


def _arima(values: Floats, asked: BaselineTask) -> Floats:
    pmdarima = import_module("pmdarima")
    train = values[max(asked.fitted - MOST_SEEN, 0) : asked.fitted]
    found = np.empty((len(asked.origins), len(asked.horizons)))
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
        state, seen = model.arima_res_, asked.fitted
        for row, origin in enumerate(asked.origins):
            if origin + 1 > seen:
                state, seen = state.extend(values[seen : origin + 1]), origin + 1
            ahead = np.asarray(state.forecast(max(asked.horizons)))
            found[row] = ahead[np.array(asked.horizons) - 1]
    return np.maximum(np.expm1(found) if in_log else found, 0.0)


def _windowed_prophet(values: Floats, asked: BaselineTask) -> Floats:
    return np.stack([
        prophet_ahead(values[max(origin + 1 - PROPHET_WINDOW, 0) : origin + 1], asked.horizons, asked.history.step_s)
        for origin in asked.origins
    ])  # fmt: skip


def prophet_ahead(seen: Floats, horizons: Sequence[int], step_s: float) -> Floats:
    """Fit Prophet to the given bins and predict the ones after them."""
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
    """Prophet on all days before each fit; between fits it sees nothing new."""

    name = "prophet"

    def predict(self, asked: BaselineTask) -> Floats | None:
        if asked.fitted < 24:
            return None
        ahead = tuple(range(1, max(asked.origins) - asked.fitted + max(asked.horizons) + 2))
        path = prophet_ahead(asked.values[: asked.fitted], ahead, asked.history.step_s)
        places = np.asarray(asked.origins)[:, None] + np.array(asked.horizons)[None] - asked.fitted
        return np.asarray(path[np.maximum(places, 0)])


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


# AutoETS has no season here, as statsforecast's allows at most 24 steps of one.
_MAKERS: Final[dict[str, Callable[[], Baseline]]] = {
    "auto-arima": _statsforecast("auto-arima", lambda m, _day: m.AutoARIMA(season_length=1, approximation=True)),
    "auto-ets": _statsforecast("auto-ets", lambda m, _day: m.AutoETS(season_length=1)),
    "mstl": _statsforecast("mstl", lambda m, day: m.MSTL(season_length=[day], trend_forecaster=m.AutoETS(model="ZZN"))),
    "arima-dynamo": _needing(["pmdarima"], lambda: _DynamoStyle("arima-dynamo", _arima)),
    "prophet-dynamo": _needing(["pandas", "prophet"], lambda: _DynamoStyle("prophet-dynamo", _windowed_prophet)),
    "prophet": _needing(["pandas", "prophet"], _Prophet),
}
