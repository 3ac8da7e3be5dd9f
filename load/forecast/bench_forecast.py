"""How much of one core forecasts take: a refit of many series, and one forecast. The last line is JSON.

CPU time, so that a busy machine gives nearly the same.
Series are drawn (days, weeks, bursts, level shifts, seeded); the figures depend on their length, not on their shape.
"""

import argparse
import json
import sys
import time
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from libs.policy.forecast.history import DemandHistory, history_from_rates
from libs.policy.forecast.model import DemandForecaster

HORIZONS: Final = (1, 6, 18, 144)
STEP_S: Final = 600.0


def main() -> None:
    """Measure, show, print one JSON line."""
    asked = _arguments()
    days = [int(each) for each in asked.days.split(",")]
    rows = [_measure(each, asked.series, asked.seed) for each in days]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("days", "bins", "refit of a series", f"of {asked.series}", "forecast p50", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['days']:g}", f"{row['bins']:g}", f"{row['refit_ms']:.1f} ms", f"{row['refit_all_s']:.1f} s",
            f"{row['forecast_p50_ms']:.1f} ms", f"{row['forecast_p99_ms']:.1f} ms",
        )  # fmt: skip
    Console(file=sys.stdout, highlight=False, width=120).print(table)
    print(json.dumps({"bench": "forecast", "series": asked.series, "horizons": HORIZONS, "rows": rows}))


def draw_demand(days: int, seed: int) -> DemandHistory:
    """Days and weeks, slow drift, bursts and a shift of level, in bins of 10 minutes."""
    rng = np.random.default_rng(seed)
    bins = days * 144
    at = np.arange(bins)
    drift = np.cumsum(rng.normal(0, 0.02, bins))
    log = 0.6 * np.sin(2 * np.pi * (at / 144 - rng.random())) - 0.4 * (at // 144 % 7 >= 5) + drift
    log += np.where(rng.random(bins) < 0.02, rng.exponential(0.8, bins), 0) + 0.7 * (at > bins * rng.random())
    requests = 20 * np.exp(log)
    known = requests * rng.uniform(0.2, 1, bins)
    lengths = 800 * np.exp(np.cumsum(rng.normal(0, 0.01, bins))), 200 * np.exp(np.cumsum(rng.normal(0, 0.01, bins)))
    rates = {"requests": requests, "known_requests": known, "prefill": known * lengths[0], "decode": known * lengths[1]}
    return history_from_rates(at * STEP_S, rates)


def _measure(days: int, series: int, seed: int) -> dict[str, float]:
    """A third as many histories as series: each has arrivals, prompt tokens and output tokens."""
    histories = [draw_demand(days, seed + each) for each in range(-(-series // 3))]
    forecaster = DemandForecaster()
    forecaster.fit(histories[0], HORIZONS)
    started = time.process_time()
    models = [forecaster.fit(history, HORIZONS) for history in histories]
    refit_s = time.process_time() - started
    took_ms = []
    for model, history in zip(models, histories, strict=True):
        for name in ("requests", "prefill", "decode"):
            at = time.process_time()
            model.forecast_at(history, name, [len(history) - 1])
            took_ms.append(1e3 * (time.process_time() - at))
    each_s = refit_s / (3 * len(histories))
    p50, p99 = np.quantile(took_ms, [0.5, 0.99])
    return {
        "days": days,
        "bins": days * 144,
        "refit_ms": round(1e3 * each_s, 2),
        "refit_all_s": round(each_s * series, 2),
        "forecast_p50_ms": round(float(p50), 2),
        "forecast_p99_ms": round(float(p99), 2),
    }


def _arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--series", type=int, default=500, help="refitted one after the other")
    made.add_argument("--days", default="1,14,56", help="lengths of history, with commas between")
    made.add_argument("--seed", type=int, default=1)
    return made.parse_args()


if __name__ == "__main__":
    main()
