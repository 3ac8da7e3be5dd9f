"""Properties of forecasts: none depends on later data."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.lab.models.backtest import BacktestSettings, ForecastSeries, replay
from libs.lab.models.generate import generate_usage
from libs.lab.models.usage import UsageLog, use_by_window

WINDOW_S = 60.0
SPEC = "surge:models=8,rate=0.01,exec=40,seconds=3000,correlation=0.3,sizes=0.5"


def forecasts(log):
    series = ForecastSeries()
    settings = BacktestSettings(window_s=WINDOW_S, period_s=600.0)
    for _ in replay(log, use_by_window(log, WINDOW_S), settings, series):
        pass
    return series


def changed_after(log, origin_s, rng):
    """Draw a change after the origin: running requests may end at any later time, and anything may arrive."""
    t_s, model, exec_s, gpus = log.t_s.copy(), log.model.copy(), log.exec_s.copy(), log.gpus.copy()
    is_running = (t_s < origin_s) & (t_s + exec_s >= origin_s)
    exec_s[is_running] = origin_s - t_s[is_running] + rng.exponential(100.0, int(is_running.sum()))
    before = t_s < origin_s
    count = int(rng.integers(1, 400))
    later_s = np.sort(rng.uniform(origin_s, log.end_s, count))
    models = len(log.models)
    known = np.unique(model[before])
    gpus[np.setdiff1d(np.arange(models), known)] = 4.0
    return UsageLog(
        log.name,
        np.concatenate([t_s[before], later_s, [log.end_s]]),
        np.concatenate([model[before], rng.integers(0, models, count + 1)]),
        np.concatenate([exec_s[before], rng.exponential(60.0, count + 1)]),
        log.models,
        gpus,
    )


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 48))
def test_a_change_after_an_origin_changes_no_forecast_made_at_it(seed, window):
    log = generate_usage(SPEC, seed=seed % 5)
    other = changed_after(log, window * WINDOW_S, np.random.default_rng(seed))
    one, two = forecasts(log), forecasts(other)
    made = slice(0, window + 1)
    for name in ("reserved_gpus", "held_gpus", "uncalibrated_gpus", "independent_gpus", "expected_models",
                 "expected_peak_gpus", "p50_gpus"):  # fmt: skip
        assert getattr(one, name)[made] == getattr(two, name)[made], name


def test_a_change_before_an_origin_changes_the_forecast():
    """The test above would pass for a forecast that looks at nothing."""
    log = generate_usage(SPEC, seed=1)
    busier = UsageLog(log.name, log.t_s, log.model, log.exec_s * 3, log.models, log.gpus)
    assert forecasts(log).expected_models[40] != forecasts(busier).expected_models[40]
