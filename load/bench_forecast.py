"""Compare forecasts of a suite of series with baselines, and measure their CPU time. The last line is JSON.

    make bench-forecast ARGS="--half reporting"

Each row is a series and phase. For ten minutes to 24 hours ahead it has the error (WAPE) over that of the best baseline
*in hindsight*, and the share of outcomes in the 90 % band. Then follow geometric means, coverage after a change, and
CPU time. Speed depends only on the length of a series, and is measured on seeded random series with days, weeks, bursts
and level shifts.

The suite has two halves, each with series of real services and synthetic ones. Choices in `libs.policy.forecast` are
made on the tuning half only; figures are reported for the other half. Real series are read from the folder
`FULCRUM_DATA`. Series without their file are left out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.table import Table

from libs.cli.console import plain_table
from libs.forecast.backtest import HORIZONS_S, BacktestForecasts, inside, interval_score, make_plan, run, score
from libs.forecast.baselines import light_baselines
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, SeriesName, history_from_rates
from libs.policy.forecast.model import DemandForecaster
from load.forecast_series import CHANGED, CHANGED_DAY, DAY, STEP_S, SuiteSeries, suite
from load.measure import show, titled_table

HORIZONS: Final = (1, 6, 18, 144)
# The lengths of short histories in days, and the distance in bins between their starts.
SHORT_DAYS: Final = (1, 2, 3, 4, 7)
FAR_AHEAD: Final = (36, 72, 144, 290, 504, 650)
SHORT_EVERY: Final = 223
MEDIAN: Final = LEVELS.index(0.5)
# The number of bins after a change from which bands must be right again.
RECOVERY_BINS: Final = 24
WEEK_BINS: Final = 1008
AIM_RATIO, AIM_FAR, AIM_NEAR = 1.03, 0.92, 1.0
AIM_COVERAGE, AIM_COVERAGE_OF_A_DAY = (0.87, 0.93), (0.84, 0.96)


def main() -> None:
    options = _arguments()
    found: dict[str, Any] = {"bench": "forecast", "half": options.half, "every": options.every}
    if options.half != "none":
        records, recovery = _accuracy(options)
        show(_table(records))
        summary = summarize(records)
        print(*in_words(summary, recovery), sep="\n")
        short = _short_histories(options)
        show(_short_table(short))
        found |= {"records": records, "summary": summary, "recovery": recovery, "short": short}
    if options.days:
        rows = [_measure(int(each), options.series, options.seed) for each in options.days.split(",")]
        show(_speeds(rows, options.series))
        found |= {"series": options.series, "horizons": HORIZONS, "rows": rows}
    print(json.dumps(found))


def _series(options: argparse.Namespace) -> list[tuple[SuiteSeries, DemandHistory]]:
    return suite(Path(os.environ.get("FULCRUM_DATA", "")), None if options.half == "both" else options.half)


def _accuracy(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rivals = light_baselines()
    records: list[dict[str, Any]] = []
    recovery: dict[str, float] = {}
    for each, history in _series(options):
        forecasts = run(history, make_plan(history, HORIZONS_S), DemandForecaster(), rivals, every=options.every)
        if each.name in CHANGED:
            recovery |= {f"{each.name} {name}": held for name, held in _recovery(forecasts).items()}
        for record in score(forecasts):
            best = record["best_in_hindsight"]
            kept = {key: record[key] for key in ("series", "horizon_s", "wape", "wis", "coverage90")}
            theirs = {name: {"wape": one["wape"], "wis": one["wis"]} for name, one in record["baselines"].items()}
            records.append({
                "file": each.name, "half": each.half, "bins": len(history), **kept, "best": best,
                "ratio": record["wape"] / theirs[best]["wape"] if best and theirs[best]["wape"] else None,
                "coverage90_error": record["coverage90_error"], "baselines": theirs,
            })  # fmt: skip
        print(f"{each.name}: done", file=sys.stderr, flush=True)
    return records, recovery


def _short_histories(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the mean outcomes of forecasts for all series and many origins, by days of history and horizon."""
    cells: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for _, history in _series(options):
        for days in SHORT_DAYS:
            for start in range(0, max(len(history) - days * DAY, 1), SHORT_EVERY):
                _try_short(history, start, days, cells)
    return [
        {"days": days, "horizon_s": ahead * STEP_S, "forecasts": len(rows)}
        | dict(zip(("coverage90", "below_p95", "width", "wis_log"), np.mean(rows, axis=0).tolist(), strict=True))
        for (days, ahead), rows in sorted(cells.items())
    ]


