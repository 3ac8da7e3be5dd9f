"""Where a series may be in h bins: levels at many time scales, seasons, and arrivals that go back to normal. Pure.

All in logarithms, each from the origin's bin and earlier ones alone. A forecast is a convex combination of these
(`libs.policy.forecast.blend`), so that it stays near what was seen, or what a season says.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.forecast.history import Floats
from libs.policy.forecast.levels import running_means

HALF_LIVES_S: Final = (300.0, 600.0, 1800.0, 5400.0, 18_000.0, 60_000.0, 180_000.0)
"""Of the levels: minutes to days. From little to much averaging, so that bursts fade and shifts stay."""
DRIVER_HALF_LIVES_S: Final = (5400.0, 18_000.0, 120_000.0)
"""Levels to which arrivals go back while the tokens per request stay as they are."""
DAY_S: Final = 86_400.0
WEEK_S: Final = 604_800.0
DAYS_BACK: Final = 6
"""Days in a day's profile, and weeks in a week's."""
FADE: Final = 0.8
"""Weight of a day in the profile against that of the day after it."""
SEASON_LEVEL_S: Final = 600.0
"""Half-life of what is taken for a past day's value at a time: its neighbours' noise is averaged out."""
_LEVEL_CENTRE: Final = 0.5
_LEVEL_SPREAD: Final = 1.5
"""Standard deviation, in logarithms, of the prior of half-lives around half the horizon: the longer the horizon, the
slower the level that predicts it."""
_OTHER_PRIOR: Final = 0.05


@dataclass(frozen=True, slots=True)
class Targets:
    """Candidates for each horizon and origin."""

    values: Floats
    """[horizons, n, targets] Logarithms."""
    names: tuple[str, ...]
    prior: Floats
    """[horizons, targets] Weights before any evidence, of sum 1."""


def make_targets(log: Floats, driver: Floats | None, horizons: tuple[int, ...], step_s: float, fitted: int) -> Targets:
    """Make targets of a series without unknown bins; seasons are those of which its first `fitted` bins saw more than
    one.

    driver: the logarithm of arrivals, where the series is their tokens.
    """
    half_lives = np.array([each for each in HALF_LIVES_S if each >= 0.4 * step_s] or [HALF_LIVES_S[-1]])
    levels = [log, *running_means(log, half_lives / step_s)]
    names = ["now", *(f"level {each:g} s" for each in half_lives)]
    # Only a part of the way that a trend would lead, at any horizon: how far is the blend's to learn.
    quick, quicker = running_means(log, np.array([1800.0, max(600.0, step_s / 2)]) / step_s)
    levels += [2 * quicker - quick, 2 * log - quicker]
    names += ["trend of an hour", "trend of some minutes"]
    if driver is not None:
        slow = np.array([each for each in DRIVER_HALF_LIVES_S if each > step_s])
        means = running_means(driver, np.array([max(600.0, step_s), *slow]) / step_s)
        recent = running_means(log, np.array([max(600.0 / step_s, 0.5)]))[0]
        levels += [recent + mean - means[0] for mean in means[1:]]
        names += [f"arrivals to {each:g} s" for each in slow]
    seasons = [round(each / step_s) for each in (DAY_S, WEEK_S) if fitted * step_s > 1.1 * each]
    seasons = [season for season in seasons if season > 1]
    smooth = running_means(log, np.array([max(SEASON_LEVEL_S / step_s, 0.5)]))[0]
    rows = []
    for horizon in horizons:
        found = [each for season in seasons for each in _seasonal(log, smooth, season, horizon)]
        rows.append(np.stack([*levels, *found], axis=1))
    for season in seasons:
        span = f"{season * step_s:g} s"
        names += [f"{span} ago", f"profile of {span}", f"level, moved as in {span}", f"now, moved as in {span}"]
    timed = np.array([max(step_s / 4, 1.0), *half_lives])
    prior = np.full((len(horizons), len(names)), _OTHER_PRIOR)
    for row, horizon in zip(prior, horizons, strict=True):
        row[: len(timed)] = np.exp(-0.5 * (np.log(timed / (_LEVEL_CENTRE * horizon * step_s)) / _LEVEL_SPREAD) ** 2)
    return Targets(np.stack(rows), tuple(names), prior / prior.sum(axis=1, keepdims=True))


def _seasonal(log: Floats, smooth: Floats, season: int, horizon: int) -> tuple[Floats, Floats, Floats, Floats]:
    """The same time a season ago, its weighted mean over seasons, and today's level, and now, moved as then.

    Where there is no earlier season yet, the level of now stands for each.
    """
    places = np.arange(len(smooth))
    first = -(-horizon // season)
    total, moved, weights, moved_weights = (np.zeros(len(smooth)) for _ in range(4))
    for back in range(first, first + DAYS_BACK):
        weight = FADE ** (back - first)
        then, now = places + horizon - back * season, places - back * season
        seen = then >= 0
        total[seen] += weight * smooth[then[seen]]
        weights[seen] += weight
        both = now >= 0
        moved[both] += weight * (smooth[then[both]] - smooth[now[both]])
        moved_weights[both] += weight
    last = places + horizon - first * season
    ago = np.where(last >= 0, smooth[np.maximum(last, 0)], smooth)
    profile = np.where(weights > 0, total / np.maximum(weights, 1e-9), smooth)
    moved /= np.maximum(moved_weights, 1e-9)
    return ago, profile, smooth + moved, log + moved
