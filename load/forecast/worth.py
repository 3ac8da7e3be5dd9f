"""The worth of a forecast over minutes of known demand: the world of workers, Dynamo's planner, and the best rule.

`World` holds the demand and what workers would serve of it. `DynamoPlanner` makes its predictions once, and can then be
asked for any headroom; its predictors `constant` and `kalman` are `libs.lab.rivals`', `arima` and `prophet` need
`pip install 'fulcrum[forecast]'`. ARIMA's order is chosen on the first day and its state run on from interval to
interval. Prophet is fitted anew on the last 50 intervals, in the scored half only; before it, as-now is used.

`MinuteRule` predicts work `start_min` minutes ahead, in logarithms, by a ridge regression. Its columns are levels of
the last minutes at several memories, of both phases and of requests, and the forecast of ten-minute bins. Its errors
are scaled by how large they were of late. It takes the number of workers that costs least: GPU-minutes, and late
requests at a price. With `bins_known` it sees the mean of the coming ten-minute bin: a bound, not a planner.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libs.forecast.baselines import PROPHET_WINDOW, prophet_ahead
from libs.lab.rivals.dynamo_planner import MAX_REPLICA_CHANGE
from libs.lab.rivals.dynamo_predictors import Constant, Kalman, Predictor
from libs.policy.capacity import PHASES, Phase, Whole
from libs.policy.forecast.history import Floats

START_MIN: Final = 5
# Bound on the workers of a pool.
MOST_WORKERS: Final = 2000

# Workers that are ordered or active, [minutes].
Wanted = dict[Phase, Whole]


@dataclass(frozen=True, slots=True)
class World:
    """Minutes of known demand, converted to the time that workers need for it."""

    work: dict[Phase, Floats]
    requests: Floats
    """Requests a second, [minutes]."""
    tokens: dict[Phase, Floats]
    """Tokens a second, [minutes], by phase."""
    seconds_each: dict[Phase, float]
    """Seconds of a worker for one token, by phase."""
    most: dict[Phase, Floats]
    """[workers - 1] The most work that a pool takes, by its table."""
    ahead: dict[Phase, Floats]
    """[minutes, levels] Work forecast for the time at which a worker ordered now is active; nan where unknown."""
    start_min: int = START_MIN
    """Minutes that workers take to start."""
    moves: bool = False
    """Whether workers change roles within a minute while others start."""

    def needed(self, phase: Phase, work: Floats) -> Whole:
        """Return the workers that take so much work; at least one."""
        counts = np.searchsorted(self.most[phase], work - 1e-9) + 1
        return np.asarray(np.minimum(counts, MOST_WORKERS), np.int64)

    def in_time(self, active: Wanted) -> Floats:
        """Return [minutes]: the share of requests that these workers serve in time."""
        shares = [
            np.minimum(self.most[phase][active[phase] - 1] / np.maximum(self.work[phase], 1e-9), 1.0)
            for phase in PHASES
        ]
        return np.asarray(np.minimum(*shares))

    def in_time_with_moves(self, active: Wanted, *, seeing: bool = False) -> Floats:
        """Return the share as `in_time` does where workers change roles between minutes. All are shared out by the
        work of the minute before, or with `seeing` of the minute itself.
        """
        total = active["prefill"] + active["decode"]
        by = self.work if seeing else {p: np.concatenate([w[:1], w[:-1]]) for p, w in self.work.items()}
        least, prefill = np.full(len(total), -1.0), np.ones(len(total), np.int64)
        for count in range(1, int(total.max())):
            others = np.maximum(total - count, 1)
            room = np.minimum(
                self.most["prefill"][count - 1] / np.maximum(by["prefill"], 1e-9),
                self.most["decode"][others - 1] / np.maximum(by["decode"], 1e-9),
            )
            better = (room > least) & (count < total)
            least, prefill = np.where(better, room, least), np.where(better, count, prefill)
        return self.in_time({"prefill": prefill, "decode": np.maximum(total - prefill, 1)})


INTERVAL_MIN: Final = 3
DAY_INTERVALS: Final = 1440 // INTERVAL_MIN
NAMES: Final = ("constant", "kalman", "arima", "prophet")
_LIBRARIES: Final = {"arima": "pmdarima", "prophet": "prophet"}


class DynamoPlanner:
    """Dynamo's planner: one step ahead by requests and mean lengths of intervals of three minutes, at most 8 replicas
    more or less.
    """

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
        """Return the workers that are wanted, by the minute."""
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
    """Return the names of predictors that are installed here."""
    return [name for name in NAMES if name not in _LIBRARIES or find_spec(_LIBRARIES[name])]


def _one_ahead(values: Floats, name: str) -> Floats:
    """Return [intervals]: the prediction of the interval after each."""
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


HALF_LIVES_MIN: Final = (1, 2, 4, 8, 15, 30, 60, 180)
# Memories, in minutes, of the size of errors.
SCALE_MIN: Final = (30, 240)
# Work that is added before logarithms are taken.
SMALL: Final = 0.02
RIDGE: Final = 3.0
QUANTILES: Final = 100
LEAST_SCALE: Final = 0.08
# Workers of a pool.
MOST_TRIED: Final = 60
# Minutes that are computed at once.
PART: Final = 1000
BIN_MIN: Final = 10
WARM_MIN: Final = 10


class MinuteRule:
    """The rule of minutes, fitted on the first `fitted` of them."""

    def __init__(self, world: World, fitted: int, *, bins_known: bool = False) -> None:
        self._fitted, self._bins_known = fitted, bins_known
        horizons = sorted({0, world.start_min})
        self._late = {phase: [self._fit(world, phase, ahead) for ahead in horizons] for phase in PHASES}

    def __call__(self, world: World, late_price: float) -> Wanted:
        """`late_price` is the GPU-minutes that a mean minute's requests are worth, all of them in time or late."""
        rate = _level(_before(world.requests), 4) / float(world.requests.mean())
        counts = np.arange(1, MOST_TRIED + 1)
        return {
            phase: np.maximum.reduce(
                [(counts + late_price * rate[:, None] * each).argmin(axis=1) + 1 for each in found]
            )
            for phase, found in self._late.items()
        }

    def _fit(self, world: World, phase: Phase, ahead: int) -> Floats:
        """Return [minutes, workers]: as each minute begins, the share that will be late in the minute `ahead` later."""
        logs = {each: np.log(world.work[each] + SMALL) for each in PHASES}
        seen, requests = _before(logs[phase]), _before(np.log(world.requests + 1))
        (other,) = (each for each in PHASES if each != phase)
        predicted = world.ahead[phase][:, world.ahead[phase].shape[1] // 2]
        columns = [
            seen,
            *(_level(seen, half_life) for half_life in HALF_LIVES_MIN),
            *(_level(_before(logs[other]), half_life) for half_life in (2, 15)),
            *(_level(requests, half_life) for half_life in (2, 15)),
            np.where(np.isfinite(predicted), np.log(np.nan_to_num(predicted, nan=1.0) + SMALL), _level(seen, 8)),
        ]
        if self._bins_known:
            means = world.work[phase].reshape(-1, BIN_MIN).mean(axis=1)
            columns.append(_later(np.log(np.repeat(means, BIN_MIN) + SMALL), ahead))
        rows = np.stack([*columns, np.ones(len(seen))], axis=1)
        outcome, learned = _later(logs[phase], ahead), slice(WARM_MIN, self._fitted - ahead)
        mean = rows @ _ridge(rows[learned], outcome[learned])
        errors = outcome - mean
        late = np.abs(np.concatenate([np.full(ahead + 1, 0.3), errors[: -(ahead + 1)]]))  # errors known by then
        sizes = np.stack([*(_level(late, each) for each in SCALE_MIN), mean, np.ones(len(mean))], axis=1)
        scale = np.maximum(sizes @ _ridge(sizes[learned], np.abs(errors[learned])), LEAST_SCALE)
        levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
        return _late(world.most[phase], mean, scale, np.quantile(errors[learned] / scale[learned], levels))


def _ridge(rows: Floats, outcome: Floats) -> NDArray[Any]:
    """Return weights; the last column is the constant, which is not drawn to zero."""
    drawn = RIDGE * np.eye(rows.shape[1])
    drawn[-1, -1] = 1e-6
    return np.asarray(np.linalg.solve(rows.T @ rows + drawn, rows.T @ outcome))


def _late(most: Floats, mean: Floats, scale: Floats, errors: Floats) -> Floats:
    """Return [minutes, workers]: the expected share of late work, by active workers.

    `mean` and `scale` are of logarithms of work, [minutes]; `errors` are in scales, equally likely.
    """
    takes = most[:MOST_TRIED]
    found = np.empty((len(mean), len(takes)))
    for first in range(0, len(mean), PART):
        part = slice(first, first + PART)
        work = np.exp(mean[part, None] + scale[part, None] * errors) - SMALL
        for at, each in enumerate(takes):
            found[part, at] = np.maximum(1 - each / np.maximum(work, 1e-6), 0.0).mean(axis=1)
    return found


def _level(values: Floats, half_life_min: float) -> Floats:
    keep = 0.5 ** (1 / half_life_min)
    out, level = np.empty_like(values), float(values[0])
    for at, value in enumerate(values.tolist()):
        level = keep * level + (1 - keep) * value
        out[at] = level
    return out


def _before(values: Floats) -> Floats:
    return np.concatenate([values[:1], values[:-1]])


def _later(values: Floats, minutes: int) -> Floats:
    """Return [t] the value of t + minutes; the last one for those beyond the end."""
    return np.concatenate([values[minutes:], np.repeat(values[-1:], minutes)])
