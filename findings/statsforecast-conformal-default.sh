#!/usr/bin/env bash
# statsforecast: with ConformalIntervals' default of two windows a 95 % band holds about 64 % of what comes.
# Met by: capacity plans that provision for the upper band of a demand forecast. The 95 % band is hardly wider than the
# 80 % band, since both are read off two residuals.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q statsforecast==2.1.1
cat > "$T/run.py" <<'PY'
import numpy, statsforecast
from statsforecast.models import HistoricAverage
from statsforecast.utils import ConformalIntervals

HOURS, HORIZON = 24 * 14, 24


def bands(intervals):
    """Return the share of held-out values inside, and the mean width, of the 80 and 95 % bands over 60 series."""
    inside, width = {80: [], 95: []}, {80: [], 95: []}
    for seed in range(60):
        series = 100 + numpy.random.default_rng(seed).normal(0, 10, HOURS)
        model = HistoricAverage(prediction_intervals=intervals)
        forecast = model.forecast(series[:-HORIZON], HORIZON, level=[80, 95])
        for level in inside:
            low, high = forecast[f"lo-{level}"], forecast[f"hi-{level}"]
            inside[level].append(numpy.mean((series[-HORIZON:] >= low) & (series[-HORIZON:] <= high)))
            width[level].append(numpy.mean(high - low))
    return {f"{level} %": (round(float(numpy.mean(inside[level])), 2), round(float(numpy.mean(width[level])), 1)) for level in inside}


default = ConformalIntervals(h=HORIZON)
seen = {"default, 2 windows": bands(default), "12 windows": bands(ConformalIntervals(n_windows=12, h=HORIZON)), "analytic": bands(None)}
print("version:     statsforecast", statsforecast.__version__)
print("expectation: 95 % bands hold about 95 % of independent normal noise, and are half as wide again as 80 % bands")
print("behaviour:   n_windows defaults to 2, and the 95th percentile of two residuals is little more than the larger one")
print("output (share inside, width):")
for name, figures in seen.items():
    print(f"             {name:20}{figures}")
covered, wide = seen["default, 2 windows"]["95 %"]
assert default.n_windows == 2 and covered < 0.75 and wide < 1.25 * seen["default, 2 windows"]["80 %"][1], "the behaviour has changed"
assert seen["analytic"]["95 %"][0] > 0.9 and seen["12 windows"]["95 %"][0] > covered + 0.1, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
