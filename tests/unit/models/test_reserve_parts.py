"""Tests of the parts of the forecast: hazards, laws of arrival, common factors and calibration."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.lab.models.backtest import Holder
from libs.policy.reserve.arrivals import LAWS, POISSON_LAWS, ArrivalLaws, WindowArrivals, shrunk_rates
from libs.policy.reserve.counts import (
    Calibrator,
    CommonRate,
    HazardTable,
    normal_miss,
    not_passed,
    score,
    sum_distribution,
)

MINUTE_S = 60.0


def gaps_to_times(rng, cv, rate_per_s, seconds):
    shape = 1 / (cv * cv)
    at_s = np.cumsum(rng.gamma(shape, 1 / (rate_per_s * shape), int(2 * rate_per_s * seconds) + 200))
    return at_s[at_s < seconds]


def learned(times, seconds):
    """Return the laws of models with these arrivals, after that long."""
    laws = ArrivalLaws(MINUTE_S / 16)
    laws.grow(len(times), 0.0)
    for begin_s in np.arange(0.0, seconds, MINUTE_S).tolist():
        parts = [each[(each >= begin_s) & (each < begin_s + MINUTE_S)] for each in times]
        model = np.repeat(np.arange(len(times)), [len(each) for each in parts])
        laws.learn(begin_s, begin_s + MINUTE_S, WindowArrivals(np.concatenate(parts), model), 1.0)
        laws.refresh()
    return laws


@pytest.mark.parametrize(("cv", "is_poisson"), [(1.0, True), (4.0, False)])
def test_the_law_of_arrival_with_the_best_past_predictions_is_chosen(cv, is_poisson):
    rng = np.random.default_rng(3)
    laws = learned([gaps_to_times(rng, cv, 0.02, 6 * 3600) for _ in range(8)], 6 * 3600)
    assert all((place < POISSON_LAWS) == is_poisson for place in laws.chosen.tolist()), [LAWS[i] for i in laws.chosen]


def test_a_renewal_law_is_calibrated_over_each_window():
    rng = np.random.default_rng(4)
    times = [gaps_to_times(rng, 4.0, 0.05, 8 * 3600) for _ in range(30)]
    laws = learned([each[each < 4 * 3600] for each in times], 4 * 3600)
    reported, came = 0.0, 0
    for begin_s in np.arange(4 * 3600, 8 * 3600, MINUTE_S).tolist():
        hazard = laws.hazards(begin_s, np.array([MINUTE_S]))[4, 0]
        reported += float(-np.expm1(-hazard).sum())
        parts = [each[(each >= begin_s) & (each < begin_s + MINUTE_S)] for each in times]
        came += sum(len(each) > 0 for each in parts)
        model = np.repeat(np.arange(len(times)), [len(each) for each in parts])
        laws.learn(begin_s, begin_s + MINUTE_S, WindowArrivals(np.concatenate(parts), model), 1.0)
    assert reported == pytest.approx(came, rel=0.1)


def test_a_new_model_is_assumed_to_be_like_the_others():
    rate = shrunk_rates(np.array([100.0, 120.0, 80.0, 0.0]), np.array([1e4, 1e4, 1e4, 1.0]))
    assert rate[3] == pytest.approx(0.01, rel=0.2)
    assert rate[0] == pytest.approx(0.01, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(1.0, 1e6)), min_size=1, max_size=20))
def test_a_pooled_rate_lies_between_the_models_own_and_that_of_the_others(seen):
    count, spent_s = np.array([float(each[0]) for each in seen]), np.array([each[1] for each in seen])
    own, mean = count / spent_s, (count.sum() + 0.5) / (spent_s.sum() + 1)
    found = shrunk_rates(count, spent_s)
    assert np.all(found >= np.minimum(own, mean) * (1 - 1e-9))
    assert np.all(found <= np.maximum(own, mean) * (1 + 1e-9))


def test_hazards_are_ends_over_time_spent():
    table = HazardTable(4.0, 1.0)
    table.grow(1)
    rng = np.random.default_rng(6)
    lengths = rng.exponential(20.0, 20_000)
    table.learn(np.zeros(len(lengths), dtype=np.int64), np.zeros(len(lengths)), lengths, np.ones(len(lengths)))
    table.refresh()
    left = np.exp(-table.cumulative(np.zeros(3, dtype=np.int64), np.array([5.0, 20.0, 60.0])))
    assert left == pytest.approx(np.exp([-0.25, -1.0, -3.0]), abs=0.02)


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_cumulative_hazard_never_falls(one, other):
    table = HazardTable(4.0, 1.0)
    table.grow(1)
    table.learn(np.zeros(2, dtype=np.int64), np.zeros(2), np.array([3.0, 700.0]), np.ones(2))
    table.refresh()
    low, high = sorted((one, other))
    model = np.zeros(1, dtype=np.int64)
    assert table.cumulative(model, np.array([low]))[0] <= table.cumulative(model, np.array([high]))[0] + 1e-12


def followed(factors, seed):
    """A filter that has seen 60 models of 1 expected request each under these factors, a window each."""
    rng, rate = np.random.default_rng(seed), CommonRate()
    for factor in factors:
        rate.learn(np.ones(60), rng.poisson(factor, 60).astype(float), np.ones(60, dtype=bool))
    return rate


def test_no_common_factor_is_found_if_there_is_none():
    assert followed(np.ones(400), 1).setting is None


def test_a_common_factor_is_found_and_followed():
    rate = followed(np.append(np.tile(np.repeat([0.5, 1.5], 30), 6), np.full(20, 1.6)), 2)
    assert rate.setting is not None
    values, chances = rate.ahead()
    assert values @ chances == pytest.approx(1.6, rel=0.25)


def test_independent_bursts_are_not_a_common_factor():
    """Each model has its own hazard in each window; only whether it was requested counts."""
    rng, rate = np.random.default_rng(3), CommonRate()
    for _ in range(400):
        hazard = rng.gamma(0.2, 5.0, 60) + 1e-9
        rate.learn(hazard, 40.0 * (rng.random(60) < -np.expm1(-hazard)), np.zeros(60, dtype=bool))
    assert rate.setting is None


def covered(calibrator, forecast, came):
    hit = 0
    for place, number in enumerate(came):
        reserved = not_passed(forecast, normal_miss(calibrator.deviate))
        hit += (number <= reserved) * (place >= len(came) // 3)
        calibrator.learn(forecast, int(number), covered=bool(number <= reserved))
    return hit / (len(came) - len(came) // 3)


FORECAST = sum_distribution(np.full((1, 100), 0.4), np.ones(100, dtype=np.int64))[0]


@pytest.mark.parametrize(("mean", "spread"), [(40, 5), (40, 10), (55, 5), (28, 3)])
def test_a_wrong_forecast_is_calibrated_to_its_nominal_coverage(mean, spread):
    came = np.clip(np.rint(np.random.default_rng(7).normal(mean, spread, 6000)), 0, 100)
    assert 0.985 <= covered(Calibrator(0.99), FORECAST, came) <= 0.999


def test_calibration_follows_a_change_of_the_law():
    rng = np.random.default_rng(8)
    came = np.clip(np.rint(np.concatenate([rng.normal(40, 5, 3000), rng.normal(60, 9, 6000)])), 0, 100)
    assert covered(Calibrator(0.99), FORECAST, came) >= 0.985


def test_a_forecast_of_mostly_zeros_is_calibrated_without_a_large_reserve():
    """Windows without arrivals are at the very end of every forecast."""
    rng, seldom = np.random.default_rng(11), sum_distribution(np.full((1, 40), 0.02), np.ones(40, dtype=np.int64))[0]
    came = rng.poisson(0.4, 6000) * (rng.random(6000) < 0.5)
    assert 0.985 <= covered(calibrator := Calibrator(0.99), seldom, came) <= 0.999
    assert not_passed(seldom, normal_miss(calibrator.deviate)) <= 3


@given(st.integers(0, 100), st.floats(-8.0, 20.0))
def test_a_reservation_covers_arrivals_exactly_if_its_deviate_exceeds_the_score(came, deviate):
    found = score(FORECAST, came)
    if abs(found - deviate) > 1e-6:
        assert (came <= not_passed(FORECAST, normal_miss(deviate))) == (deviate > found)


def test_a_held_reservation_is_constant_within_its_period_and_covers():
    rng, holder = np.random.default_rng(9), Holder(0.99, 30)
    reserved, came = [], np.clip(np.rint(rng.normal(44, 6, 6000)), 0, 100)
    for number in came:
        reserved.append(holder.reserve(FORECAST))
        holder.learn(float(number))
    assert all(len(set(reserved[begin : begin + 30])) == 1 for begin in range(0, 6000, 30))
    assert np.mean(came[2000:] <= np.array(reserved[2000:])) >= 0.985
