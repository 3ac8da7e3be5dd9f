"""Test that forecasts keep their figures to eight digits."""

import numpy as np
import pytest

from libs.policy.forecast.history import SERIES
from libs.policy.forecast.model import DemandForecaster
from load.bench_forecast import HORIZONS, draw_demand

# Sums of the 5 %, 50 % and 95 % quantiles by horizon, from the last bin of the fit and from the last bin.
FIGURES = {
    (2, 3): {
        "requests": [
            [73.85098987, 70.18195274, 88.67410188, 123.0314708],
            [302.6256591, 298.2806199, 288.8533085, 490.6784626],
        ],
        "prefill": [
            [69893.12857, 68286.38258, 84120.98039, 114415.2321],
            [275196.533, 281812.5046, 266969.1454, 461642.0963],
        ],
        "decode": [
            [18362.23089, 17505.25682, 21870.49648, 28771.04369],
            [79284.1957, 79342.11564, 75011.39748, 129913.7477],
        ],
    },
    (9, 4): {
        "requests": [
            [52.89436579, 56.28776597, 66.45965197, 61.17047796],
            [210.3055718, 210.7640681, 178.7471796, 234.3334889],
        ],
        "prefill": [
            [52757.1223, 56457.89594, 69811.34251, 67429.10105],
            [196672.4542, 192018.672, 162764.4439, 236146.4702],
        ],
        "decode": [
            [14563.9376, 15665.79089, 18043.97586, 16240.63055],
            [62170.45132, 60459.87756, 50909.88056, 62866.85323],
        ],
    },
}


@pytest.mark.parametrize("days, seed", FIGURES)
def test_forecasts_of_random_demand_are_unchanged(days: int, seed: int) -> None:
    history = draw_demand(days, seed)
    fitted = len(history) - 60
    model = DemandForecaster().fit(history.before(fitted), HORIZONS)
    for name in SERIES:
        found = model.forecast_at(history, name, [fitted - 1, len(history) - 1])
        assert found[:, :, [0, 3, 6]].sum(axis=2) == pytest.approx(np.array(FIGURES[days, seed][name]), rel=1e-8)
