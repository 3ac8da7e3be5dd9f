"""How far a forecast's quantile has to be moved so that it is passed as seldom as it says. Pure.

Each window gives a score: the normal deviate up to which the forecast, before the window, put less than what came. The
deviate to ask for next is where what came has lain of late, plus a quantile of how far scores strayed from that (split
conformal), recent ones counting more, at a level that moves with what was covered (adaptive conformal inference: Gibbs
and Candès 2021). Nothing is assumed of the forecast.
"""

from math import erfc, sqrt
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
PRUDENCE: Final = 0.8
"""Of the misses that are allowed, what is aimed at: a log is finite, and its misses scatter around the aim."""
STEP: Final = 0.5
"""Of the allowed misses, by which a miss lowers the level that is asked for."""
CENTRE_KEEP: Final = 0.985
"""Per window, of where scores lie: half is forgotten in 46."""
CENTRE_PRIOR: Final = 10.0
"""Scores at 0 that are counted beside."""
CENTRE_REACH: Final = 10.0
"""Beyond which a score is as far out as any."""
LEAST: Final = 1e-250
EXTREME: Final = 33.0
"""The deviate of what the forecast holds to be less likely than `LEAST`."""
_NORMAL: Final = NormalDist()


def score(distribution: Floats, came: int) -> float:
    """The deviate below which the distribution has less than `came`; one that is larger covers it."""
    return _deviate(float(distribution[:came].sum()), float(distribution[came:].sum()))


def middle(distribution: Floats, came: int) -> float:
    """The deviate of `came` itself, half of whose probability lies to either side: 0 on average if the forecast is
    right, however coarse it is."""
    half = float(distribution[came]) / 2 if came < len(distribution) else 0.0
    return _deviate(float(distribution[:came].sum()) + half, float(distribution[came + 1 :].sum()) + half)


def _deviate(below: float, above: float) -> float:
    if below <= LEAST:
        return -EXTREME
    if above <= LEAST:
        return EXTREME
    return _NORMAL.inv_cdf(below) if below < above else -_NORMAL.inv_cdf(above)


def normal_miss(deviate: float) -> float:
    """The probability beyond a deviate, exact far out."""
    return erfc(deviate / sqrt(2)) / 2


class Calibrator:
    """Tracks the deviate for one confidence.

    Where scores lie on average moves faster than how far they spread: the first is followed with a short memory, the
    quantile is one of what is left.
    """

    def __init__(self, confidence: float) -> None:
        self._miss = PRUDENCE * (1 - confidence)
        self._level_miss = self._miss
        self._left: list[float] = []
        """Scores less where they were expected."""
        self._sum = self._weight = 0.0
        own = ((np.arange(400) + 0.5) / 400).tolist()
        self._own: Floats = np.array([_NORMAL.inv_cdf(each) for each in own])

    @property
    def centre(self) -> float:
        """Where what came has lain of late; 0 is where it would if the forecast were right."""
        return self._sum / (self._weight + CENTRE_PRIOR)

    @property
    def deviate(self) -> float:
        """To be covered in the next window."""
        past = np.array(self._left)
        age = np.arange(len(past))[::-1]
        weight = np.concatenate([0.5 ** (age / HALF_LIFE), np.full(len(self._own), TRUSTED / len(self._own))])
        values = np.concatenate([past, self._own])
        order = np.argsort(values)
        above = np.cumsum(weight[order][::-1])[::-1]
        # One more score, that of the window to come, counts as above all others: the finite-sample correction.
        allowed = self._level_miss * (weight.sum() + 1) - 1
        place = int(np.searchsorted(-above, -max(allowed, 0.0), side="left"))
        return self.centre + float(values[order][min(place, len(values) - 1)])

    def learn(self, forecast: Floats, came: int, *, covered: bool) -> None:
        """A window has passed: what had been forecast of it, what came, whether what was asked for covered it."""
        self._left.append(score(forecast, came) - self.centre)
        if len(self._left) > MOST:
            del self._left[0]
        kept = max(min(middle(forecast, came), CENTRE_REACH), -CENTRE_REACH)
        self._sum, self._weight = self._sum * CENTRE_KEEP + kept, self._weight * CENTRE_KEEP + 1
        self._level_miss += STEP * self._miss * (self._miss - (0.0 if covered else 1.0))
        self._level_miss = min(max(self._level_miss, self._miss / 8), self._miss * 2)
