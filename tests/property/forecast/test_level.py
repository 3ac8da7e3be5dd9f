"""Forecasts far ahead follow a level that has moved for good, and nothing else moves them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.forecast.history import Floats
from libs.policy.forecast.level import LevelMove

DAY, STEP_S = 144, 600.0
shapes = st.lists(st.floats(-2, 2), min_size=1, max_size=12)


def _season(shape: list[float], days: float) -> Floats:
    """Return days that are all the same, in logarithms."""
    hours = np.repeat(shape, -(-DAY // len(shape)))[:DAY]
    return np.asarray(np.resize(hours, int(days * DAY)))


def _level(log: Floats) -> LevelMove:
    return LevelMove.of(log, log, STEP_S, DAY)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8 * DAY), st.sampled_from([72, 144, 300]), st.floats(0.01, 0.5))
def test_a_move_depends_on_no_later_bin(seed: int, end: int, horizon: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    log = np.cumsum(rng.normal(0, size, 8 * DAY))
    forecasts = rng.normal(0, 1, len(log))
    whole, part = _level(log).moved(forecasts, horizon, 0), _level(log[:end]).moved(forecasts[:end], horizon, 0)
    assert whole[:end] == pytest.approx(part, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(shapes, st.floats(1, 9), st.sampled_from([1, 72, 144, 300]))
def test_days_that_are_all_the_same_move_no_forecast(shape: list[float], days: float, horizon: int) -> None:
    log = _season(shape, days)
    assert _level(log).moved(log + 1.0, horizon, 0) == pytest.approx(log + 1.0)


@settings(max_examples=40, deadline=None)
@given(shapes, st.floats(0.4, 3), st.sampled_from([-1, 1]), st.sampled_from([72, 100, 144]))
def test_forecasts_far_ahead_reach_a_new_level_within_half_a_day(
    shape: list[float], size: float, sign: int, horizon: int
) -> None:
    """The forecast that is moved still expects the season of the old level, and its outcome is known a day later."""
    season, step = _season(shape, 10), int(6.3 * DAY)
    log = season + np.where(np.arange(len(season)) >= step, sign * size, 0.0)
    old = np.roll(season, -horizon % -DAY)
    moved = (_level(log).moved(old, horizon, 0) - old) * sign
    assert not moved[:step].any()
    assert moved[step + 72] > 0.8 * size
    # A day after the step its mean distance still has hours in which the profile was the old one.
    assert np.all(
        (0.65 * size < moved[step + 72 : step + DAY + 72]) & (moved[step + 72 : step + DAY + 72] < 1.2 * size)
    )


@settings(max_examples=20, deadline=None)
@given(shapes, st.floats(0.4, 3), st.one_of(st.integers(1, 36), st.integers(288, 600)))
def test_forecasts_of_the_next_hours_and_beyond_two_days_stay(shape: list[float], size: float, horizon: int) -> None:
    season = _season(shape, 8)
    log = season + np.where(np.arange(len(season)) >= 6 * DAY, size, 0.0)
    assert np.array_equal(_level(log).moved(season, horizon, 0), season)


@given(st.integers(0, 3 * DAY - 1), st.integers(0, 2**31))
def test_nothing_moves_within_three_days(bins: int, seed: int) -> None:
    """What is usual is not known by then."""
    log = np.random.default_rng(seed).normal(0, 1, bins)
    assert not _level(log).share.any()


def test_a_series_without_a_season_of_a_day_is_not_moved() -> None:
    forecasts = np.arange(5.0)
    assert LevelMove.of(np.zeros(5), np.zeros(5), 86_400.0, 0).moved(forecasts, 7, 0) is forecasts
