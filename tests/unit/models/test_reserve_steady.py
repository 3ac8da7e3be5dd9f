"""Tests of the number of active models in the long run against textbooks and Aegaeon's paper."""

import numpy as np
import pytest

from libs.policy.reserve.counts import (
    gamma_active,
    gamma_cdf,
    mean_of,
    poisson_active,
    quantile,
    renewal_active,
    sum_distribution,
)

MODELS, RATE_PER_S, RUN_S = 100, 0.037, 16.79
ONES = np.ones(MODELS, dtype=np.int64)


def test_a_hundred_poisson_models_have_46_active_at_a_time_and_58_at_p99():
    found = sum_distribution(poisson_active(np.full(MODELS, RATE_PER_S), np.full(MODELS, RUN_S))[None, :], ONES)[0]
    assert mean_of(found) == pytest.approx(46.3, abs=0.05)
    assert quantile(found, 0.99) == 58


@pytest.mark.parametrize(("cv", "active"), [(1.0, 46.27), (2.0, 34.6), (4.0, 21.0)])
def test_bursts_leave_fewer_models_active_at_the_same_rate(cv, active):
    """34.6 and 21.0 are simulated figures of finite logs: within 1 %."""
    assert MODELS * gamma_active(RATE_PER_S, cv, RUN_S) == pytest.approx(active, rel=0.011)


def test_rates_by_zipfs_law_leave_fewer_models_active():
    weight = 1 / np.arange(1, MODELS + 1)
    rates = MODELS * RATE_PER_S * weight / weight.sum()
    assert poisson_active(rates, np.full(MODELS, RUN_S)).sum() == pytest.approx(30.7, abs=0.05)


def test_the_gamma_distribution_is_the_exponential_one_at_shape_1():
    at = np.array([0.01, 0.5, 1.0, 5.0, 20.0])
    assert gamma_cdf(1.0, at) == pytest.approx(1 - np.exp(-at), abs=1e-12)


def test_activity_under_poisson_arrivals_depends_only_on_the_mean_run():
    """M/G/∞ knows only the mean: runs of one length give what exponential ones do."""
    fixed = renewal_active(
        lambda at: 1 - np.exp(-RATE_PER_S * at), 1 / RATE_PER_S, lambda at: (at >= RUN_S).astype(float), 4 * RUN_S
    )
    assert fixed == pytest.approx(float(poisson_active(np.array([RATE_PER_S]), np.array([RUN_S]))[0]), abs=2e-3)


def test_activity_under_gamma_arrivals_matches_a_simulation():
    rng = np.random.default_rng(5)
    at_s = np.cumsum(rng.gamma(0.25, 1 / (0.25 * RATE_PER_S), 400_000))
    end_s = np.maximum.accumulate(at_s + rng.exponential(RUN_S, len(at_s)))
    idle_s = np.maximum(at_s[1:] - end_s[:-1], 0).sum()
    assert gamma_active(RATE_PER_S, 2.0, RUN_S) == pytest.approx(1 - idle_s / (at_s[-1] - at_s[0]), abs=5e-3)
