"""The best rule we know from minutes alone: what a forecast of the minute in which a new worker serves is worth.

Work `start_min` minutes on, in logarithms, is a ridge regression on levels of the last minutes at several memories, of
both phases and of requests, and on the forecast of ten-minute bins; its errors are scaled by how large they were of
late. Of that distribution the number of workers is taken that costs least: GPU-minutes, and late requests at a price.
With `bins_known` the mean of the coming ten-minute bin is known and its minutes are not: a bound, and no planner.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from libs.policy.capacity.plan import PHASES, Phase
from libs.policy.forecast.history import Floats
from load.forecast.worth_world import Wanted, World

HALF_LIVES_MIN: Final = (1, 2, 4, 8, 15, 30, 60, 180)
SCALE_MIN: Final = (30, 240)
"""Memories of how large errors were."""
SMALL: Final = 0.02
"""Work that is added before logarithms are taken."""
RIDGE: Final = 3.0
QUANTILES: Final = 100
LEAST_SCALE: Final = 0.08
MOST_TRIED: Final = 60
"""Workers of a pool."""
PART: Final = 1000
"""Minutes that are weighed at once."""
BIN_MIN: Final = 10
WARM_MIN: Final = 10


class MinuteRule:
    """Fitted on the first `fitted` minutes."""

    def __init__(self, world: World, fitted: int, *, bins_known: bool = False) -> None:
        self._fitted, self._bins_known = fitted, bins_known
        horizons = sorted({0, world.start_min})
        self._late = {phase: [self._fit(world, phase, ahead) for ahead in horizons] for phase in PHASES}

    def __call__(self, world: World, late_price: float) -> Wanted:
        """late_price: GPU-minutes that a mean minute's requests are worth, all of them in time or late."""
        rate = _level(_before(world.requests), 4) / float(world.requests.mean())
        counts = np.arange(1, MOST_TRIED + 1)
        return {
            phase: np.maximum.reduce(
                [(counts + late_price * rate[:, None] * each).argmin(axis=1) + 1 for each in found]
            )
            for phase, found in self._late.items()
        }

    def _fit(self, world: World, phase: Phase, ahead: int) -> Floats:
        """[minutes, workers] As each minute begins: the share that will be late in the minute `ahead` later."""
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
        late = np.abs(np.concatenate([np.full(ahead + 1, 0.3), errors[: -(ahead + 1)]]))  # those that are known by then
        sizes = np.stack([*(_level(late, each) for each in SCALE_MIN), mean, np.ones(len(mean))], axis=1)
        scale = np.maximum(sizes @ _ridge(sizes[learned], np.abs(errors[learned])), LEAST_SCALE)
        levels = (np.arange(QUANTILES) + 0.5) / QUANTILES
        return _late(world.most[phase], mean, scale, np.quantile(errors[learned] / scale[learned], levels))


def _ridge(rows: Floats, outcome: Floats) -> NDArray[Any]:
    """Weights; the last column is the constant, which is not drawn to zero."""
    drawn = RIDGE * np.eye(rows.shape[1])
    drawn[-1, -1] = 1e-6
    return np.asarray(np.linalg.solve(rows.T @ rows + drawn, rows.T @ outcome))


def _late(most: Floats, mean: Floats, scale: Floats, errors: Floats) -> Floats:
    """[minutes, workers] Share of work that is expected to be late, by how many serve.

    mean, scale: of logarithms of work, [minutes]; errors: in scales, equally likely.
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
    """Exponentially weighted."""
    keep = 0.5 ** (1 / half_life_min)
    out, level = np.empty_like(values), float(values[0])
    for at, value in enumerate(values.tolist()):
        level = keep * level + (1 - keep) * value
        out[at] = level
    return out


def _before(values: Floats) -> Floats:
    return np.concatenate([values[:1], values[:-1]])


def _later(values: Floats, minutes: int) -> Floats:
    """[t] Of t + minutes; the last one for those beyond the end."""
    return np.concatenate([values[minutes:], np.repeat(values[-1:], minutes)])
