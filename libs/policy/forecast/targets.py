"""The simple forecasts of a series, which `libs.policy.forecast.blend` weights.

All are logarithms and use only the origin's bin and earlier ones.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
LEAST_DROP: Final = 1.1
"""The fall below the day before, in logarithms, from which demand may be in an incident: to a third."""
DROP_OVER_USUAL: Final = 4.0
"""The least ratio of an incident's fall to the usual change from day to day."""
EDGE_S: Final = 1800.0
"""The time before and after the start of an incident within which demand itself falls."""
INCIDENT_S: Final = 21_600.0
"""The longest incident; what stays low for longer may be a holiday or the end of demand."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The simple forecasts of one series for all origins."""

    log: Floats
    smooth: Floats
    past: "PastDemand"
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


@dataclass(frozen=True, slots=True)
class PastDemand:
    """A smoothed series, and the same as it would have been without incidents."""

    smooth: Floats
    repaired: Floats
    ended: NDArray[np.int64]
    """For each bin of an incident the first bin after it, in which demand was back; beyond the series otherwise."""

    def seen_from(self, first: int, back: int) -> Floats:
        """Return the values `back` bins before each origin from `first` on, without incidents that ended by then."""
        bins = slice(first - back, len(self.smooth) - back)
        if self.repaired is self.smooth:
            return self.smooth[bins]
        origins = np.arange(first, len(self.smooth))
        return np.where(self.ended[bins] <= origins, self.repaired[bins], self.smooth[bins])


def past_demand(smooth: Floats, day: int, step_s: float) -> PastDemand:
    """Find incidents: sudden falls far below the day before from which demand returns within `INCIDENT_S`.

    Their bins take the values of the day before. A fall that recurs on the next day is no incident then. `day` is in
    bins, 0 if no day is known.
    """
    count = len(smooth)
    repaired, ended = smooth, np.full(count, count, np.int64)
    if not 1 < day < count:
        return PastDemand(smooth, repaired, ended)
    change = smooth[day:] - smooth[:-day]
    # The usual change is that before each bin, so that later bins leave an incident as it was found.
    usual = np.append(np.inf, np.cumsum(np.abs(change)) / np.arange(1, len(change) + 1))[:-1]
    usual[: day // 4] = np.inf
    least = np.maximum(LEAST_DROP, DROP_OVER_USUAL * usual)
    at, edge = 0, max(round(EDGE_S / step_s), 1)
    for start in np.flatnonzero(change < -least).tolist():
        if start < at:
            continue
        back = np.flatnonzero(change[start:] >= -least[start] / 2)
        at = start + int(back[0]) if len(back) else len(change)
        # Usual demand is as far below that of a day before with a burst, but does not fall itself.
        around = smooth[start + day - edge : min(start + edge, at) + day + 1]
        fell = around[0] - around.min() >= least[start] / 2
        if fell and len(back) and (at - start) * step_s <= INCIDENT_S:
            if repaired is smooth:
                repaired = smooth.copy()
            repaired[start + day : at + day] = repaired[start:at]
            ended[start + day : at + day] = at + day
    return PastDemand(smooth, repaired, ended)


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
    past = past_demand(smooth, seasons[0] if seasons else 0, step_s)
    return Targets(log, smooth, past, np.stack(levels, axis=1), tuple(seasons), tuple(names))


def _seasonal(targets: Targets, season: int, horizon: int, start: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the value a season ago, its weighted mean over seasons, today's level, and the present value moved as a
    season ago.

    Without an earlier season, today's level replaces each.
    """
    log, smooth, past = targets.log, targets.smooth, targets.past
    count = len(smooth)
    today, now_log = smooth[start:], log[start:]
    first = -(-horizon // season)
    total, moved, weights, moved_weights = (np.zeros(count - start) for _ in range(4))
    for back in range(first, first + DAYS_BACK):
        weight, ahead = FADE ** (back - first), horizon - back * season
        lo = min(max(start, -ahead), count)  # the first origin whose bin a season ago is known
        total[lo - start :] += weight * past.seen_from(lo, -ahead)
        weights[lo - start :] += weight
        lo = min(max(start, back * season), count)
        moved[lo - start :] += weight * (past.seen_from(lo, -ahead) - past.seen_from(lo, back * season))
        moved_weights[lo - start :] += weight
    ago, back = today.copy(), first * season - horizon
    lo = min(max(start, back), count)
    ago[lo - start :] = past.seen_from(lo, back)
    profile = np.where(weights > 0, total / np.maximum(weights, 1e-9), today)
    moved /= np.maximum(moved_weights, 1e-9)
    return ago, profile, today + moved, now_log + moved
