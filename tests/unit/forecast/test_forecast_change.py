"""Tests of changes of level: planted ones are found in time, stationary series have none, and causes add up."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libs.policy.forecast.change import LevelChange, TrafficRates, causes, find_changes, in_words, matters
from libs.policy.forecast.history import Floats


def _stationary(bins: int, seed: int, memory: float = 0.0, size: float = 0.1) -> Floats:
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, size, bins)
    wave = np.empty(bins)
    last = 0.0
    for at, each in enumerate(noise):
        last = memory * last + each
        wave[at] = last
    return np.exp(wave)


def _counts(bins: int, seed: int, per_bin: float) -> Floats:
    return np.random.default_rng(seed).poisson(per_bin, bins).astype(np.float64)


@pytest.mark.parametrize("step_s", [60.0, 600.0])
@pytest.mark.parametrize("factor", [1.5, 0.5, 3.0])
def test_a_shift_by_half_is_found_within_half_an_hour(step_s: float, factor: float) -> None:
    day, half_hour = round(86_400 / step_s), round(1800 / step_s)
    for seed in range(8):
        values = _counts(3 * day, seed, 0.5 * step_s)  # half a request a second
        at = 2 * day + 7 * seed
        values[at:] = _counts(3 * day - at, seed + 100, 0.5 * step_s * factor)
        found = find_changes(values, step_s)
        assert len(found) == 1, (seed, found)
        assert 0 <= found[0].found - at < half_hour
        assert abs(found[0].began - at) <= max(half_hour // 5, 1)
        assert found[0].ratio == pytest.approx(factor, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_a_month_of_stationary_series_has_at_most_one_false_alarm(memory: float) -> None:
    series = [_stationary(30 * 144, seed, memory) for seed in range(60)]
    assert sum(len(find_changes(each, 600.0)) for each in series) <= 1
    minutes = [_counts(30 * 1440, seed, 20) for seed in range(10)]
    assert sum(len(find_changes(each, 60.0)) for each in minutes) <= 1


def test_a_daily_wave_that_was_predicted_is_no_change() -> None:
    at = np.arange(6 * 144)
    wave = 100 * np.exp(np.sin(2 * np.pi * at / 144))
    values = wave * _stationary(len(at), 1, 0.0, 0.05)
    assert find_changes(values, 600.0, wave) == []
    values[700:] *= 1.6
    assert [each.began for each in find_changes(values, 600.0, wave)] == [700]


def test_a_model_that_starts_or_stops_is_a_change() -> None:
    values = np.zeros(600)
    values[300:] = _stationary(300, 2) * 40
    (found,) = find_changes(values, 600.0)
    assert found.began == 300
    assert found.before == 0
    assert found.ratio == float("inf")
    (ended,) = find_changes(np.concatenate([values[300:], np.zeros(100)]), 600.0)
    assert ended.began == 300


@pytest.mark.parametrize(
    "values", [[], [1.0], [0.0] * 300, [float("nan")] * 300, [5.0] * 300, [5.0, float("nan")] * 150]
)
def test_a_series_without_a_change_raises_no_error(values: list[float]) -> None:
    assert find_changes(np.array(values), 600.0) == []


@given(st.integers(0, 10**6), st.integers(150, 260))
def test_later_data_do_not_move_a_change_that_was_found(seed: int, cut: int) -> None:
    values = _stationary(300, seed)
    values[150:] *= 4
    whole = find_changes(values, 600.0)
    assert [each for each in whole if each.found < cut] == find_changes(values[:cut], 600.0)
    assert any(isinstance(each, LevelChange) and each.began == 150 for each in whole)


traffic = st.builds(TrafficRates, st.floats(0, 1e3), st.floats(0, 1e5), st.floats(0, 1e4))
sides = st.dictionaries(st.sampled_from("abcd"), traffic, max_size=4)


@given(sides, sides)
@example({"a": TrafficRates(1.0, 0.0, 1.0)}, {"a": TrafficRates(5e-324, 0.0, 1.5)})  # its product is rounded to itself
def test_causes_add_up_to_the_change(before: dict[str, TrafficRates], after: dict[str, TrafficRates]) -> None:
    tokens = [sum(each.requests * each.output_tokens for each in side.values()) for side in (before, after)]
    found = causes(before, after, "decode")
    added = sum(each.tokens_per_s for each in found)
    assert added == pytest.approx(tokens[1] - tokens[0], abs=1e-6 * sum(tokens) + 1e-9)


def test_the_cause_is_named_in_one_line() -> None:
    before = {"acme": TrafficRates(2.0, 800, 240), "others": TrafficRates(5.0, 700, 100)}
    after = {"acme": TrafficRates(2.1, 800, 610), "others": TrafficRates(5.0, 710, 100)}
    found = causes(before, after, "decode")
    assert (found[0].who, found[0].what) == ("acme", "outputs")
    assert in_words(found, "Tuesday 14:00", 0.8, 0.3) == (
        "decode-heavy since Tuesday 14:00: outputs of acme grew from 240 to 610 tokens; prefill : decode 0.8 → 0.3"
    )


@pytest.mark.parametrize(
    ("before", "after", "gpus", "shown"),
    [
        (0.2, 0.24, True, False),  # a fifth more of next to nothing
        (20.0, 20.5, True, False),  # half a GPU of twenty
        (0.2, 0.4, True, True),
        (0.4, 0.2, True, True),
        (0.0, 0.3, True, True),
        (0.2, 0.24, False, True),  # no GPUs: of a ratio, or of tokens
        (1.0, 1.05, False, False),
    ],
)
def test_a_change_too_small_to_matter_is_not_shown(before: float, after: float, gpus: bool, shown: bool) -> None:
    assert matters(LevelChange(0, 1, before, after), gpus=gpus) is shown
