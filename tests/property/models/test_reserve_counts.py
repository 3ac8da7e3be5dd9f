"""Properties of distributions of the GPUs that active models need."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.reserve.counts import RARE, gpu_units, mean_of, quantile, sum_distribution

CHANCES = st.lists(st.floats(RARE, 1.0), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.floats(RARE, 1.0), st.integers(1, 4)), min_size=1, max_size=8))
def test_a_distribution_equals_the_count_of_all_cases(models):
    chances, units = np.array([each[0] for each in models]), np.array([each[1] for each in models])
    expected = np.zeros(int(units.sum()) + 1)
    for active in product((0, 1), repeat=len(models)):
        on = np.array(active, dtype=bool)
        expected[int(units[on].sum())] += float(np.prod(np.where(on, chances, 1 - chances)))
    assert sum_distribution(chances[None, :], units)[0] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60), st.integers(1, 3))
def test_a_distribution_adds_up_to_one_and_to_the_sum_of_its_parts(chances, unit):
    found = sum_distribution(np.array([chances]), np.full(len(chances), unit))[0]
    assert found.sum() == pytest.approx(1.0, abs=1e-9)
    assert mean_of(found) == pytest.approx(unit * sum(chances), abs=1e-6)
    assert found.min() >= 0


@given(CHANCES, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_a_higher_level_never_needs_fewer_gpus(chances, one, other):
    found = sum_distribution(np.array([chances]), np.ones(len(chances), dtype=np.int64))[0]
    low, high = sorted((one, other))
    assert quantile(found, low) <= quantile(found, high)


@given(st.lists(st.floats(0.0, RARE / 2), min_size=1, max_size=200))
def test_pooling_rare_models_moves_no_probability_by_more_than_le_cams_bound(chances):
    plain = np.ones(1)
    for chance in chances:
        plain = np.convolve(plain, [1 - chance, chance])
    found = sum_distribution(np.array([chances]), np.ones(len(chances), dtype=np.int64))[0]
    size = max(len(plain), len(found))
    apart = np.abs(np.pad(plain, (0, size - len(plain))) - np.pad(found, (0, size - len(found)))).sum()
    assert apart / 2 <= sum(chance * chance for chance in chances) + 1e-9


@given(st.lists(st.sampled_from([0.125, 0.25, 0.3, 0.5, 1.0, 2.0, 8.0]), min_size=1, max_size=10))
def test_sizes_in_units_are_never_rounded_down(sizes):
    gpus = np.array(sizes)
    units, unit = gpu_units(gpus)
    assert np.all(units * unit >= gpus - 1e-9)
    assert np.all(units * unit < gpus + 1 / 8)
