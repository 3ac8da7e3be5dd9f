"""The simple forecasts of a series, which `libs.policy.forecast.blend` weights.

All are logarithms and use only the origin's bin and earlier ones.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.forecast.history import DAY_S, WEEK_S, Floats, running_means

# Memories from minutes to days: bursts fade from the slow levels, and the quick ones soon follow shifts.
HALF_LIVES_S: Final = (300.0, 600.0, 1800.0, 5400.0, 18_000.0, 60_000.0, 180_000.0)
LENGTH_HALF_LIVES_S: Final = (3600.0, 86_400.0)
"""The memories of tokens per request, by which arrivals are multiplied."""
DAYS_BACK: Final = 6
"""The number of days in a daily profile, and of weeks in a weekly one."""
FADE: Final = 0.8
"""The weight of a day in the profile relative to the day after it."""
DAY_PROFILE: Final = "profile of a day"
SEASON_LEVEL_S: Final = 600.0
"""The half-life that smooths the value taken from a past season."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The simple forecasts of one series for all origins."""

    log: Floats
    smooth: Floats
    levels: Floats
    """The levels that are equal at every horizon, of shape [n, levels]; the first is the origin's bin."""
    seasons: tuple[int, ...]
    """The bins of each season that the history covers more than once."""
    names: tuple[str, ...]

    @property
    def profile(self) -> int:
        """The index of the profile of a day, or of the origin's bin if no day is known."""
        return self.names.index(DAY_PROFILE) if DAY_PROFILE in self.names else 0

    def at(self, horizon: int, first: int = 0) -> Floats:
        """Return the targets of the origins from `first` on, of shape [n - first, names]."""
        found = [each for season in self.seasons for each in _seasonal(self, season, horizon, first)]
        return np.concatenate([self.levels[first:], np.stack(found, axis=1)], axis=1) if found else self.levels[first:]


def make_targets(log: Floats, step_s: float, fitted: int) -> Targets:
    """Prepare the targets of a series without unknown bins, with the seasons that its first `fitted` bins show."""
    half_lives = np.array([each for each in HALF_LIVES_S if each >= 0.4 * step_s] or [HALF_LIVES_S[-1]])
    levels = [log, *running_means(log, half_lives / step_s)]
    names = ["now", *(f"level {each:g} s" for each in half_lives)]
    # A fraction of the trend, equal at every horizon; regressions decide how far it goes.
    quick, quicker = running_means(log, np.array([1800.0, max(600.0, step_s / 2)]) / step_s)
    levels += [2 * quicker - quick, 2 * log - quicker]
    names += ["trend of an hour", "trend of some minutes"]
    seasons = [round(each / step_s) for each in (DAY_S, WEEK_S) if fitted * step_s > 1.1 * each]
    seasons = [season for season in seasons if season > 1]
    for season in seasons:
        span = "a week" if season * step_s > 2 * DAY_S else "a day"
        names += [f"{span} ago", f"profile of {span}", f"level, moved as in {span}", f"now, moved as in {span}"]
    smooth = running_means(log, np.array([max(SEASON_LEVEL_S / step_s, 0.5)]))[0]
    return Targets(log, smooth, np.stack(levels, axis=1), tuple(seasons), tuple(names))


def _seasonal(targets: Targets, season: int, horizon: int, start: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the value a season ago, its weighted mean over seasons, today's level, and the present value moved as a
    season ago.

    Without an earlier season, today's level replaces each.
    """
    log, smooth = targets.log, targets.smooth
    count = len(smooth)
    today, now_log = smooth[start:], log[start:]
    first = -(-horizon // season)
    total, moved, weights, moved_weights = (np.zeros(count - start) for _ in range(4))
    for back in range(first, first + DAYS_BACK):
        weight, ahead = FADE ** (back - first), horizon - back * season
        lo = min(max(start, -ahead), count)  # the first origin whose bin a season ago is known
        total[lo - start :] += weight * smooth[lo + ahead : count + ahead]
        weights[lo - start :] += weight
        lo = min(max(start, back * season), count)
        then, now = smooth[lo + ahead : count + ahead], smooth[lo - back * season : count - back * season]
        moved[lo - start :] += weight * (then - now)
        moved_weights[lo - start :] += weight
    last = np.arange(start, count) + horizon - first * season
    ago = np.where(last >= 0, smooth[np.maximum(last, 0)], today)
    profile = np.where(weights > 0, total / np.maximum(weights, 1e-9), today)
    moved /= np.maximum(moved_weights, 1e-9)
    return ago, profile, today + moved, now_log + moved
