"""Tests of the causes of a change in demand with a daily season."""

import numpy as np
import pytest

from libs.demand.counts import DemandKey
from libs.demand.history import FIELDS, DemandBins, demand_history, last_trends, spans

DAY = 96
STEP_S = 900.0


def _bins(outputs: float, turn: int, count: int, seed: int = 5) -> DemandBins:
    """Two tenants over days with a quiet night; from `turn` on outputs of acme are `outputs` times as long."""
    rng = np.random.default_rng(seed)
    at = np.arange(count)
    wave = np.exp(1.2 * np.sin(2 * np.pi * at / DAY))
    rows = {}
    for tenant, mean, length in (("acme", 900, 240), ("beta", 300, 200)):
        requests = rng.poisson(mean * wave)
        longer = np.where((at >= turn) & (tenant == "acme"), length * outputs, length).astype(np.int64)
        row = np.zeros((count, FIELDS), np.int64)
        row.T[:] = requests, requests, requests * 500, 0 * requests, requests * longer, requests, 0 * requests
        rows[DemandKey("m", "online", tenant)] = row
    return DemandBins(round(STEP_S * 1e9), 0, np.ones(count, np.bool_), rows)


@pytest.mark.parametrize("hours", [7, 13, 19, 31])
@pytest.mark.parametrize("phase_of_day", [0, 24, 48, 72])
def test_a_part_of_a_day_is_compared_with_the_same_hours_of_the_previous_day(hours: int, phase_of_day: int) -> None:
    turn = 5 * DAY + phase_of_day
    count = turn + 4 * hours
    bins = _bins(1.8, turn, count)
    history = demand_history(bins.sums(), bins.covered, start_s=0.0, step_s=STEP_S, seconds=STEP_S)
    decode = next(each for each in last_trends(bins, history, (3e-4, 3e-3), day=DAY) if each.what == "decode")
    assert abs(decode.began_s / STEP_S - turn) <= 12
    first = decode.causes[0]
    assert (first.who, first.what) == ("acme", "outputs")
    assert (first.before, first.after) == pytest.approx((240, 432), rel=0.1)
    # The level went as far as that cause says: by tokens, and not by the hour of the day.
    assert decode.after - decode.before == pytest.approx(first.tokens_per_s * 3e-3, rel=0.25)


def test_rates_of_causes_are_in_clock_time_however_fast_simulated_days_pass() -> None:
    bins = _bins(1.8, 5 * DAY, 5 * DAY + 40)
    fast = DemandBins(bins.bin_ns // 60, 0, bins.covered, bins.rows)
    history = demand_history(fast.sums(), fast.covered, start_s=0.0, step_s=STEP_S, seconds=STEP_S / 60)
    decode = next(each for each in last_trends(fast, history, (3e-4, 3e-3), day=DAY) if each.what == "decode")
    assert decode.after - decode.before == pytest.approx(decode.causes[0].tokens_per_s * 3e-3, rel=0.25)


def test_ten_hours_are_compared_with_the_same_ten_of_the_previous_day() -> None:
    assert spans(500, 540, DAY, STEP_S) == (slice(404, 444), slice(500, 540))


@pytest.mark.parametrize("began", range(DAY, 4 * DAY, 7))
@pytest.mark.parametrize("since", [1, 3, 50, 95, 96, 97, 200])
def test_the_span_before_never_overlaps_the_span_after_and_has_the_same_hours(began: int, since: int) -> None:
    before, after = spans(began, began + since, DAY, STEP_S)
    assert before.stop <= max(began, after.start) and 0 <= before.start <= before.stop
    if began >= 2 * DAY:
        assert before.stop - before.start == after.stop - after.start <= DAY
        assert (after.start - before.start) % DAY == 0
        assert before.stop <= began


def test_without_a_previous_day_the_span_just_before_is_used() -> None:
    assert spans(40, 50, DAY, STEP_S) == (slice(30, 40), slice(40, 50))
