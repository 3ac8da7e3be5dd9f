"""Properties of quantiles of actual over predicted times: their coverage, also when the load changes."""

from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.policy.ratios import LEAST_ANSWERS, LEVELS, Ratios

S = 1_000_000_000


def test_no_quantile_is_known_before_some_answers_have_arrived() -> None:
    ratios = Ratios()
    for _ in range(LEAST_ANSWERS - 1):
        ratios.add(S, S)
    assert ratios.quantile(0.9) is None
    ratios.add(S, S)
    assert ratios.quantile(0.9) == pytest.approx(1.0, rel=0.1)


@settings(max_examples=25)
@given(st.integers(0, 1 << 30), st.floats(0.05, 0.8), st.floats(-1, 1))
def test_each_quantile_covers_its_share(seed: int, spread: float, off: float) -> None:
    ratios, covered, reported, random = Ratios(), dict.fromkeys(LEVELS, 0), 0, Random(seed)
    for _ in range(2000):
        actual = exp(random.gauss(off, spread))
        bounds = {level: ratios.quantile(level) for level in LEVELS}
        if None not in bounds.values():
            reported += 1
            for level, bound in bounds.items():
                covered[level] += actual <= (bound or 0.0)
        ratios.add(S, actual * S)
    for level in LEVELS:
        assert covered[level] / reported == pytest.approx(level, abs=0.05)


@settings(max_examples=10)
@given(st.integers(0, 1 << 30))
def test_coverage_recovers_after_predictions_become_wrong(seed: int) -> None:
    """After every 400 answers the same predictions are off by twice as much, or half."""
    ratios, covered, reported, random = Ratios(), dict.fromkeys(LEVELS, 0), 0, Random(seed)
    for number in range(4000):
        actual = exp(random.gauss(0.0, 0.2)) * (2.0 if number // 400 % 2 else 1.0)
        for level in LEVELS:
            bound = ratios.quantile(level)
            covered[level] += bound is not None and actual <= bound
        reported += ratios.quantile(0.5) is not None
        ratios.add(S, actual * S)
    for level in LEVELS:
        assert covered[level] / reported == pytest.approx(level, abs=0.1)


@given(st.lists(st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=200))
def test_quantiles_rise_with_their_level_and_stay_finite(pairs: list[tuple[float, float]]) -> None:
    ratios = Ratios()
    for predicted, actual in pairs:
        ratios.add(predicted, actual)
    found = [ratios.quantile(level) for level in (0.1, 0.3, 0.7, 0.95)]
    if None not in found:
        assert found == sorted(found) and 0 < found[0] <= found[-1] < 1e3  # type: ignore[operator, type-var]