def _try_short(
    history: DemandHistory, start: int, days: int, cells: dict[tuple[int, int], list[tuple[float, ...]]]
) -> None:
    """Add the outcomes of forecasts that know `days` of history from bin `start` on.

    Widths and scores are logarithms.
    """
    count = days * DAY
    series = (history.requests[start:], history.prefill[start:], history.decode[start:])
    part = DemandHistory(history.step_s, history.start_s + start * history.step_s, *series)
    ahead = tuple(each for each in FAR_AHEAD if count + each <= len(part))
    if not ahead:
        return
    fitted = DemandForecaster().fit(part.before(count), ahead)
    for name in SERIES:
        if (model := fitted.models[name]) is None:
            continue
        said = fitted.forecast_at(part.before(count), name, [count - 1])[0]
        for horizon, quantiles in zip(ahead, np.log(said + model.offset + 1e-12), strict=True):
            came = np.log(part.series(name)[count - 1 + horizon] + model.offset + 1e-12)
            if isfinite(came):
                outcome, said_here = np.array([came]), quantiles[None]
                held, wis = float(inside(outcome, said_here)[0]), interval_score(outcome, said_here)
                row = (held, float(came <= quantiles[-1]), float(quantiles[-1] - quantiles[MEDIAN]), wis)
                cells.setdefault((days, horizon), []).append(row)


def _short_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = "90 % bands far ahead of short histories: share that held, p95 over p50"
    table = titled_table(title, "days of history", *(f"{each * STEP_S / 3600:.0f} h" for each in FAR_AHEAD))
    for days in SHORT_DAYS:
        by_horizon = {each["horizon_s"]: each for each in rows if each["days"] == days}
        found = [by_horizon.get(each * STEP_S) for each in FAR_AHEAD]
        table.add_row(
            str(days),
            *("–" if each is None else f"{each['coverage90']:.2f}  x{exp(each['width']):.1f}" for each in found),
        )
    return table


def _recovery(found: BacktestForecasts) -> dict[str, float]:
    """Return the share of outcomes in the bands, by series, for the day that starts `RECOVERY_BINS` after the change.

    The longest horizon, a day, has its own entry, because its first forecasts were made before the change.
    """
    held: dict[str, float] = {}
    places = list(range(len(found.plan.horizons)))
    for name in SERIES:
        held[name] = _held_after_change(found, name, places[:-1])
        held[f"{name} a day ahead"] = _held_after_change(found, name, places[-1:])
    return held


def _held_after_change(found: BacktestForecasts, name: SeriesName, places: Sequence[int]) -> float:
    first = int(CHANGED_DAY * DAY) + RECOVERY_BINS
    actual, parts = found.history.series(name), []
    for place in places:
        horizon = found.plan.horizons[place]
        origins = np.arange(first, min(first + DAY, len(actual) - horizon))
        said = found.ours[name][origins, place]
        known = np.isfinite(said[:, 0]) & np.isfinite(actual[origins + horizon])
        parts.append(inside(actual[origins + horizon][known], said[known]))
    return float(np.concatenate(parts).mean())


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the known values; None if there are none."""
    known = [log(each) for each in values if each and isfinite(each)]
    return exp(sum(known) / len(known)) if known else None


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures with an aim. Ratios are geometric means."""
    near = [each for each in records if each["horizon_s"] < 3600]
    far = [each for each in records if each["horizon_s"] >= 3600]
    names = sorted({name for each in records for name in each["baselines"]})
    long = [each for each in records if each["bins"] >= WEEK_BINS]
    short = [each for each in records if each["bins"] < WEEK_BINS]
    return {
        "near": _mean(each["ratio"] for each in near),
        "far": _mean(each["ratio"] for each in far),
        "above": [
            [each["file"], each["series"], each["horizon_s"], round(each["ratio"], 3), each["best"]]
            for each in records
            if each["ratio"] and each["ratio"] > AIM_RATIO
        ],
        "rows": len(records),
        "wis": {name: _mean(_over(each["wis"], each["baselines"].get(name, {}).get("wis")) for each in records)
                for name in names},
        "held": [sum(AIM_COVERAGE[0] <= each["coverage90"] <= AIM_COVERAGE[1] for each in long), len(long)],
        "held_of_a_day": [
            sum(AIM_COVERAGE_OF_A_DAY[0] <= each["coverage90"] <= AIM_COVERAGE_OF_A_DAY[1] for each in short),
            len(short),
        ],
        "held_outside": [
            [each["file"], each["series"], each["horizon_s"], round(each["coverage90"], 3)]
            for each in long
            if not AIM_COVERAGE[0] <= each["coverage90"] <= AIM_COVERAGE[1]
        ],
    }  # fmt: skip


