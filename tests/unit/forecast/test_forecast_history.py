"""Tests of demand on a regular grid: gaps, clocks set back, and bins with too few known tokens."""

import numpy as np
import pytest

from libs.policy.forecast.history import DemandHistory, Floats, history_from_rates, without_outages


def _history(times_s: list[float], requests: list[float], known: list[float] | None = None) -> DemandHistory:
    known = requests if known is None else known
    rates = {"requests": requests, "known_requests": known}
    return history_from_rates(times_s, {**rates, "prefill": [10 * k for k in known], "decode": [2 * k for k in known]})


def test_tokens_of_known_requests_are_scaled_to_all_requests() -> None:
    history = _history([0, 600, 1200], [10, 10, 10], [10, 5, 4])
    assert history.prefill.tolist() == [100, 100, 100]
    assert history.decode.tolist() == [20, 20, 20]


def test_a_bin_with_a_low_known_share_has_requests_but_no_tokens() -> None:
    history = _history([0, 600], [10, 10], [10, 2])
    assert history.requests.tolist() == [10, 10]
    assert np.isnan(history.prefill[1])
    assert any("1 of 2 bins" in note for note in history.notes)


def test_a_bin_without_requests_has_zero_tokens_rather_than_unknown_ones() -> None:
    assert _history([0, 600], [10, 0]).decode.tolist() == [20, 0]


def test_a_gap_becomes_unknown_bins() -> None:
    history = _history([0, 600, 2400], [1, 2, 3])
    assert len(history) == 5
    assert np.isnan(history.requests).tolist() == [False, False, True, True, False]
    assert any("2 of 5 bins have no sample" in note for note in history.notes)


def test_later_samples_replace_earlier_ones_after_the_clock_was_set_back() -> None:
    history = _history([0, 600, 1200, 600, 1200, 1800], [1, 2, 3, 4, 5, 6])
    assert history.requests.tolist() == [1, 4, 5, 6]
    assert any("set back" in note for note in history.notes)


def test_one_sample_and_none_are_valid_histories() -> None:
    assert _history([7.0], [3]).requests.tolist() == [3]
    empty = _history([], [])
    assert len(empty) == 0
    assert empty.notes


def test_negative_and_infinite_rates_are_unknown() -> None:
    history = _history([0, 600, 1200], [1, -1, float("inf")])
    assert np.isnan(history.requests).tolist() == [False, True, True]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        history_from_rates([0, 600], {name: [1.0] for name in ("requests", "known_requests", "prefill", "decode")})


def _series(*parts: tuple[float, int]) -> Floats:
    return np.concatenate([np.full(count, value) for value, count in parts])


def test_zeros_amid_demand_are_an_outage_for_an_hour_and_then_the_end_of_demand() -> None:
    masked = without_outages(_series((5, 50), (0, 10), (5, 5)), 600)
    assert np.isnan(masked[50:56]).all()
    assert (masked[56:60] == 0).all()
    assert (masked[60:] == 5).all()


def test_sporadic_demand_keeps_its_zeros() -> None:
    values = np.tile([0.0, 0.0, 3.0], 50)
    assert without_outages(values, 600).tolist() == values.tolist()
