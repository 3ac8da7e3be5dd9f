"""Properties of a worker's slowness factor, which follows its answers but not their scatter."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.gateway.outlook import MAX_SLOWNESS, SLOWNESS_TOLERANCE, SLOWNESS_WINDOW, Slowness

S = 1_000_000_000


def answers(slowness: Slowness, times_as_slow: float, count: int, seed: int, spread: float = 0.15) -> None:
    """Enter answers, each predicted with the knowledge of its time."""
    random = Random(seed)
    for _ in range(count):
        slowness.answered(S * slowness.factor, S * times_as_slow * random.lognormvariate(0.0, spread))


@given(st.floats(1.5, MAX_SLOWNESS), st.integers(0, 1000))
def test_a_worker_slower_than_it_reports_is_detected_within_a_few_answers_and_later_forgiven(
    slow: float, seed: int
) -> None:
    slowness = Slowness()
    answers(slowness, slow, 3 * SLOWNESS_WINDOW, seed)
    assert slow / 1.4 <= slowness.factor <= slow * 1.4
    answers(slowness, 1.0, 6 * SLOWNESS_WINDOW, seed)
    assert slowness.factor <= SLOWNESS_TOLERANCE * 1.1


# Where it is slower by a tenth, such scatter as 0.15 passes the tolerance by chance.
@given(
    st.tuples(st.floats(0.3, 1.0), st.just(0.15)) | st.tuples(st.floats(1.0, 1.1), st.just(0.1)), st.integers(0, 1000)
)
def test_a_worker_as_fast_as_it_reports_or_faster_is_believed(pace: tuple[float, float], seed: int) -> None:
    fast, spread = pace
    slowness = Slowness()
    answers(slowness, fast, 10 * SLOWNESS_WINDOW, seed, spread)
    assert slowness.factor == pytest.approx(1.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(1, 1e13), st.floats(1, 1e13)), max_size=100))
def test_the_factor_always_stays_within_its_bounds(pairs: list[tuple[float, float]]) -> None:
    slowness = Slowness()
    for predicted, actual in pairs:
        slowness.answered(predicted, actual)
        assert 1.0 <= slowness.factor <= MAX_SLOWNESS


def test_answers_predicted_at_once_do_not_affect_the_factor() -> None:
    slowness = Slowness()
    for _ in range(10 * SLOWNESS_WINDOW):
        assert not slowness.answered(1_000_000, S)
