"""Forecasts of a suite of series beside baselines, and their CPU time. The last line is JSON.

    make bench-forecast ARGS="--half reporting"

Each row is a series and phase: the error (WAPE) over that of the best baseline *in hindsight*, and how often the 90
% band held, ten minutes to 24 hours ahead. Then follow geometric means, coverage after a change, and CPU time.
Speed is measured on drawn series (days, weeks, bursts, level shifts, seeded): it depends on their length alone.

The suite has real services and made series in each of two halves. Choices in `libs.policy.forecast` are made on the
tuning half alone; the reporting half is for figures. Real series come from the folder in `FULCRUM_DATA`; missing files
are left out.
"""

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from libs.cli.console import plain_table
from libs.forecast.backtest import HORIZONS_S, BacktestForecasts, inside, make_plan, run, score
from libs.forecast.baselines import heavy_baselines, light_baselines
from libs.forecast.demand_file import read_demand
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, history_from_rates
from libs.policy.forecast.model import DemandForecaster

STEP_S: Final = 600.0
DAY: Final = 144
WEEKS: Final = 14 * DAY
# Traces of an hour are laid out with ten of their seconds to a bin of ten minutes: two and a half days.
STRETCH_S: Final = 10.0
# When made series change for good: inside the scored days.
CHANGED_DAY: Final = 11.5

Half = Literal["tuning", "reporting"]


@dataclass(frozen=True, slots=True)
class SuiteSeries:
    name: str
    half: Half
    read: Callable[[Path], DemandHistory]
    file: str = ""
    """File in the data folder; empty for made series."""


def suite(folder: Path, half: Half | None = None) -> list[tuple[SuiteSeries, DemandHistory]]:
    """Return all series of a half, or of both, whose files exist."""
    return [
        (each, each.read(folder / each.file))
        for each in SUITE
        if half in {None, each.half} and (not each.file or (folder / each.file).is_file())
    ]


def _binned(times_s: Floats, prefill: Floats | None, decode: Floats, step_s: float) -> DemandHistory:
    """Return rates of single requests in bins, without the last, incomplete one. `prefill` None means unknown."""
    places = (times_s // step_s).astype(np.int64)
    bins = int(places.max())
    rates = [np.bincount(places, weights, minlength=bins + 1)[:bins] / step_s for weights in (None, prefill, decode)]
    if prefill is None:
        rates[1] = np.full(bins, np.nan)
    named = {"requests": rates[0], "known_requests": rates[0], "prefill": rates[1], "decode": rates[2]}
    return history_from_rates(np.arange(bins) * STEP_S, named, STEP_S)


def _images(*models: str) -> Callable[[Path], DemandHistory]:
    """Return a reader of requests to these models of an image service (all if none are named), with seconds of work
    for each.
    """

    def read(path: Path) -> DemandHistory:
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if not models or row["model"] in models]
        times_s = np.array([float(row["t_s"]) for row in rows])
        work = np.array([float(row["exec_s"] or 0) for row in rows])
        return _binned(times_s, None, work, STEP_S)

    return read


def _azure(path: Path) -> DemandHistory:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times_s = np.array([datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows])
    lengths = [np.array([float(row[name]) for row in rows]) for name in ("ContextTokens", "GeneratedTokens")]
    return _binned(times_s - times_s.min(), lengths[0], lengths[1], STRETCH_S)


def _mooncake(path: Path) -> DemandHistory:
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    # Its clock ticks every three seconds: arrivals are spread within a tick.
    times_s = np.array([row["timestamp"] / 1000 for row in rows]) + np.random.default_rng(1).uniform(0, 3, len(rows))
    lengths = [np.array([float(row[name]) for row in rows]) for name in ("input_length", "output_length")]
    return _binned(times_s, lengths[0], lengths[1], STRETCH_S)


def _wander(rng: np.random.Generator, bins: int, size: float, half_life: float) -> Floats:
    """Return correlated noise: an autoregression of order one with standard deviation `size`."""
    keep = 0.5 ** (1 / half_life)
    level, out = rng.normal(0, size), np.empty(bins)
    for at, step in enumerate(rng.normal(0, size * np.sqrt(1 - keep * keep), bins)):
        level = keep * level + step
        out[at] = level
    return out


