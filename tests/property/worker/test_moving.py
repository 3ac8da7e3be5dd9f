"""The cost model of leaving: what it expects of moves, and that it never holds a sequence that is better gone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.policy.worker.moving import PRIOR, MoveTime, Staying, expected_tokens_left, sooner_moved

sizes = st.integers(0, 10**10)
seconds = st.floats(0, 100)
observed = st.lists(st.tuples(sizes, seconds), max_size=40)


def learned(moves: list[tuple[int, float]]) -> MoveTime:
    moving = MoveTime()
    for kv_bytes, took_s in moves:
        moving.observe(kv_bytes, took_s)
    return moving


def test_nothing_observed_leaves_the_assumption() -> None:
    for kv_bytes, expected_s in PRIOR:
        assert MoveTime().seconds(int(kv_bytes)) == pytest.approx(expected_s)


@given(observed, sizes, sizes)
def test_more_bytes_never_take_less_and_nothing_takes_negative_time(
    moves: list[tuple[int, float]], some: int, more: int
) -> None:
    moving = learned(moves)
    assert 0 <= moving.seconds(min(some, more)) <= moving.seconds(max(some, more))


@given(observed, st.floats(0.001, 10), sizes)
def test_it_comes_to_expect_what_it_sees(before: list[tuple[int, float]], took_s: float, kv_bytes: int) -> None:
    moving = learned(before + [(kv_bytes, took_s)] * 200)
    assert moving.seconds(kv_bytes) == pytest.approx(took_s, rel=0.1, abs=0.06)


stays = st.builds(Staying, st.floats(1e-4, 1), st.floats(0, 1e4))


@given(observed, st.integers(1, 10**5), st.integers(0, 10**5), sizes, stays)
def test_a_longer_answer_is_never_less_inclined_to_move(
    moves: list[tuple[int, float]], left: int, more: int, kv_bytes: int, staying: Staying
) -> None:
    moving = learned(moves)
    assert sooner_moved(left, kv_bytes, staying, moving) <= sooner_moved(left + more, kv_bytes, staying, moving)


def test_an_answer_is_expected_to_be_as_long_as_answers_are_but_no_longer_than_it_may() -> None:
    assert expected_tokens_left(1000, 0) == 1000
    assert expected_tokens_left(1000, 40) == 40
    assert expected_tokens_left(7, 40) == 7
    assert Staying(0, 40).seconds(1) == float("inf")
