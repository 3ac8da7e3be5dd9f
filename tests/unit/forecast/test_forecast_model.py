"""Tests of the forecaster on seasons, shifts, bursts, outages and little history."""

import numpy as np
import pytest

from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, history_from_rates
from libs.policy.forecast.model import DemandForecaster

HORIZONS = (1, 6, 18, 144)
MEDIAN = LEVELS.index(0.5)


def _demand(requests: Floats, prompt: Floats | float = 100.0, output: Floats | float = 20.0) -> DemandHistory:
    rates = {"requests": requests, "known_requests": requests}
    times_s = np.arange(len(requests)) * 600.0
    return history_from_rates(times_s, {**rates, "prefill": requests * prompt, "decode": requests * output})


def _noise(bins: int, size: float, seed: int = 1) -> Floats:
    return np.exp(np.random.default_rng(seed).normal(0, size, bins))


def _medians(history: DemandHistory, name: str = "requests") -> Floats:
    model = DemandForecaster().fit(history, HORIZONS)
    return model.forecast(history)[name].quantiles[:, MEDIAN]  # type: ignore[index]


def test_a_daily_season_is_predicted_from_its_third_day_on() -> None:
    at = np.arange(5 * 144)
    day = 100 * np.exp(np.sin(2 * np.pi * at / 144)) * _noise(len(at), 0.05)
    last = 5 * 144 - 108  # a quarter into the day, at the peak; 3 h later demand is far lower
    found = _medians(_demand(day[: last + 1]))
    came = 100 * np.exp(np.sin(2 * np.pi * (last + np.array(HORIZONS)) / 144))
    assert found == pytest.approx(came, rel=0.15)
    assert found[2] < 0.9 * found[0]


def test_a_permanent_shift_of_level_is_followed() -> None:
    values = np.concatenate([np.full(600, 100.0), np.full(300, 300.0)]) * _noise(900, 0.05)
    found = _medians(_demand(values))
    assert found[0] == pytest.approx(300, rel=0.1)
    assert found[1] == pytest.approx(300, rel=0.15)


def test_a_burst_fades_from_the_forecast_if_earlier_bursts_faded() -> None:
    values = 100 * _noise(1200, 0.05)
    values[np.arange(50, 1150, 60)] *= 5
    values[-1] = 500
    found = _medians(_demand(values))
    assert found[1] < 200
    assert found[3] < 200


def test_an_outage_moves_no_forecast_to_zero() -> None:
    values = 100 * _noise(600, 0.05)
    values[-3:] = 0
    assert _medians(_demand(values))[0] == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize("left", [0.0, 0.1])
def test_forecasts_a_day_ahead_recover_within_an_hour_of_an_outage(left: float) -> None:
    at, ended = np.arange(9 * 144), 8 * 144 + 54
    day = 100 * np.exp(np.sin(2 * np.pi * at / 144)) * _noise(len(at), 0.05)
    outage = day * np.where((at >= ended - 24) & (at < ended), left, 1.0)
    for origin in (ended + 6, ended + 36):
        assert _medians(_demand(outage[:origin]))[3] == pytest.approx(_medians(_demand(day[:origin]))[3], rel=0.1)


@pytest.mark.parametrize("left", [0.0, 0.1], ids=["all", "nine tenths"])
@pytest.mark.parametrize("hours_ago", [12, 24])
def test_an_outage_of_some_hours_is_not_repeated_a_day_later(left: float, hours_ago: int) -> None:
    at = np.arange(8 * 144)
    usual = 100 * np.exp(0.6 * np.sin(2 * np.pi * at / 144)) * _noise(len(at), 0.05)
    start, end, ahead = 4 * 144 + 40, 4 * 144 + 64, (24 - hours_ago) * 6 or 144
    values = usual.copy()
    values[start:end] *= left
    history = _demand(values[: end + hours_ago * 6])
    found = DemandForecaster().fit(history, (ahead,)).forecast(history)["requests"].quantiles[0, MEDIAN]
    assert found == pytest.approx(usual[end + hours_ago * 6 + ahead - 1], rel=0.25)


