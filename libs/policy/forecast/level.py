"""A level that has moved for good, seen before any error far ahead is known.

Errors a day ahead are known a day late. Until then a blend still trusts what was best before the move. But how far the
series is from its own profile is known at once. Where it has been further off for hours than is usual, a forecast far
ahead goes to the season of the days before, moved by as much. Shifting forecasts by recent errors is an intercept
correction (Clements and Hendry, Journal of Forecasting 15, 1996). All figures were chosen on the tuning half of `make
bench-forecast`, with other made and public series.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.forecast.history import Floats, running_means
from libs.policy.forecast.targets import DAYS_BACK, FADE

OFF_S: Final = 10_800.0
"""The half-life of the mean distance from the profile."""
# A forecast begins to move at this many times the usual distance, and has moved by the largest share at the second.
UNUSUAL: Final = (3.0, 6.0)
MOST_MOVED: Final = 0.9
MOVED_S: Final = (21_600.0, 43_200.0, 86_400.0, 172_800.0)
"""Forecasts are moved between the outer horizons, and fully between the inner ones.

Nearer ones know their own errors soon enough, and further ahead nothing was gained.
"""
# Distances count as usual from here on, when the profile has half a day, and until a day ago.
_FIRST_DAYS: Final = 1.5
_SMALL_OFF: Final = 0.02


@dataclass(frozen=True, slots=True)
class LevelMove:
    """The distance of a series from its profile, at all origins."""

    smooth: Floats
    day: int
    """The number of bins in a day; 0 if no daily season is known."""
    off: Floats
    """The mean distance of the last hours, in logarithms."""
    share: Floats
    """The share by which a forecast moves: 0 where the distance is usual."""
    step_s: float

    @classmethod
    def of(cls, log: Floats, smooth: Floats, step_s: float, day: int) -> "LevelMove":
        """Measure a series without unknown bins; `smooth` is the same series over some minutes."""
        nothing = np.zeros(len(log))
        if not day or len(log) <= day:
            return cls(smooth, 0, nothing, nothing, step_s)
        off = nothing.copy()
        off[day:] = running_means((log - _profile(smooth, day, 1, 0))[day:], np.array([OFF_S / step_s]))[0]
        return cls(smooth, day, off, _share(off, day), step_s)

    def moved(self, forecasts: Floats, horizon: int, first: int) -> Floats:
        """Return forecasts of the origins from `first` on, moved where the level is unusual."""
        share = self.share[first:] * float(np.interp(horizon * self.step_s, MOVED_S, (0.0, 1.0, 1.0, 0.0)))
        if not share.any():
            return forecasts
        # The days before the origin's own, at the time of day that is predicted. They are the base of `off` too.
        days = _profile(self.smooth, self.day, -(-horizon // self.day) + 1, horizon)[first:]
        return np.asarray(forecasts + share * (days + self.off[first:] - forecasts))


def _profile(smooth: Floats, day: int, back: int, ahead: int) -> Floats:
    """Return the weighted mean at the time of day `ahead` of each origin, from `back` days before it on.

    The origin's own value stands in where no such day is known.
    """
    count = len(smooth)
    total, weights = np.zeros(count), np.zeros(count)
    for number in range(DAYS_BACK):
        lag = (back + number) * day - ahead
        if lag < count:
            total[lag:] += FADE**number * smooth[: count - lag]
            weights[lag:] += FADE**number
    return np.where(weights > 0, total / np.maximum(weights, 1e-9), smooth)


def _share(off: Floats, day: int) -> Floats:
    count, first = len(off), int(_FIRST_DAYS * day)
    indices = np.arange(count)
    sizes = np.where(indices >= first, np.abs(off), 0.0)
    last = indices - day
    known = last >= 2 * day
    share = np.zeros(count)
    usual = np.cumsum(sizes)[last[known]] / (last[known] - first + 1)
    low, high = UNUSUAL
    share[known] = MOST_MOVED * np.clip((np.abs(off[known]) / (usual + _SMALL_OFF) - low) / (high - low), 0.0, 1.0)
    return share
