"""The series on which forecasts are tested: real services and synthetic ones, in a tuning and a reporting half.

Choices in `libs.policy.forecast` are made on the tuning half only. Real series are read from a folder of traces.
"""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

import numpy as np

from libs.forecast.demand_file import read_demand
from libs.policy.forecast.history import DemandHistory, Floats, history_from_rates

STEP_S: Final = 600.0
DAY: Final = 144
WEEKS: Final = 14 * DAY
# A trace of an hour is stretched, so that ten of its seconds fill a bin of ten minutes. It then covers two and a half
# days.
STRETCH_S: Final = 10.0
# The day of a synthetic series on which it changes for good. It is among the scored days.
CHANGED_DAY: Final = 11.5

Half = Literal["tuning", "reporting"]


@dataclass(frozen=True, slots=True)
class SuiteSeries:
    name: str
    half: Half
    read: Callable[[Path], DemandHistory]
    file: str = ""
    """The file in the data folder; empty for synthetic series."""


def suite(folder: Path, half: Half | None = None) -> list[tuple[SuiteSeries, DemandHistory]]:
    """Return all series of a half, or of both halves, whose files exist."""
    return [
        (each, each.read(folder / each.file))
        for each in SUITE
        if half in {None, each.half} and (not each.file or (folder / each.file).is_file())
    ]


