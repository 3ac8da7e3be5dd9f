"""Errors of a total and of its parts, before and after their forecasts agree. The last line is JSON.

    FULCRUM_DATA=… python -m load.bench_forecast_parts --every 6

One hierarchy is the models of an image service, its largest and all others together. Two are sums of the series of
each half (see `load.forecast_series`), scaled to the same mean. Errors are WAPE over all parts or of the
total, as ratios to those of forecasts that do not agree.
"""

import argparse
import csv
import json
import os
from collections import Counter
from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from libs.cli.console import plain_table
from libs.forecast.backtest import HORIZONS_S, inside, interval_score, make_plan, run
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, SeriesName
from libs.policy.forecast.model import DemandForecaster
from libs.policy.forecast.reconcile import MEDIAN, reconcile
from load.forecast_series import DAY, STEP_S, SUITE, Half, images
from load.measure import show

IMAGES: Final = "alibaba_genai_2024-11.csv"
MODELS: Final = 7
# A part's mean arrivals a second, so that no part of a sum dominates it.
MEAN: Final = 10.0


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--every", type=int, default=6, help="forecast from every n-th bin only")
    every, folder = made.parse_args().every, Path(os.environ.get("FULCRUM_DATA", ""))
    hierarchies = {"tuning": summed(folder, "tuning"), "reporting": summed(folder, "reporting")}
    if (folder / IMAGES).is_file():
        hierarchies["image models"] = image_models(folder / IMAGES)
    records = [record for name, parts in hierarchies.items() for record in measure(name, parts, every)]
    show(_table(records))
    print(json.dumps({"bench": "forecast_parts", "every": every, "records": records}))


def image_models(path: Path) -> list[DemandHistory]:
    """Return the demand of the largest models, and of all others together."""
    with path.open(newline="") as file:
        counted = Counter(row["model"] for row in csv.DictReader(file))
    largest = [model for model, _ in counted.most_common(MODELS)]
    parts = [images(model)(path) for model in largest] + [images(*(counted.keys() - set(largest)))(path)]
    count = min(map(len, parts))
    return [each.before(count) for each in parts]


def summed(folder: Path, half: Half) -> list[DemandHistory]:
    """Return the series of a half that have prompts and last two weeks, scaled to the same mean."""
    parts = []
    for each in SUITE:
        if each.half != half or (each.file and not (folder / each.file).is_file()):
            continue
        history = each.read(folder / each.file)
        if len(history) < 14 * DAY or not np.isfinite(history.prefill).any():
            continue
        requests, prefill, decode = (np.nan_to_num(history.series(name)[-14 * DAY :]) for name in SERIES)
        scale = MEAN / float(requests.mean())
        parts.append(DemandHistory(STEP_S, 0.0, scale * requests, scale * prefill, scale * decode))
    return parts


def measure(name: str, parts: list[DemandHistory], every: int) -> Iterable[dict[str, Any]]:
    """Yield a record for each series and horizon."""
    requests, prefill, decode = (np.sum([each.series(at) for each in parts], axis=0) for at in SERIES)
    total = DemandHistory(STEP_S, 0.0, requests, prefill, decode)
    plan = make_plan(total, HORIZONS_S)
    said = [run(each, plan, DemandForecaster(), [], every=every).ours for each in (total, *parts)]
    for series in SERIES:
        came = np.stack([each.series(series) for each in (total, *parts)])
        if np.nanmax(came[0], initial=0.0) > 0:  # not the prompts of images, which are unknown
            for place, horizon in enumerate(plan.horizons):
                quantiles = np.stack([each[series][:, place] for each in said])
                yield {"file": name, "parts": len(parts), **_record(quantiles, came, horizon, plan.test_from, series)}


def _record(said: Floats, came: Floats, horizon: int, test_from: int, series: SeriesName) -> dict[str, Any]:
    """`said` is [1 + parts, n, levels] and `came` [1 + parts, n], the total first in both."""
    origins = np.arange(max(test_from - horizon, 0), came.shape[1] - horizon)
    origins = origins[
        np.isfinite(said[:, origins, 0]).all(axis=0) & np.isfinite(came[:, origins + horizon]).all(axis=0)
    ]
    before, actual = said[:, origins], came[:, origins + horizon]
    total, parts = reconcile(before[0], before[1:])
    after = np.concatenate([total[None], parts])
    errors = [np.abs(each[:, :, MEDIAN] - actual).sum(axis=1) for each in (before, after)]
    scores = [[interval_score(a, q) for a, q in zip(actual, each, strict=True)] for each in (before, after)]
    apart = before[1:, :, MEDIAN].sum(axis=0)
    return {
        "series": series,
        "horizon_s": horizon * STEP_S,
        "forecasts": len(origins),
        "total": float(errors[1][0] / errors[0][0]),
        "sum_of_parts": float(np.abs(apart - actual[0]).sum() / errors[0][0]),
        "parts": float(errors[1][1:].sum() / errors[0][1:].sum()),
        "wis_total": scores[1][0] / scores[0][0],
        "wis_parts": sum(scores[1][1:]) / sum(scores[0][1:]),
        "coverage90": [
            float(np.mean([inside(a, q).mean() for a, q in zip(actual[1:], each[1:], strict=True)]))
            for each in (before, after)
        ],
        "gap_before": float(np.abs(apart - before[0, :, MEDIAN]).sum() / before[0, :, MEDIAN].sum()),
        "gap_after": float(np.abs(after[1:, :, MEDIAN].sum(axis=0) - after[0, :, MEDIAN]).max()),
    }


def _table(records: list[dict[str, Any]]) -> Table:
    titles = ("hierarchy", "horizon", "gap before", "after", "total", "sum alone", "parts", "WIS total", "WIS parts")
    table = plain_table(*titles, left=titles)
    for name in dict.fromkeys(each["file"] for each in records):
        for horizon_s in (*dict.fromkeys(each["horizon_s"] for each in records), None):
            rows = [each for each in records if each["file"] == name and horizon_s in (None, each["horizon_s"])]
            means = [
                exp(sum(log(row[key]) for row in rows) / len(rows))
                for key in ("total", "sum_of_parts", "parts", "wis_total", "wis_parts")
            ]
            gap, after = max(row["gap_before"] for row in rows), max(row["gap_after"] for row in rows)
            when = "all" if horizon_s is None else f"{horizon_s / 3600:.2g} h"
            table.add_row(name, when, f"{gap:.0%}", f"{after:g}", *(f"{each:.3f}" for each in means))
    return table


if __name__ == "__main__":
    main()
