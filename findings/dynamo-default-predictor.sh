#!/usr/bin/env bash
# Dynamo's planner: the default load predictor, "arima", chooses its order once, from the first five intervals. On
# requests that arrive at random it then finds no order at all, (0, 0, 0), which is the mean of all history, and only
# the mean is updated. After load has doubled it forecasts the old load for hours.
# Met by: fleets scaled by Dynamo's planner with its defaults and without a warm-up trace. One would expect auto-ARIMA
# to choose again as history grows, and a forecast never much worse than the last value.
# The predictors are loaded without the package's __init__, which needs a package that PyPI has only as a stub.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q pmdarima==2.1.1 prophet==1.5.0 filterpy==2.0.0 pandas==3.1.1 numpy==2.4.6 \
  scikit-learn==1.7.2 scipy==1.17.1 statsmodels==0.15.0 pydantic==2.13.4 PyYAML==6.0.4 msgspec==0.23.0
"$T/v/bin/python" -m pip install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 uvloop==0.22.1
cat > "$T/run.py" <<'PY'
import importlib.util
import logging
import sys
import types
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np

folder = Path(importlib.util.find_spec("dynamo").submodule_search_locations[0]) / "planner"
for name in ("", ".core", ".core.load"):
    package = types.ModuleType(f"dynamo.planner{name}")
    package.__path__ = [str(folder.joinpath(*name.split(".")))]
    sys.modules[package.__name__] = package

from dynamo.planner.config.planner_config import PlannerConfig
from dynamo.planner.core.load.predictors import LOAD_PREDICTORS

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
config = PlannerConfig.model_construct(**{name: field.default for name, field in PlannerConfig.model_fields.items()})

CHANGE, INTERVALS, TRIALS = 60, 80, 5
minutes = config.throughput_adjustment_interval_seconds / 60


def forecasts(name, counts):
    """Forecast each interval from those before it, as the planner does."""
    predictor, found = LOAD_PREDICTORS[name](config), []
    for count in counts:
        found.append(predictor.predict_next())
        predictor.add_data_point(float(count))
    return np.array(found), getattr(getattr(predictor, "model", None), "order", None)


print("versions:    ai-dynamo", version("ai-dynamo"), "with pmdarima", version("pmdarima"))
print("default:    ", config.load_predictor, f"over intervals of {minutes:g} min")
print(f"load:         1,000 requests an interval (Poisson), 2,000 from the {CHANGE}th on")
print(f"expectation:  about 2,000 at the {INTERVALS}th, {(INTERVALS - CHANGE) * minutes:g} minutes later")
plain = 0
for seed in range(TRIALS):
    counts = np.random.default_rng(seed).poisson([1000] * CHANGE + [2000] * (INTERVALS - CHANGE))
    shown = []
    for name in ("constant", "kalman", config.load_predictor):
        found, order = forecasts(name, counts)
        error = np.abs(found - counts)[CHANGE + 1 :].mean()
        shown.append(f"{name} {found[-1]:.0f} (mean error {error:.0f})")
    print(f"seed {seed}:      ", "; ".join(shown), "order", order)
    plain += order == (0, 0, 0)
    worst = found[-1]
    assert order != (0, 0, 0) or worst < 1500, "the behaviour has changed"
print(f"behaviour:    in {plain} of {TRIALS} the order is (0, 0, 0)")
assert config.load_predictor == "arima" and plain >= 3, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