def _binned(times_s: Floats, prefill: Floats | None, decode: Floats, step_s: float) -> DemandHistory:
    """Return the rates of single requests in bins, without the last, incomplete one. `prefill` is None if unknown."""
    places = (times_s // step_s).astype(np.int64)
    bins = int(places.max())
    rates = [np.bincount(places, weights, minlength=bins + 1)[:bins] / step_s for weights in (None, prefill, decode)]
    if prefill is None:
        rates[1] = np.full(bins, np.nan)
    named = {"requests": rates[0], "known_requests": rates[0], "prefill": rates[1], "decode": rates[2]}
    return history_from_rates(np.arange(bins) * STEP_S, named, STEP_S)


def images(*models: str) -> Callable[[Path], DemandHistory]:
    """Return a reader of an image service's requests for these models; for all models if none are named.

    The work of a request is its seconds.
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
    # The trace's clock ticks every three seconds, so arrivals are spread over their tick.
    times_s = np.array([row["timestamp"] / 1000 for row in rows]) + np.random.default_rng(1).uniform(0, 3, len(rows))
    lengths = [np.array([float(row[name]) for row in rows]) for name in ("input_length", "output_length")]
    return _binned(times_s, lengths[0], lengths[1], STRETCH_S)


def _wander(rng: np.random.Generator, bins: int, size: float, half_life: float) -> Floats:
    """Return autoregressive noise of order one with standard deviation `size` and half-life `half_life` in bins."""
    keep = 0.5 ** (1 / half_life)
    level, out = rng.normal(0, size), np.empty(bins)
    for at, step in enumerate(rng.normal(0, size * np.sqrt(1 - keep * keep), bins)):
        level = keep * level + step
        out[at] = level
    return out


@dataclass(frozen=True, slots=True)
class _MadeSeries:
    """A synthetic series as logarithms of arrivals and lengths."""

    rng: np.random.Generator
    at_day: Floats
    arrivals: Floats
    prompts: Floats
    outputs: Floats

    def counted(self, requests: float) -> DemandHistory:
        """Return the counted series. Arrivals are drawn for each bin. `requests` is their mean per second at log 0.

        The mean length in a bin scatters less the more requests it has.
        """
        count = self.rng.poisson(requests * STEP_S * np.exp(self.arrivals))
        lengths = [
            np.exp(log) * np.exp(self.rng.normal(0, 1, len(count)) / np.sqrt(np.maximum(count, 1)))
            for log in (self.prompts + np.log(900.0), self.outputs + np.log(220.0))
        ]
        rate = count / STEP_S
        known = np.where(count > 20, rate * self.rng.uniform(0.4, 1.0, len(count)), rate)
        rates = {"requests": rate, "known_requests": known, "prefill": known * lengths[0], "decode": known * lengths[1]}
        return history_from_rates(np.arange(len(count)) * STEP_S, rates, STEP_S)


@dataclass(frozen=True, slots=True)
class DrawnParts:
    """The parts of a synthetic series in logarithms: those that a forecaster could know, and noise."""

    rng: np.random.Generator
    at_day: Floats
    season: Floats
    level: Floats
    """Correlated noise with a half-life of `hours`."""
    hours: float
    noise: Floats
    burst: Floats
    prompts: Floats
    outputs: Floats


# The half-lives, in bins, of the correlated noise in lengths.
PROMPT_BINS: Final = 30
OUTPUT_BINS: Final = 60


def draw_parts(seed: int, bins: int = WEEKS, *, day: float = 0.6, noise: float = 0.12, hours: float = 4) -> DrawnParts:
    """Draw a daily pattern, noise of minutes and of hours, and bursts of single clients."""
    rng = np.random.default_rng(seed)
    at_day = np.arange(bins) / DAY
    phase, second = rng.random(2)
    shape = np.sin(2 * np.pi * (at_day - phase)) + 0.35 * np.sin(4 * np.pi * (at_day - second))
    level, quick = _wander(rng, bins, noise, hours * 6), rng.normal(0, noise / 2, bins)
    burst = np.zeros(bins)
    for start in np.flatnonzero(rng.random(bins) < 0.008).tolist():
        burst[start : start + int(rng.integers(1, 9))] += rng.exponential(0.4)
    prompts, outputs = _wander(rng, bins, 0.1, PROMPT_BINS), _wander(rng, bins, 0.1, OUTPUT_BINS)
    return DrawnParts(rng, at_day, day * shape, level, hours, quick, burst, prompts, outputs)


def _base(seed: int, bins: int = WEEKS, *, day: float = 0.6, noise: float = 0.12, hours: float = 4) -> _MadeSeries:
    made = draw_parts(seed, bins, day=day, noise=noise, hours=hours)
    arrivals = made.season + made.level + made.noise + made.burst
    return _MadeSeries(made.rng, made.at_day, arrivals, made.prompts + 0.5 * made.burst, made.outputs)


def _shifted(made: _MadeSeries, arrivals: Floats, *, outputs: Floats | float = 0.0) -> _MadeSeries:
    return _MadeSeries(made.rng, made.at_day, made.arrivals + arrivals, made.prompts, made.outputs + outputs)


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
    """Draw demand of which more than half leaves within a day. Requests with long outputs remain longest."""
    made = _base(24)
    gone = np.clip(made.at_day - CHANGED_DAY, 0, 1)
    return _shifted(made, np.log(1 - 0.6 * gone), outputs=0.5 * gone).counted(25.0)


def _outages(_: Path) -> DemandHistory:
    """Draw four outages of up to three hours, each followed by a rush, and two gaps of two hours in the data."""
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
    """Draw a change of clients within a bin. Arrivals double, outputs triple, and the daily pattern becomes weaker."""
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
    """Draw counter resets. Each drops a part of a bin's arrivals, and moves the rest to the next bin."""
    history = _base(29, noise=0.2).counted(15.0)
    rng = np.random.default_rng(30)
    series = [values.copy() for values in (history.requests, history.prefill, history.decode)]
    for place in rng.choice(WEEKS - 1, 40, replace=False).tolist():
        part = rng.uniform(0, 0.4)
        for values in series:
            values[place], values[place + 1] = values[place] * part, values[place + 1] + values[place] * (1 - part)
    return DemandHistory(STEP_S, 0.0, series[0], series[1], series[2])


def _bursty(_: Path) -> DemandHistory:
    """Draw few requests with much noise and no season."""
    made = _base(31, day=0.05, noise=0.5, hours=0.7)
    return made.counted(0.08)


def _drifting(_: Path) -> DemandHistory:
    """Draw a level that drifts without a limit, and a weak daily pattern."""
    made = _base(32, day=0.25, noise=0.08)
    return _shifted(made, np.cumsum(made.rng.normal(0, 0.035, len(made.at_day)))).counted(30.0)


SUITE: Final[tuple[SuiteSeries, ...]] = (
    SuiteSeries("m-large", "tuning", read_demand, "servegen_m-large_10min.csv"),
    SuiteSeries("images-all", "tuning", images(), "alibaba_genai_2024-11.csv"),
    SuiteSeries("images-M0002", "tuning", images("M0002"), "alibaba_genai_2024-11.csv"),
    SuiteSeries("azure-code", "tuning", _azure, "azure_code_2023.csv"),
    SuiteSeries("weekly", "tuning", _weekly),
    SuiteSeries("launch", "tuning", _launch),
    SuiteSeries("outages", "tuning", _outages),
    SuiteSeries("one-day", "tuning", _one_day),
    SuiteSeries("drifting", "tuning", _drifting),
    SuiteSeries("m-small", "reporting", read_demand, "servegen_m-small_10min.csv"),
    SuiteSeries("deepseek-r1", "reporting", read_demand, "servegen_deepseek-r1_10min.csv"),
    SuiteSeries("images-M0001", "reporting", images("M0001"), "alibaba_genai_2024-11.csv"),
    SuiteSeries("images-M0004", "reporting", images("M0004"), "alibaba_genai_2024-11.csv"),
    SuiteSeries("mooncake", "reporting", _mooncake, "mooncake_conversation.jsonl"),
    SuiteSeries("trend", "reporting", _trend),
    SuiteSeries("migration", "reporting", _migration),
    SuiteSeries("regime", "reporting", _regime),
    SuiteSeries("resets", "reporting", _resets),
    SuiteSeries("bursty", "reporting", _bursty),
)

# The synthetic series that change for good on `CHANGED_DAY`.
CHANGED: Final = frozenset({"launch", "migration", "regime"})
