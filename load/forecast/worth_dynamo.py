"""Dynamo's throughput planner over minutes: its predictions once, then as many headrooms as are tried.

`constant` and `kalman` are `libs.lab.rivals`'. `arima` and `prophet` need `pip install 'fulcrum[forecast]'`: ARIMA's
order is chosen on the first day and its state run on from interval to interval; Prophet sees the last 50 intervals and
is fitted anew in each of the scored half, with as-now before it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from libs.forecast.heavy import PROPHET_WINDOW, prophet_ahead
from libs.lab.rivals.dynamo_planner import MAX_REPLICA_CHANGE
from libs.lab.rivals.dynamo_predictors import Constant, Kalman, Predictor
from libs.policy.capacity.plan import PHASES
from libs.policy.forecast.history import Floats
from load.forecast.worth_world import Wanted, World

INTERVAL_MIN: Final = 3
DAY_INTERVALS: Final = 1440 // INTERVAL_MIN
NAMES: Final = ("constant", "kalman", "arima", "prophet")
_LIBRARIES: Final = {"arima": "pmdarima", "prophet": "prophet"}


class DynamoPlanner:
    """One step ahead by requests and mean lengths of intervals of three minutes, at most 8 replicas more or less."""

    def __init__(self, world: World, name: str) -> None:
        minutes = len(world.requests)
        ends = range(INTERVAL_MIN, minutes, INTERVAL_MIN)
        requests = np.array([world.requests[end - INTERVAL_MIN : end].sum() for end in ends]) * 60
        series = [requests]
        for phase in PHASES:
            tokens = np.array([world.tokens[phase][end - INTERVAL_MIN : end].sum() for end in ends]) * 60
            series.append(tokens / np.maximum(requests, 1e-9))
        count, *lengths = (_one_ahead(each, name) for each in series)
        seconds = [length * world.seconds_each[phase] for phase, length in zip(PHASES, lengths, strict=True)]
        self._work = {phase: count * each / (INTERVAL_MIN * 60) for phase, each in zip(PHASES, seconds, strict=True)}

    def __call__(self, world: World, headroom: float) -> Wanted:
        """Workers that are wanted, by the minute."""
        minutes = len(world.requests)
        wanted = {}
        for phase in PHASES:
            current = int(world.needed(phase, world.work[phase][:1])[0])
            steps = [current]
            for needed in world.needed(phase, self._work[phase] * headroom).tolist():
                current = max(1, min(max(needed, current - MAX_REPLICA_CHANGE), current + MAX_REPLICA_CHANGE))
                steps.append(current)
            wanted[phase] = np.repeat(np.array(steps, np.int64), INTERVAL_MIN)[:minutes]
        return wanted


def installed() -> list[str]:
    """Predictors that can be had here."""
    return [name for name in NAMES if name not in _LIBRARIES or find_spec(_LIBRARIES[name])]


def _one_ahead(values: Floats, name: str) -> Floats:
    """[intervals] What is predicted for the one after each."""
    if name == "arima":
        return _arima(values)
    if name == "prophet":
        return _prophet(values)
    predictor: Predictor = Kalman() if name == "kalman" else Constant()
    found = np.empty(len(values))
    for at, value in enumerate(values.tolist()):
        predictor.add(value)
        found[at] = predictor.next()
    return found


def _arima(values: Floats) -> Floats:
    found = values.copy()
    train = values[:DAY_INTERVALS]
    fitted: Any = import_module("pmdarima").auto_arima(train, suppress_warnings=True, error_action="ignore")
    state = fitted.arima_res_
    for at in range(len(train), len(values)):
        state = state.extend(values[at : at + 1])
        found[at] = float(np.asarray(state.forecast(1))[0])
    return np.maximum(found, 0.0)


def _prophet(values: Floats) -> Floats:
    found = values.copy()
    for at in range(len(values) // 2, len(values)):
        seen = values[max(at + 1 - PROPHET_WINDOW, 0) : at + 1]
        found[at] = prophet_ahead(seen, (1,), INTERVAL_MIN * 60.0)[0]
    return found