def test_a_burst_does_not_make_the_usual_demand_of_the_next_day_an_incident() -> None:
    at = np.arange(9 * 144)
    usual = 100 * np.exp(0.6 * np.sin(2 * np.pi * at / 144)) * _noise(len(at), 0.05)
    values = usual.copy()
    values[6 * 144 + 40 : 6 * 144 + 52] *= 8
    last = 7 * 144 + 52 + 72  # half a day after the hours of the burst on the next day
    history = _demand(values[: last + 1])
    found = DemandForecaster().fit(history, (66,)).forecast(history)["requests"].quantiles[0, MEDIAN]
    assert found < 1.6 * usual[last + 66]


def test_a_fall_that_recurs_at_its_hour_is_predicted() -> None:
    at = np.arange(9 * 144)
    values = 100 * _noise(len(at), 0.05)
    values[(at >= 4 * 144) & (at % 144 >= 40) & (at % 144 < 64)] *= 0.1
    last = 8 * 144 - 20
    history = _demand(values[: last + 1])
    found = DemandForecaster().fit(history, (72,)).forecast(history)["requests"].quantiles[0, MEDIAN]
    assert found == pytest.approx(10, rel=0.3)


def test_a_model_that_stopped_is_predicted_at_zero() -> None:
    values = 100 * _noise(600, 0.05)
    values[-144:] = 0
    assert _medians(_demand(values))[0] < 2


def test_bands_of_steady_noise_hold_ninety_percent() -> None:
    history = _demand(100 * _noise(1500, 0.3))
    model = DemandForecaster().fit(history.before(1000), HORIZONS)
    for name in SERIES:
        found = model.forecast_at(history, name, range(999, 1499 - 6))
        for place, horizon in enumerate(HORIZONS[:2]):
            came = history.series(name)[np.arange(999, 1499 - 6) + horizon]
            held = (came >= found[:, place, 0]) & (came <= found[:, place, -1])
            assert 0.85 < held.mean() < 0.95


def test_bands_hold_in_calm_and_in_volatile_hours() -> None:
    at = np.arange(1800)
    restless = at // 72 % 2 == 1
    history = _demand(100 * np.exp(np.random.default_rng(5).normal(0, 1, 1800) * np.where(restless, 0.4, 0.05)))
    found = DemandForecaster().fit(history.before(1200), HORIZONS).forecast_at(history, "requests", range(1199, 1793))
    for place, horizon in enumerate(HORIZONS[:2]):
        came = np.arange(1199, 1793) + horizon
        held = (history.requests[came] >= found[:, place, 0]) & (history.requests[came] <= found[:, place, -1])
        assert 0.82 < held[restless[came]].mean() < 0.97
        assert 0.82 < held[~restless[came]].mean() < 0.97


def test_a_band_is_wider_with_little_history_and_says_so() -> None:
    noise = 100 * _noise(2016, 0.1)
    little, much = _demand(noise[-12:]), _demand(noise)
    for history in (little, much):
        model = DemandForecaster().fit(history, HORIZONS)
        forecast = model.forecast(history)["requests"]
        spread = np.log(forecast.quantiles[:, -1] / np.maximum(forecast.quantiles[:, 0], 1e-9))
        if history is little:
            wide = spread
            assert "little history (2.0 h)" in forecast.notes[0]
    assert (wide > 1.5 * spread).all()


def test_twelve_calm_hours_do_not_narrow_the_band_of_the_other_twelve() -> None:
    calm = _demand(100 * _noise(72, 0.05))
    quantiles = DemandForecaster().fit(calm, HORIZONS).forecast(calm)["requests"].quantiles
    spread = np.log(quantiles[:, -1] / quantiles[:, 0])
    assert spread[2] > 1.5  # 3 h ahead a daily season may have set in
    assert spread[0] < 0.5  # ten minutes ahead it cannot


def test_a_calm_day_narrows_the_band_by_the_middle_of_the_next() -> None:
    noise = _noise(216, 0.05)
    widths = []
    for bins in (72, 216):
        history = _demand(100 * noise[:bins])
        found = DemandForecaster().fit(history, HORIZONS).forecast(history)["requests"].quantiles[2]
        widths.append(float(np.log(found[-1] / found[0])))
    assert widths[1] < widths[0] / 3


