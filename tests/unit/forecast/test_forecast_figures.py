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
            [73.9900595, 70.2241064, 95.35124824, 165.0998596],
            [302.998239, 303.5826158, 297.4322955, 641.0714516],
        ],
        "prefill": [
            [70093.06519, 70260.4996, 95809.16755, 152462.4008],
            [275004.3031, 283000.8608, 268041.045, 615690.9476],
        ],
        "decode": [
            [18354.25588, 17568.82966, 21895.5608, 39088.36866],
            [79518.59671, 79253.79133, 79369.67331, 174279.2912],
        ],
    },
    (9, 4): {
        "requests": [
            [52.94395359, 56.27768116, 67.45058194, 62.18485863],
            [210.6388814, 212.1719449, 181.6991567, 238.3099835],
        ],
        "prefill": [
            [52675.64505, 55607.63349, 70546.90517, 67074.14469],
            [196337.7942, 192583.5404, 165138.931, 241723.637],
        ],
        "decode": [
            [14558.97057, 15875.86101, 18312.93213, 16520.23872],
            [62177.72487, 60218.87469, 51831.60223, 63894.5186],
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
