"""Test the bounds that day-ahead forecasts are held against."""

import numpy as np
import pytest

from libs.policy.forecast.history import SERIES, DemandHistory
from load.forecast_bound import AHEAD, error_over_best, exact_bands
from load.forecast_series import STEP_S


def test_a_forecaster_that_knows_what_comes_has_no_error() -> None:
    at = np.arange(8 * AHEAD)
    demand = 10 * np.exp(np.sin(at / 23) + np.random.default_rng(1).normal(0, 0.1, len(at)))
    history = DemandHistory(STEP_S, 0.0, demand, 2 * demand, 3 * demand)
    coming = {name: np.roll(history.series(name), -AHEAD) for name in SERIES}
    found = error_over_best(history, coming)
    assert found == {name: pytest.approx(0.0, abs=1e-12) for name in SERIES}


def test_exact_bands_of_noise_that_lasts_miss_their_share_more_often() -> None:
    brief, lasting = exact_bands((0.3, 0.2, 0.0), 60), exact_bands((0.05, 4.0, 0.05), 60)
    assert lasting < 0.5 < brief