@dataclass(frozen=True, slots=True)
class _MadeSeries:
    """The base of a made series: logarithms of arrivals and lengths."""

    rng: np.random.Generator
    at_day: Floats
    arrivals: Floats
    prompts: Floats
    outputs: Floats

    def counted(self, requests: float) -> DemandHistory:
        """Count arrivals in each bin; lengths scatter with their number. `requests` is the mean per second at log 0."""
        count = self.rng.poisson(requests * STEP_S * np.exp(self.arrivals))
        lengths = [
            np.exp(log) * np.exp(self.rng.normal(0, 1, len(count)) / np.sqrt(np.maximum(count, 1)))
            for log in (self.prompts + np.log(900.0), self.outputs + np.log(220.0))
        ]
        rate = count / STEP_S
        known = np.where(count > 20, rate * self.rng.uniform(0.4, 1.0, len(count)), rate)
        rates = {"requests": rate, "known_requests": known, "prefill": known * lengths[0], "decode": known * lengths[1]}
        return history_from_rates(np.arange(len(count)) * STEP_S, rates, STEP_S)


def _base(seed: int, bins: int = WEEKS, *, day: float = 0.6, noise: float = 0.12, hours: float = 4) -> _MadeSeries:
    """Draw a day with its own shape, noise of minutes and of hours, and bursts of one client."""
    rng = np.random.default_rng(seed)
    at_day = np.arange(bins) / DAY
    phase, second = rng.random(2)
    shape = np.sin(2 * np.pi * (at_day - phase)) + 0.35 * np.sin(4 * np.pi * (at_day - second))
    arrivals = day * shape + _wander(rng, bins, noise, hours * 6) + rng.normal(0, noise / 2, bins)
    burst = np.zeros(bins)
    for start in np.flatnonzero(rng.random(bins) < 0.008).tolist():
        burst[start : start + int(rng.integers(1, 9))] += rng.exponential(0.4)
    prompts, outputs = _wander(rng, bins, 0.1, 30), _wander(rng, bins, 0.1, 60)
    return _MadeSeries(rng, at_day, arrivals + burst, prompts + 0.5 * burst, outputs)


def _shifted(made: _MadeSeries, arrivals: Floats | float = 0.0, *, prompts: Floats | float = 0.0,
             outputs: Floats | float = 0.0) -> _MadeSeries:  # fmt: skip
    return _MadeSeries(made.rng, made.at_day, made.arrivals + arrivals, made.prompts + prompts, made.outputs + outputs)


def _trend(_: Path) -> DemandHistory:
    made = _base(21)
    return _shifted(made, 0.09 * made.at_day).counted(4.0)


