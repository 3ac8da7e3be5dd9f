"""Properties of forecasts: no look-ahead, and sorted, finite, non-negative quantiles."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.forecast.backtest import make_plan, run, score
from libs.forecast.baselines import BaselineTask, light_baselines
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, history_from_rates, hold, running_means
from libs.policy.forecast.model import DemandForecaster
from libs.policy.forecast.targets import past_demand

HORIZONS = (1, 3, 12)

rate = st.one_of(st.just(0.0), st.floats(0, 1e9), st.just(float("nan")))
rates = st.lists(st.tuples(rate, st.floats(0, 1), st.floats(1, 1e5), st.floats(1, 1e5)), min_size=0, max_size=80)


def _history(rows: list[tuple[float, float, float, float]], step_s: float = 3600.0) -> DemandHistory:
    found = np.array(rows, dtype=np.float64).reshape(-1, 4)
    known = found[:, 0] * found[:, 1]
    columns = {"requests": found[:, 0], "known_requests": known, "prefill": known * found[:, 2]}
    return history_from_rates(np.arange(len(found)) * step_s, {**columns, "decode": known * found[:, 3]}, step_s)


@settings(max_examples=60, deadline=None)
@given(rates, st.integers(0, 80))
def test_quantiles_are_numbers_sorted_and_not_negative(
    rows: list[tuple[float, float, float, float]], fitted: int
) -> None:
    history = _history(rows)
    fitted = min(fitted, len(history))
    model = DemandForecaster().fit(history.before(fitted), HORIZONS)
    for name in SERIES:
        found = model.forecast_at(history, name, range(max(fitted - 1, 0), len(history)))
        assert found.shape[1:] == (len(HORIZONS), len(LEVELS))
        assert np.isfinite(found).all()
        assert (found >= 0).all()
        assert (np.diff(found, axis=2) >= 0).all()
    assert all(isinstance(note, str) for name in SERIES for note in model.notes(history, name))


@settings(max_examples=40, deadline=None)
@given(rates, rates, st.integers(1, 60), st.integers(0, 20))
def test_data_after_an_origin_change_no_forecast(
    rows: list[tuple[float, float, float, float]],
    others: list[tuple[float, float, float, float]],
    fitted: int,
    later: int,
) -> None:
    fitted = min(fitted, max(len(rows), 1))
    origin = fitted - 1 + later
    if origin >= len(rows):
        return
    after = (others * len(rows))[: len(rows) - origin - 1] or rows[origin + 1 :]
    history, changed, alone = (_history(each) for each in (rows, rows[: origin + 1] + after, rows[: origin + 1]))
    model = DemandForecaster().fit(history.before(fitted), HORIZONS)
    for name in SERIES:
        whole = model.forecast_at(history, name, range(fitted - 1, len(history)))[origin - fitted + 1]
        again = model.forecast_at(changed, name, range(fitted - 1, len(history)))[origin - fitted + 1]
        assert np.array_equal(whole, again)
        # Arrays of other lengths are rounded otherwise.
        assert np.allclose(whole, model.forecast_at(alone, name, [origin])[0], rtol=1e-6, atol=1e-9)
        for baseline in light_baselines():
            said = [
                baseline.predict(BaselineTask(each, name, fitted, [origin], HORIZONS))
                for each in (history, changed, alone)
            ]
            assert all((each is None) == (said[0] is None) for each in said)
            assert said[0] is None or all(np.allclose(said[0], each) for each in said)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(60, 150), st.integers(0, 40))
def test_a_backtest_forecasts_the_same_whatever_follows(seed: int, bins: int, back: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(3, 1, (bins, 4))
    drawn[:, 1] = rng.random(bins)
    history = _history(list(map(tuple, drawn.tolist())))  # type: ignore[arg-type]
    origin = bins - 2 - back
    drawn[origin + 1 :] *= rng.lognormal(0, 2, (bins - origin - 1, 4))
    drawn[:, 1] = np.minimum(drawn[:, 1], 1)
    changed = _history(list(map(tuple, drawn.tolist())))  # type: ignore[arg-type]
    plan = make_plan(history, [3600.0 * each for each in HORIZONS])
    found = [run(each, plan, DemandForecaster(), light_baselines()) for each in (history, changed)]
    for name in SERIES:
        assert np.array_equal(*(each.ours[name][: origin + 1] for each in found), equal_nan=True)
        for baseline in found[0].baselines:
            reported = [each.baselines[baseline][name][: origin + 1] for each in found]
            assert np.allclose(reported[0], reported[1], equal_nan=True)
    assert all(record["wis"] >= 0 for record in score(found[0]))


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=200), st.floats(0.3, 500))
def test_running_means_equal_those_of_a_loop(values: list[float], half_life: float) -> None:
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    expected = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        expected.append(total / weight)
    assert np.allclose(running_means(np.array(values), np.array([half_life]))[0], expected, atol=1e-9)


@given(st.lists(st.one_of(st.floats(-9, 9), st.just(float("nan"))), min_size=1))
def test_a_held_series_has_no_unknown_bin_unless_all_are(values: list[float]) -> None:
    array: Floats = np.array(values)
    known = np.isfinite(array)
    held = hold(array)
    assert np.isfinite(held).all() == known.any()
    assert np.array_equal(held[known], array[known])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(30, 90), st.integers(1, 6), st.sampled_from([-3.0, 2.0])), max_size=3))
def test_later_data_changes_no_incident_that_an_origin_knows(moves: list[tuple[int, int, float]]) -> None:
    day, values = 24, np.array([0.0, 0.01] * 60)
    for start, length, size in moves:
        values[start : start + length] += size
    whole = past_demand(values, day, 600.0)
    for later in (-3.0, 2.0):
        for origin in range(day, len(values)):
            again = past_demand(np.where(np.arange(len(values)) > origin, later, values), day, 600.0)
            for back in range(1, day + 1):
                assert whole.seen_from(origin, back)[0] == again.seen_from(origin, back)[0]
