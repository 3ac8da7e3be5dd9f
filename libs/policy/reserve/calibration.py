"""How far a forecast's quantile has to be moved so that it is passed as seldom as it says. Pure.

Each window gives a score: the normal deviate up to which the forecast, before the window, put less than what came. The
deviate to ask for next is a quantile of past scores (split conformal), recent ones counting more, at a level that moves
with what was covered (adaptive conformal inference: Gibbs and Candès 2021). Nothing is assumed of the forecast.
"""

from statistics import NormalDist
from typing import Final

import numpy as np

from libs.policy.reserve.counts import Floats

MOST: Final = 2880
"""Scores that are kept."""
HALF_LIFE: Final = 600.0
"""Windows after which a score counts half."""
TRUSTED: Final = 60.0
"""Scores' worth of the forecast's own word, spread as a standard normal, that is counted beside past scores."""
GAIN: Final = 0.005
"""By which a level moves at a miss; 1/GAIN windows bound how long a run of misses goes on."""
EXTREME: Final = 8.0
_NORMAL: Final = NormalDist()


def score(distribution: Floats, came: int) -> float:
    """The deviate below which the distribution has less than `came`; one that is larger covers it."""
    below = float(distribution[: max(came, 0)].sum())
    above = float(distribution[max(came, 0) :].sum())
    if below <= 1e-14:
        return -EXTREME
    if above <= 1e-14:
        return EXTREME
    deviate = _NORMAL.inv_cdf(below) if below < 0.5 else -_NORMAL.inv_cdf(min(above, 0.999999999))
    return max(min(deviate, EXTREME), -EXTREME)


def normal_level(deviate: float) -> float:
    """The probability below a deviate; 1 where it is too far out to tell."""
    return _NORMAL.cdf(deviate) if deviate < EXTREME - 1 else 1.0


class Calibrator:
    """Tracks the deviate for one confidence."""

    def __init__(self, confidence: float) -> None:
        self._miss = 1 - confidence
        self._level_miss = self._miss
        self._scores: list[float] = []
        own = (np.arange(400) + 0.5) / 400
        self._own: Floats = np.array([_NORMAL.inv_cdf(each) for each in own.tolist()])

    @property
    def deviate(self) -> float:
        """To be covered in the next window."""
        past = np.array(self._scores)
        age = np.arange(len(past))[::-1]
        weight = np.concatenate([0.5 ** (age / HALF_LIFE), np.full(len(self._own), TRUSTED / len(self._own))])
        values = np.concatenate([past, self._own])
        order = np.argsort(values)
        above = np.cumsum(weight[order][::-1])[::-1]
        # One more score, that of the window to come, counts as above all others: the finite-sample correction.
        allowed = self._level_miss * (weight.sum() + 1) - 1
        place = int(np.searchsorted(-above, -max(allowed, 0.0), side="left"))
        return float(values[order][min(place, len(values) - 1)]) if allowed > 0 else float(values[order][-1])

    def learn(self, seen: float, *, covered: bool) -> None:
        """The score of a window that has passed, and whether what was asked for covered it."""
        self._scores.append(seen)
        if len(self._scores) > MOST:
            del self._scores[0]
        self._level_miss += GAIN * (self._miss - (0.0 if covered else 1.0)) * self._miss * 10
        self._level_miss = min(max(self._level_miss, self._miss / 8), self._miss * 2)