def _weekly(_: Path) -> DemandHistory:
    made = _base(22, 28 * DAY, day=0.9)
    weekend = (made.at_day // 1 % 7 >= 5).astype(np.float64)
    return _shifted(made, -1.1 * weekend, outputs=0.4 * weekend).counted(12.0)


def _launch(_: Path) -> DemandHistory:
    made = _base(23, noise=0.2)
    return _shifted(made, -4.0 / (1 + np.exp((made.at_day - CHANGED_DAY) * 3))).counted(40.0)


def _migration(_: Path) -> DemandHistory:
    """Half of the demand leaves within a day, that of long outputs last."""
    made = _base(24)
    gone = np.clip(made.at_day - CHANGED_DAY, 0, 1)
    return _shifted(made, np.log(1 - 0.6 * gone), outputs=0.5 * gone).counted(25.0)


def _outages(_: Path) -> DemandHistory:
    """No arrivals for up to three hours, four times; no data for two hours, twice; a rush after each."""
    made = _base(25)
    history, rush = made.counted(8.0), np.zeros(WEEKS)
    series = [values.copy() for values in (history.requests, history.prefill, history.decode)]
    for day, hours in ((3.4, 1.0), (7.7, 3.0), (10.9, 1.5), (12.6, 2.0)):
        start, end = int(day * DAY), int(day * DAY + hours * 6)
        rush[end : end + 4] = 0.6
        for values in series:
            values[start:end] = 0.0
            values[end : end + 4] *= np.exp(0.6)
    for day in (5.2, 11.3):
        for values in series:
            values[int(day * DAY) : int(day * DAY) + 12] = np.nan
    return DemandHistory(STEP_S, 0.0, series[0], series[1], series[2])


def _regime(_: Path) -> DemandHistory:
    """Another client: arrivals double, outputs triple, and the daily pattern weakens, from one bin to the next."""
    made, other = _base(26), _base(27, day=0.2, noise=0.25, hours=1)
    after = made.at_day >= CHANGED_DAY
    mixed = _MadeSeries(
        made.rng,
        made.at_day,
        np.where(after, other.arrivals + 0.7, made.arrivals),
        made.prompts,
        made.outputs + 1.1 * after,
    )
    return mixed.counted(6.0)


def _one_day(_: Path) -> DemandHistory:
    return _base(28, DAY, day=0.7).counted(3.0)


def _resets(_: Path) -> DemandHistory:
    """Counters that were reset: bins with a part of the arrivals, and bins after them with twice as many."""
    history = _base(29, noise=0.2).counted(15.0)
    rng = np.random.default_rng(30)
    series = [values.copy() for values in (history.requests, history.prefill, history.decode)]
    for place in rng.choice(WEEKS - 1, 40, replace=False).tolist():
        part = rng.uniform(0, 0.4)
        for values in series:
            values[place], values[place + 1] = values[place] * part, values[place + 1] + values[place] * (1 - part)
    return DemandHistory(STEP_S, 0.0, series[0], series[1], series[2])


def _bursty(_: Path) -> DemandHistory:
    """No season, much noise, few requests: one client in ten makes a third of all."""
    made = _base(31, day=0.05, noise=0.5, hours=0.7)
    return made.counted(0.08)


def _drifting(_: Path) -> DemandHistory:
    """A level that drifts for good, and a weak daily pattern."""
    made = _base(32, day=0.25, noise=0.08)
    return _shifted(made, np.cumsum(made.rng.normal(0, 0.035, len(made.at_day)))).counted(30.0)


SUITE: Final[tuple[SuiteSeries, ...]] = (
    SuiteSeries("m-large", "tuning", read_demand, "servegen_m-large_10min.csv"),
    SuiteSeries("images-all", "tuning", _images(), "alibaba_genai_2024-11.csv"),
    SuiteSeries("images-M0002", "tuning", _images("M0002"), "alibaba_genai_2024-11.csv"),
    SuiteSeries("azure-code", "tuning", _azure, "azure_code_2023.csv"),
    SuiteSeries("weekly", "tuning", _weekly),
    SuiteSeries("launch", "tuning", _launch),
    SuiteSeries("outages", "tuning", _outages),
    SuiteSeries("one-day", "tuning", _one_day),
    SuiteSeries("drifting", "tuning", _drifting),
    SuiteSeries("m-small", "reporting", read_demand, "servegen_m-small_10min.csv"),
    SuiteSeries("deepseek-r1", "reporting", read_demand, "servegen_deepseek-r1_10min.csv"),
    SuiteSeries("images-M0001", "reporting", _images("M0001"), "alibaba_genai_2024-11.csv"),
    SuiteSeries("images-M0004", "reporting", _images("M0004"), "alibaba_genai_2024-11.csv"),
    SuiteSeries("mooncake", "reporting", _mooncake, "mooncake_conversation.jsonl"),
    SuiteSeries("trend", "reporting", _trend),
    SuiteSeries("migration", "reporting", _migration),
    SuiteSeries("regime", "reporting", _regime),
    SuiteSeries("resets", "reporting", _resets),
    SuiteSeries("bursty", "reporting", _bursty),
)

# Made series that change for good on `CHANGED_DAY`.
CHANGED: Final = frozenset({"launch", "migration", "regime"})


HORIZONS: Final = (1, 6, 18, 144)
# How far ahead a history of some days is tried, in bins, and how far apart its beginnings lie.
SHORT_DAYS: Final = (1, 2, 3, 4, 7)
FAR_AHEAD: Final = (36, 72, 144, 290, 504, 650)
SHORT_EVERY: Final = 223
# Bands must hold again within so many bins after a change.
RECOVERY_BINS: Final = 24
WEEK_BINS: Final = 1008
AIM_RATIO, AIM_FAR, AIM_NEAR = 1.03, 0.92, 1.0
AIM_COVERAGE, AIM_COVERAGE_OF_A_DAY = (0.87, 0.93), (0.84, 0.96)


def main() -> None:
    asked = _arguments()
    console = Console(file=sys.stdout, highlight=False, width=150)
    found: dict[str, Any] = {"bench": "forecast", "half": asked.half, "every": asked.every}
    if asked.half != "none":
        records, recovery = _accuracy(asked)
        console.print(_table(records))
        summary = summarize(records)
        for line in in_words(summary, recovery):
            console.print(line)
        short = _short_histories(asked)
        console.print(_short_table(short))
        found |= {"records": records, "summary": summary, "recovery": recovery, "short": short}
    if asked.days:
        rows = [_measure(int(each), asked.series, asked.seed) for each in asked.days.split(",")]
        console.print(_speeds(rows, asked.series))
        found |= {"series": asked.series, "horizons": HORIZONS, "rows": rows}
    print(json.dumps(found))


def _accuracy(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rivals = light_baselines() + (heavy_baselines(asked.heavy.split(",")) if asked.heavy else [])
    records: list[dict[str, Any]] = []
    recovery: dict[str, float] = {}
    for each, history in suite(Path(os.environ.get("FULCRUM_DATA", "")), None if asked.half == "both" else asked.half):
        forecasts = run(history, make_plan(history, HORIZONS_S), DemandForecaster(), rivals, every=asked.every)
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


def _short_histories(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return, by days of history and horizon, how forecasts of all series and many origins came out."""
    cells: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for _, history in suite(Path(os.environ.get("FULCRUM_DATA", "")), None if asked.half == "both" else asked.half):
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
    """Add the outcomes of forecasts from the end of `days` from bin `start` on. Widths and scores are logarithms."""
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
                off = came - quantiles
                losses = np.where(off >= 0, np.array(LEVELS) * off, (np.array(LEVELS) - 1) * off)
                held = inside(np.array([came]), quantiles[None])[0]
                row = (float(held), float(off[-1] <= 0), float(quantiles[-1] - quantiles[3]), 2 * float(losses.mean()))
                cells.setdefault((days, horizon), []).append(row)


def _short_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = plain_table("days of history", *(f"{each * STEP_S / 3600:.0f} h" for each in FAR_AHEAD))
    for days in SHORT_DAYS:
        by_horizon = {each["horizon_s"]: each for each in rows if each["days"] == days}
        found = [by_horizon.get(each * STEP_S) for each in FAR_AHEAD]
        table.add_row(
            str(days),
            *("–" if each is None else f"{each['coverage90']:.2f}  x{exp(each['width']):.1f}" for each in found),
        )
    table.title, table.title_justify = "90 % bands far ahead of short histories: share that held, p95 over p50", "left"
    return table


def _recovery(found: BacktestForecasts) -> dict[str, float]:
    """Return by series how often bands held, for a day of forecasts of up to 3 h made from `RECOVERY_BINS` after the
    change on.
    """
    first = int(CHANGED_DAY * DAY) + RECOVERY_BINS
    held: dict[str, float] = {}
    for name in SERIES:
        actual, parts = found.history.series(name), []
        for place, horizon in enumerate(found.plan.horizons[:-1]):
            origins = np.arange(first, min(first + DAY, len(actual) - horizon))
            said = found.ours[name][origins, place]
            known = np.isfinite(said[:, 0]) & np.isfinite(actual[origins + horizon])
            parts.append(inside(actual[origins + horizon][known], said[known]))
        held[name] = float(np.concatenate(parts).mean())
    return held


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the known values."""
    known = [log(each) for each in values if each and isfinite(each)]
    return exp(sum(known) / len(known)) if known else None


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the aims are about; ratios are geometric means."""
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
    """Return the aims and the figures, in words."""
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
            f"from {RECOVERY_BINS} bins after a change on, for a day, up to 3 h ahead: "
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
    """Draw days and weeks, slow drift, bursts and a level shift, in bins of 10 minutes."""
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
    """Return CPU time of one core. There are a third as many histories as series: each has arrivals, prompt and output
    tokens.
    """
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
    made.add_argument("--heavy", default="", help="baselines from libraries too, e.g. mstl,auto-ets")
    made.add_argument("--series", type=int, default=500, help="refitted one after the other")
    made.add_argument("--days", default="14", help="lengths of history to time, with commas between; empty: none")
    made.add_argument("--seed", type=int, default=1)
    return made.parse_args()


if __name__ == "__main__":
    main()
