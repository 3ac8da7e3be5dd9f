"""Tests of what a pool worker retains of a model that it leaves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.worker.assignment import Leaving, leave, too_many


@pytest.mark.parametrize(
    ("size_bytes", "host_bytes", "sleeps", "drops_weights", "left"),
    [
        (16, 40, True, False, Leaving.WITH_WEIGHTS),
        (40, 40, True, True, Leaving.WITH_WEIGHTS),
        (41, 40, True, True, Leaving.WITHOUT_WEIGHTS),
        (41, 40, True, False, Leaving.CLOSED),
        (16, 40, False, True, Leaving.CLOSED),
        (16, 0, True, True, Leaving.CLOSED),
    ],
)
def test_as_much_of_a_model_is_retained_as_possible(
    size_bytes: int, host_bytes: int, sleeps: bool, drops_weights: bool, left: Leaving
) -> None:
    assert leave(size_bytes, host_bytes=host_bytes, sleeps=sleeps, drops_weights=drops_weights) is left


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 20), st.integers(0, 60))
def test_the_oldest_models_are_evicted_and_no_more_than_necessary(held: list[int], wanted: int, most: int) -> None:
    gone = too_many(held, wanted, most)
    fits = [number for number in range(len(held) + 1) if sum(held[number:]) + wanted <= most]
    assert gone == (fits[0] if fits else len(held))
