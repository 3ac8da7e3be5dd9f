"""Shift a forecast's quantile so that it is exceeded as seldom as intended.

Each window gives a score: the normal deviate below which the forecast, made before the window, put less than the
outcome. The next deviate is the recent centre of the outcomes plus a quantile of the scores' distances from it
(split conformal), with recent scores weighted more. The level of that quantile moves with the recent coverage
(adaptive conformal inference: Gibbs and Candès 2021). Nothing is assumed about the forecast.
"""

from math import erfc, sqrt
from statistics import NormalDist
from typing import Final

import numpy as np

from libs.policy.reserve.counts import Floats

MAX_SCORES: Final = 2880
"""The most past scores that are kept: those of the latest windows."""
HALF_LIFE: Final = 600.0
"""The number of windows after which a score weighs half."""
TRUSTED: Final = 60.0
"""The weight, in scores, of the forecast's own quantiles, added as a standard normal to the past scores."""
PRUDENCE: Final = 0.8
"""The share of the allowed misses that is aimed at, because the misses of a finite log scatter around the aim."""
STEP: Final = 0.5
"""The share of the allowed misses by which one miss lowers the requested level."""
CENTRE_KEEP: Final = 0.985
"""The decay per window of the scores' centre, with a half-life of 46 windows."""
CENTRE_PRIOR: Final = 10.0
"""The weight, in scores at 0, of the centre's prior."""
CENTRE_REACH: Final = 10.0
"""The bound on a score that enters the centre."""
LEAST: Final = 1e-250
EXTREME: Final = 33.0
"""The deviate of an outcome that the forecast considers less likely than `LEAST`."""
_NORMAL: Final = NormalDist()


def score(distribution: Floats, came: int) -> float:
    """Return the deviate below which the distribution has less than `came`; a larger one covers it."""
    return _deviate(float(distribution[:came].sum()), float(distribution[came:].sum()))


def middle(distribution: Floats, came: int) -> float:
    """Return the deviate of `came` itself, half of whose probability lies on either side.

    It is 0 on average if the forecast is right, however coarse it is.
    """
    half = float(distribution[came]) / 2 if came < len(distribution) else 0.0
    return _deviate(float(distribution[:came].sum()) + half, float(distribution[came + 1 :].sum()) + half)


def _deviate(below: float, above: float) -> float:
    if below <= LEAST:
        return -EXTREME
    if above <= LEAST:
        return EXTREME
    return _NORMAL.inv_cdf(below) if below < above else -_NORMAL.inv_cdf(above)


def normal_miss(deviate: float) -> float:
    """Return the probability beyond a deviate, exact far out in the tail."""
    return erfc(deviate / sqrt(2)) / 2


class Calibrator:
    """A tracker of the deviate that covers outcomes with one confidence.

    The centre of the scores moves faster than their spread. So the centre is followed with a short memory, and the
    quantile is taken over the residuals.
    """

    def __init__(self, confidence: float) -> None:
        self._miss = PRUDENCE * (1 - confidence)
        self._level_miss = self._miss
        # Scores minus the centre at their time.
        self._residuals: list[float] = []
        self._sum = self._weight = 0.0
        own = ((np.arange(400) + 0.5) / 400).tolist()
        self._own: Floats = np.array([_NORMAL.inv_cdf(each) for each in own])

    @property
    def centre(self) -> float:
        """The recent centre of the outcomes' deviates; 0 if the forecast is right."""
        return self._sum / (self._weight + CENTRE_PRIOR)

    @property
    def deviate(self) -> float:
        """The deviate that the next window's reservation should cover."""
        past = np.array(self._residuals)
        age = np.arange(len(past))[::-1]
        weight = np.concatenate([0.5 ** (age / HALF_LIFE), np.full(len(self._own), TRUSTED / len(self._own))])
        values = np.concatenate([past, self._own])
        order = np.argsort(values)
        above = np.cumsum(weight[order][::-1])[::-1]
        # The coming window's score counts as above all others: the finite-sample correction.
        allowed = self._level_miss * (weight.sum() + 1) - 1
        place = int(np.searchsorted(-above, -max(allowed, 0.0), side="left"))
        return self.centre + float(values[order][min(place, len(values) - 1)])

    def learn(self, forecast: Floats, came: int, *, covered: bool) -> None:
        """Learn from a window: its forecast, its outcome, and whether the reservation covered it."""
        self._residuals.append(score(forecast, came) - self.centre)
        if len(self._residuals) > MAX_SCORES:
            del self._residuals[0]
        kept = max(min(middle(forecast, came), CENTRE_REACH), -CENTRE_REACH)
        self._sum, self._weight = self._sum * CENTRE_KEEP + kept, self._weight * CENTRE_KEEP + 1
        self._level_miss += STEP * self._miss * (self._miss - (0.0 if covered else 1.0))
        self._level_miss = min(max(self._level_miss, self._miss / 8), self._miss * 2)
