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
            [73.90068484, 70.30938955, 89.47779754, 158.8986749],
            [302.6256591, 299.2247761, 291.1006163, 665.8037574],
        ],
        "prefill": [
            [69893.12857, 68530.73972, 85379.26094, 148175.8125],
            [275196.533, 281933.6213, 271199.3633, 634972.5375],
        ],
        "decode": [
            [18359.72842, 17534.83676, 21803.60614, 37574.70415],
            [79284.1957, 78965.85608, 75892.45982, 180571.116],
        ],
    },
    (9, 4): {
        "requests": [
            [52.89778192, 56.28776597, 66.45965197, 61.17047796],
            [210.3055718, 211.2048486, 178.7471796, 234.3334889],
        ],
        "prefill": [
            [52716.90684, 56460.41431, 69811.34251, 67724.33036],
            [196429.9084, 192018.672, 162764.4439, 236971.9777],
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
