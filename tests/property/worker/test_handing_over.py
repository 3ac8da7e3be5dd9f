"""Properties of the cost model of hand-overs: its expectations, and that it holds no sequence better moved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.port import SamplingParams
from libs.policy.worker.assignment import (
    MAX_WAIT_S,
    PRIOR,
    HandOverTime,
    Staying,
    expected_tokens_left,
    sooner_handed_over,
    sooner_recomputed,
)


def test_only_greedy_sampling_without_output_penalties_can_be_recomputed_from_tokens() -> None:
    assert SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=True).follows_from_tokens
    for sampled in ({"temperature": 0.9}, {"frequency_penalty": 0.6}, {"presence_penalty": -0.2}):
        assert not SamplingParams(**{"temperature": 0, **sampled}).follows_from_tokens


sizes = st.integers(0, 10**10)
seconds = st.floats(0, 100)
observed = st.lists(st.tuples(sizes, seconds), max_size=40)


def learned(moves: list[tuple[int, float]]) -> HandOverTime:
    moving = HandOverTime()
    for kv_bytes, took_s in moves:
        moving.observe(kv_bytes, took_s)
    return moving


def test_without_observations_the_assumption_stands() -> None:
    for kv_bytes, expected_s in PRIOR:
        assert HandOverTime().seconds(int(kv_bytes)) == pytest.approx(expected_s)


@given(observed, sizes, sizes)
def test_more_bytes_never_take_less_time_and_no_time_is_negative(
    moves: list[tuple[int, float]], some: int, more: int
) -> None:
    moving = learned(moves)
    assert 0 <= moving.seconds(min(some, more)) <= moving.seconds(max(some, more))


@given(observed, st.floats(0.001, 10), sizes)
def test_the_model_converges_to_observations(before: list[tuple[int, float]], took_s: float, kv_bytes: int) -> None:
    moving = learned(before + [(kv_bytes, took_s)] * 200)
    assert moving.seconds(kv_bytes) == pytest.approx(took_s, rel=0.1, abs=0.06)


stays = st.builds(Staying, st.floats(1e-4, 1), st.floats(0, 1e4))


@given(observed, st.integers(1, 10**5), st.integers(0, 10**5), sizes, stays)
def test_a_longer_answer_is_never_less_inclined_to_move(
    moves: list[tuple[int, float]], left: int, more: int, kv_bytes: int, staying: Staying
) -> None:
    moving = learned(moves)
    assert sooner_handed_over(left, kv_bytes, staying, moving) <= sooner_handed_over(
        left + more, kv_bytes, staying, moving
    )


def test_the_expected_length_of_an_answer_is_typical_and_within_its_limit() -> None:
    assert expected_tokens_left(1000, 0) == 1000
    assert expected_tokens_left(1000, 40) == 40
    assert expected_tokens_left(7, 40) == 7
    assert Staying(0, 40).seconds(1) == float("inf")


@given(st.integers(0, 20_000), seconds, stays)
def test_no_sequence_waits_for_its_end_longer_than_recomputation_or_the_deadline(
    most_left: int, recompute_s: float, staying: Staying
) -> None:
    bound_s = min(recompute_s, MAX_WAIT_S)
    goes = sooner_recomputed(most_left, recompute_s, bound_s, staying)
    assert goes or most_left * staying.tpot_s <= bound_s


@given(st.integers(0, 20_000), seconds, seconds, stays)
def test_a_sequence_sure_to_end_in_that_time_stays_and_one_expected_to_take_longer_leaves_at_once(
    most_left: int, recompute_s: float, waited_s: float, staying: Staying
) -> None:
    goes = sooner_recomputed(most_left, recompute_s, waited_s, staying)
    if most_left * staying.tpot_s <= min(recompute_s, MAX_WAIT_S):
        assert not goes
    elif staying.seconds(most_left) > recompute_s:
        assert goes