def _over(ours: float, theirs: float | None) -> float | None:
    return ours / theirs if theirs else None


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def in_words(summary: dict[str, Any], recovery: dict[str, float]) -> list[str]:
    lines = [
        f"over the best baseline in hindsight: {_shown(summary['near'])} at 10 min (aim {AIM_NEAR}), "
        f"{_shown(summary['far'])} from 1 h on (aim {AIM_FAR}); "
        f"above {AIM_RATIO} in {len(summary['above'])} of {summary['rows']}",
        "WIS over each baseline's: " + ", ".join(f"{name} {_shown(value)}" for name, value in summary["wis"].items()),
        f"90 % bands hold 0.87 to 0.93 in {summary['held'][0]} of {summary['held'][1]} of a week or more, 0.84 to 0.96 "
        f"in {summary['held_of_a_day'][0]} of {summary['held_of_a_day'][1]} shorter ones",
    ]
    if recovery:
        lines.append(
            f"from {RECOVERY_BINS} bins after a change on, for a day, up to 3 h ahead and a day ahead: "
            + ", ".join(f"{name} {held:.2f}" for name, held in recovery.items())
        )
    return lines


def _table(records: Sequence[dict[str, Any]]) -> Table:
    titles = ("series", "half", "phase", "10 min", "1 h", "3 h", "24 h", "best baselines")
    table = plain_table(*titles, left=titles)
    rows: dict[tuple[str, str, str], dict[float, dict[str, Any]]] = {}
    for each in records:
        rows.setdefault((each["file"], each["half"], each["series"]), {})[each["horizon_s"]] = each
    for (file, half, phase), by_horizon in rows.items():
        cells = [
            f"{by_horizon[at]['ratio'] or 0:.2f}  {by_horizon[at]['coverage90']:.2f}" if at in by_horizon else "–"
            for at in HORIZONS_S
        ]
        best = ", ".join(str(by_horizon[at]["best"]) for at in HORIZONS_S if at in by_horizon)
        table.add_row(file, half, phase, *cells, best)
    return table


def _speeds(rows: Sequence[dict[str, float]], series: int) -> Table:
    table = plain_table("days", "bins", "refit of a series", f"of {series}", "forecast p50", "p99")
    for row in rows:
        table.add_row(
            f"{row['days']:g}", f"{row['bins']:g}", f"{row['refit_ms']:.1f} ms", f"{row['refit_all_s']:.1f} s",
            f"{row['forecast_p50_ms']:.1f} ms", f"{row['forecast_p99_ms']:.1f} ms",
        )  # fmt: skip
    return table


def draw_demand(days: int, seed: int) -> DemandHistory:
    """Draw a demand with days, weeks, slow drift, bursts and a level shift, in bins of 10 minutes."""
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
    """Return the CPU times of one core. There are a third as many histories as series, since each has three series."""
    histories = [draw_demand(days, seed + each) for each in range(-(-series // 3))]
    forecaster = DemandForecaster()
    forecaster.fit(histories[0], HORIZONS)
    started = time.process_time()
    models = [forecaster.fit(history, HORIZONS) for history in histories]
    refit_s = time.process_time() - started
    took_ms = []
    for model, history in zip(models, histories, strict=True):
        for name in SERIES:
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
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--half", choices=("tuning", "reporting", "both", "none"), default="reporting")
    made.add_argument("--every", type=int, default=1, help="forecast from every n-th bin only")
    made.add_argument("--series", type=int, default=500, help="refitted one after the other")
    made.add_argument("--days", default="14", help="lengths of history to time, with commas between; empty: none")
    made.add_argument("--seed", type=int, default=1)
    return made.parse_args()


if __name__ == "__main__":
    main()