def test_a_calm_series_of_three_days_has_a_narrower_band_a_week_ahead_than_a_volatile_one() -> None:
    widths = []
    for noise in (0.03, 0.6):
        history = _demand(100 * _noise(432, noise))
        model = DemandForecaster().fit(history, (144, 1008))
        found = model.forecast(history)["requests"].quantiles[1]
        widths.append(found[-1] / found[3])
    assert widths[0] < 2.5 < widths[1]


def test_missing_demand_and_an_empty_history_are_explained() -> None:
    nothing = _demand(np.zeros(50))
    model = DemandForecaster().fit(nothing, HORIZONS)
    assert not model.forecast(nothing)["requests"].quantiles.any()
    assert "no demand so far" in model.forecast(nothing)["requests"].notes[0]
    empty = _demand(np.empty(0))
    assert "nothing is predicted" in DemandForecaster().fit(empty, HORIZONS).forecast(empty)["decode"].notes[0]


def test_a_constant_series_explains_its_narrow_band() -> None:
    history = _demand(np.full(600, 5.0))
    found = DemandForecaster().fit(history, HORIZONS).forecast(history)["requests"]
    assert "the same in all 600 known bins" in found.notes[0]


def test_negative_rates_and_a_clock_set_back_are_reported() -> None:
    assert "300 rates of requests are negative" in " ".join(_demand(np.full(300, -5.0)).notes)
    times_s = np.concatenate([np.arange(200), np.arange(100)]) * 600.0
    rates = {name: np.full(300, 5.0) for name in ("requests", "known_requests", "prefill", "decode")}
    history = history_from_rates(times_s, rates, 600.0)
    assert "the clock was set back 1 times" in history.notes[0]
    assert np.isfinite(DemandForecaster().fit(history, HORIZONS).forecast(history)["requests"].quantiles).all()


def test_regressions_equal_the_naive_forecast_until_half_a_day_of_outcomes_is_known() -> None:
    climbing = _demand(100 * np.exp(np.cumsum(np.random.default_rng(1).normal(0.01, 0.02, 400))))
    for bins, waits in ((110, True), (400, False)):
        model = DemandForecaster().fit(climbing.before(bins), (1,)).models["requests"]
        assert model is not None
        values = model.blends[0].pending[-1]
        said = dict(zip(model.names, values.tolist(), strict=True))
        assert (said["regression"] == said["now"]) == waits


def test_tokens_per_request_stay_constant_when_a_burst_of_arrivals_fades() -> None:
    requests = 100 * _noise(1500, 0.03)
    requests[np.arange(40, 1460, 40)] *= 4  # a burst lasts one bin, with the lengths of always
    requests[-1] = 400
    history = _demand(requests, prompt=np.full(1500, 500.0))
    forecasts = DemandForecaster().fit(history, HORIZONS).forecast(history)
    per_request = forecasts["prefill"].quantiles[1, MEDIAN] / forecasts["requests"].quantiles[1, MEDIAN]
    assert per_request == pytest.approx(500, rel=0.1)


def test_a_history_that_begins_elsewhere_is_refused() -> None:
    history = _demand(100 * _noise(200, 0.1))
    model = DemandForecaster().fit(history, HORIZONS)
    moved = DemandHistory(600.0, 600.0, history.requests, history.prefill, history.decode)
    with pytest.raises(ValueError, match="fit anew"):
        model.forecast_at(moved, "requests", [199])
    with pytest.raises(ValueError, match="outside the history"):
        model.forecast_at(history, "requests", [10])


def test_a_forecast_can_be_explained_by_its_parts() -> None:
    history = _demand(100 * _noise(600, 0.1))
    found = DemandForecaster().fit(history, HORIZONS).explain("prefill")
    assert [each.horizon for each in found] == list(HORIZONS)
    for each in found:
        assert 0.5 < sum(each.weights.values()) <= 1.01
        assert list(each.weights.values()) == sorted(each.weights.values(), reverse=True)
        assert 0 <= each.since_s <= history.step_s * len(history)
    assert found[0].errors.keys() == found[0].weights.keys()
