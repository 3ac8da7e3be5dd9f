"""Properties of reconciled forecasts, whose parts add up to their totals."""

from fractions import Fraction
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import Floats
from libs.policy.forecast.reconcile import MEDIAN, reconcile, share_out

HORIZONS = 3


@st.composite
def forecasts(draw: st.DrawFn, *, most: int = 7) -> Floats:
    """Draw quantiles of series: zeros, sporadic ones, narrow bands, sizes from a thousandth to a billion."""
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.sampled_from([0.0, 1e-3, 0.7, 300.0, 1e9]), min_size=count, max_size=count))
    spread = draw(st.sampled_from([0.0, 1e-6, 0.3, 2.0]))
    drawn = np.sort(np.exp(spread * rng.normal(0, 1, (count, HORIZONS, len(LEVELS)))), axis=2)
    found = drawn * np.array(sizes)[:, None, None]
    if draw(st.booleans()):
        found[:, :, : MEDIAN + 1] = 0.0
    return np.asarray(found)


@settings(max_examples=200, deadline=None)
@given(forecasts(most=1), forecasts())
def test_medians_of_parts_add_up_to_the_total_to_the_last_digit(total: Floats, parts: Floats) -> None:
    whole, each = reconcile(total[0], parts)
    shared = share_out(total[0], parts)
    for wanted, found in ((whole, each), (total[0], shared)):
        for horizon in range(HORIZONS):
            medians = found[:, horizon, MEDIAN].tolist()
            assert sum(map(Fraction, medians)) == Fraction(float(wanted[horizon, MEDIAN]))
            assert all(sum(order) == wanted[horizon, MEDIAN] for order in list(permutations(medians))[:24])


@settings(max_examples=200, deadline=None)
@given(forecasts(most=1), forecasts())
def test_quantiles_stay_numbers_sorted_and_not_negative(total: Floats, parts: Floats) -> None:
    whole, each = reconcile(total[0], parts)
    for found in (whole[None], each, share_out(total[0], parts)):
        assert np.isfinite(found).all()
        assert (found >= 0).all()
        assert (np.diff(found, axis=2) >= 0).all()


@settings(max_examples=100, deadline=None)
@given(forecasts(most=1), forecasts())
def test_a_total_lies_between_its_own_forecast_and_the_sum_of_its_parts(total: Floats, parts: Floats) -> None:
    whole, _ = reconcile(total[0], parts)
    sums, own = parts[:, :, MEDIAN].sum(axis=0), total[0][:, MEDIAN]
    slack = 1e-9 * (1e-9 + sums + own + total[0][:, -1])
    assert (whole[:, MEDIAN] >= np.minimum(sums, own) - slack).all()
    assert (whole[:, MEDIAN] <= np.maximum(sums, own) + slack).all()


@settings(max_examples=100, deadline=None)
@given(forecasts())
def test_consistent_forecasts_are_unchanged(parts: Floats) -> None:
    total = parts.sum(axis=0)
    whole, each = reconcile(total, parts)
    size = 1e-9 * (1e-9 + total[:, -1])
    assert np.all(np.abs(whole[:, MEDIAN] - total[:, MEDIAN]) <= size)
    assert np.all(np.abs(each[:, :, MEDIAN] - parts[:, :, MEDIAN]) <= size)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.2, 1.0, 3.0]))
def test_the_error_of_the_total_is_not_larger_if_errors_are_independent(seed: int, ratio: float) -> None:
    """Draw unbiased forecasts with errors as wide as their bands say, and compare the total's mean squared errors."""
    rng, parts, trials = np.random.default_rng(seed), 4, 4000
    truth = rng.uniform(50, 100, (parts, trials))
    normal = np.array([-1.645, -1.282, -0.674, 0.0, 0.674, 1.282, 1.645])
    deviations = rng.uniform(1, 4, parts)
    own = ratio * float(np.sqrt((deviations**2).sum()))

    def around(centre: Floats, deviation: float) -> Floats:
        return np.asarray((centre + rng.normal(0, deviation, trials))[:, None] + deviation * normal)

    said = np.stack([around(truth[at], float(deviations[at])) for at in range(parts)])
    total = around(truth.sum(axis=0), own)
    whole, _ = reconcile(total, said)
    errors = [float(((each[:, MEDIAN] - truth.sum(axis=0)) ** 2).mean()) for each in (whole, total)]
    assert errors[0] <= errors[1]
