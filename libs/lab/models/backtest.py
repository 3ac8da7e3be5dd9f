"""Replay of a usage log under the forecaster, window by window, and the score of its reservations.

A score is how often demand exceeded the reservation, how certain that is, and its cost against hindsight. The baselines
are a fixed Poisson rate per model, keep-alives, and one GPU per model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from libs.contracts.errors import InvalidRequest
from libs.lab.models.usage import MAX_WINDOWS, Floats, UsageLog, Use, spells, use_by_window
from libs.policy.reserve.arrivals import WindowArrivals
from libs.policy.reserve.counts import (
    Calibrator,
    gpu_units,
    normal_miss,
    not_passed,
    poisson_active,
    quantile,
    sum_distribution,
)
from libs.policy.reserve.forecaster import ObservedWindow, ReserveForecaster

RESAMPLES: Final = 2000
# Consecutive windows are drawn together, since misses seldom come alone.
BLOCK_WINDOWS: Final = 30
INTERVAL: Final = (0.025, 0.975)
SLACK: Final = 1.05
SLACK_GPUS: Final = 1.0
"""Allowances over the best constant reservation in hindsight; the larger one counts."""


@dataclass(frozen=True, slots=True)
class ReserveScore:
    """The score of one policy over the windows after the warm-up."""

    policy: str
    coverage: float
    """The share of windows whose peak demand in GPUs stayed within the reservation."""
    interval: tuple[float, float]
    """The 95 % interval of the coverage, by block bootstrap."""
    reserved_gpus: float
    """The reservation in GPUs, averaged over the windows."""
    cost: float
    """The mean reservation divided by that in hindsight."""
    keeps_confidence: bool
    """True if the upper end of the interval reaches the confidence."""
    keeps_cost: bool


def clairvoyant(peak_gpus: Floats, per_period: int, confidence: float) -> Floats:
    """Return the best reservation in hindsight for each window.

    It is the smallest whole number, constant over a planning period, that at most 1 − confidence of the period's
    windows exceed. The remainder at the end counts as a period.
    """
    found = np.empty(len(peak_gpus))
    for begin in range(0, len(peak_gpus), per_period):
        part = np.sort(peak_gpus[begin : begin + per_period])
        allowed = int((1 - confidence) * len(part) + 1e-9)
        found[begin : begin + per_period] = np.ceil(part[len(part) - 1 - allowed] - 1e-9)
    return found


def grade(
    policy: str, reserved_gpus: Floats, peak_gpus: Floats, hindsight_gpus: Floats, *, confidence: float, held: Floats
) -> ReserveScore:
    """Score one policy. `held` is the number of GPUs paid for, which may exceed the number reserved at the start of a
    window.
    """
    covered = peak_gpus <= reserved_gpus + 1e-9
    interval = block_bootstrap(covered.astype(np.float64))
    mean, best = float(held.mean()), float(hindsight_gpus.mean())
    return ReserveScore(
        policy,
        float(covered.mean()),
        interval,
        mean,
        mean / best if best else 1.0,
        interval[1] >= confidence,
        mean <= max(SLACK * best, best + SLACK_GPUS) + 1e-9,
    )


def block_bootstrap(values: Floats, seed: int = 1) -> tuple[float, float]:
    """Return the confidence interval of the mean from overlapping blocks drawn with replacement.

    As many blocks are drawn as cover the length of the series.
    """
    count = len(values)
    block = min(BLOCK_WINDOWS, max(count // 4, 1))
    sums = np.convolve(values, np.ones(block), mode="valid")
    drawn = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, -(-count // block)))
    means = sums[drawn].mean(axis=1) / block
    low, high = np.quantile(means, INTERVAL)
    return float(low), float(high)


KEEP_ALIVES_S = (60.0, 300.0)


def fixed_poisson(log: UsageLog, use: Use, warmup: int, confidence: float) -> Floats:
    """Reserve by Aegaeon's arithmetic, one number for all windows.

    Each model is active for 1 − exp(−λT) of the time, independently of the others. Rates and run times are those of
    the first `warmup` windows.
    """
    until_s = warmup * use.window_s
    known = log.t_s < until_s
    if not known.any():
        return np.zeros(len(use))
    count = np.bincount(log.model[known], minlength=len(log.models)).astype(np.float64)
    ran_s = np.bincount(log.model[known], weights=log.exec_s[known], minlength=len(log.models))
    active = poisson_active(count / until_s, ran_s / np.maximum(count, 1))
    called = count > 0
    units, unit = gpu_units(log.gpus[called])
    found = quantile(sum_distribution(active[None, called], units)[0], confidence) * unit
    return np.full(len(use), float(np.ceil(found - 1e-9)))


def keep_alive(log: UsageLog, use: Use, hold_s: float) -> tuple[Floats, Floats]:
    """Return the GPUs of loaded models at the start of each window, and the mean number held during it.

    A model is loaded when it is requested and stays for `hold_s` after its last request.
    """
    begin_s, end_s, model = spells(log, hold_s)
    edges: Floats = np.arange(len(use), dtype=np.float64) * use.window_s
    size = log.gpus[model]
    return _until(begin_s, size, edges) - _until(end_s, size, edges), use_by_window(log, use.window_s, hold_s).mean_gpus


def one_a_model(log: UsageLog, use: Use) -> Floats:
    """Return the GPUs of every model requested before each window begins."""
    first = np.full(len(log.models), np.inf)
    np.minimum.at(first, log.model, log.t_s)
    return _until(first, log.gpus, np.arange(len(use), dtype=np.float64) * use.window_s)


def _until(at_s: Floats, size: Floats, edges: Floats) -> Floats:
    """Return the sum of sizes whose time is at or before each edge."""
    order = np.argsort(at_s)
    return np.asarray(np.append(0.0, np.cumsum(size[order]))[np.searchsorted(at_s[order], edges, side="right")])


def seen_by_window(log: UsageLog, use: Use) -> Iterator[ObservedWindow]:
    """Yield each window in turn. Models are numbered by first arrival, so that none is known in advance."""
    first = np.full(len(log.models), np.inf)
    np.minimum.at(first, log.model, log.t_s)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    first, gpus, model = first[order], log.gpus[order], place[log.model]
    ended_s = log.t_s + log.exec_s
    by_end = np.argsort(ended_s, kind="stable")
    edges = np.arange(len(use) + 1) * use.window_s
    begins = np.searchsorted(log.t_s, edges, side="left")
    ends = np.searchsorted(ended_s[by_end], edges, side="left")
    known = np.searchsorted(first, edges, side="left")
    for window in range(len(use)):
        come = slice(int(begins[window]), int(begins[window + 1]))
        gone = by_end[ends[window] : ends[window + 1]]
        yield ObservedWindow(
            begin_s=float(edges[window]),
            end_s=float(edges[window + 1]),
            arrivals=WindowArrivals(log.t_s[come], model[come]),
            ended_model=model[gone],
            ended_start_s=log.t_s[gone],
            ended_s=ended_s[gone],
            gpus=gpus[: known[window + 1]],
            peak_gpus=float(use.peak_gpus[window]),
            mean_models=float(use.mean_models[window]),
        )


WARMUP: Final = 1 / 3
"""The share of windows used for learning but not scored."""
LEAST_WINDOWS: Final = 12
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BacktestSettings:
    window_s: float = 60.0
    confidence: float = 0.99
    period_s: float = 3600.0
    """The planning period over which the reservations in hindsight and the held ones are constant."""
    warmup: float = WARMUP
    independent: bool = True
    """True to replay again without a common factor and calibration, which doubles the time."""


@dataclass(slots=True)
class ForecastSeries:
    """The forecasts of each window replayed so far."""

    reserved_gpus: list[float] = field(default_factory=list)
    held_gpus: list[float] = field(default_factory=list)
    uncalibrated_gpus: list[float] = field(default_factory=list)
    independent_gpus: list[float] = field(default_factory=list)
    expected_models: list[float] = field(default_factory=list)
    expected_peak_gpus: list[float] = field(default_factory=list)
    p50_gpus: list[float] = field(default_factory=list)
    laws: dict[str, int] = field(default_factory=dict)
    common: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Backtest:
    log: UsageLog
    settings: BacktestSettings
    use: Use
    series: ForecastSeries
    warmup: int
    """The number of leading windows that are not scored."""
    done: int
    """The number of replayed windows, which is smaller than the total after an interrupt."""
    hindsight_gpus: Floats
    """The reservation in hindsight of each scored window."""
    scores: list[ReserveScore]
    """One score per policy, beginning with the forecast."""
    interrupted: bool

    def as_json(self) -> dict[str, Any]:
        """Return one record, in which `baselines` holds the scores of the other policies."""
        scored = slice(self.warmup, self.done)
        ours, series = self.scores[0], self.series
        return {
            "file": self.log.name,
            "windows": self.done - self.warmup,
            "active_mean": _mean(self.use.mean_models[scored]),
            "predicted_mean": _mean(np.array(series.expected_models[scored])),
            "p99_coverage": ours.coverage,
            "p99_coverage_interval": list(ours.interval),
            "reserved_gpus": ours.reserved_gpus,
            "clairvoyant_gpus": _mean(self.hindsight_gpus),
            "keeps_confidence": ours.keeps_confidence,
            "keeps_cost": ours.keeps_cost,
            "peak_mean_gpus": _mean(self.use.peak_gpus[scored]),
            "predicted_peak_mean_gpus": _mean(np.array(series.expected_peak_gpus[scored])),
            "window_s": self.settings.window_s,
            "period_s": self.settings.period_s,
            "confidence": self.settings.confidence,
            "warmup_windows": self.warmup,
            "models": len(self.log.models),
            "requests": len(self.log.t_s),
            "laws": series.laws,
            "common_rate": dict(zip(("spread", "keep"), series.common, strict=True)) if series.common else None,
            "interrupted": self.interrupted,
            "baselines": [_record(each) for each in self.scores[1:]],
            "notes": list(self.log.notes),
        }


def _record(score: ReserveScore) -> dict[str, Any]:
    return {
        "policy": score.policy,
        "p99_coverage": score.coverage,
        "p99_coverage_interval": list(score.interval),
        "reserved_gpus": score.reserved_gpus,
        "cost": score.cost,
        "keeps_confidence": score.keeps_confidence,
        "keeps_cost": score.keeps_cost,
    }


def backtest(log: UsageLog, settings: BacktestSettings, progress: Progress = lambda line: None) -> Backtest:
    """Replay the whole log. Ctrl-C ends the replay and scores the windows done so far. Raise InvalidRequest."""
    count = int(log.end_s / settings.window_s)
    if count < LEAST_WINDOWS:
        raise InvalidRequest(
            f"{log.name} lasts {log.end_s:g} s: {count} whole windows of {settings.window_s:g} s, where "
            f"{LEAST_WINDOWS} are the least; ask for shorter ones"
        )
    if count > MAX_WINDOWS:
        raise InvalidRequest(f"{count} windows, where {MAX_WINDOWS} are the most: ask for longer ones")
    use = use_by_window(log, settings.window_s)
    warmup = max(int(count * settings.warmup), 1)
    series, done, interrupted = ForecastSeries(), 0, False
    try:
        for done in replay(log, use, settings, series):
            progress(f"{done:,} of {count:,} windows")
    except KeyboardInterrupt:
        interrupted = True
    done = min(len(series.reserved_gpus), len(series.held_gpus), done)
    if done <= warmup:
        raise KeyboardInterrupt
    scored = slice(warmup, done)
    hindsight = clairvoyant(use.peak_gpus[scored], per_period(settings), settings.confidence)
    return Backtest(
        log, settings, use, series, warmup, done, hindsight,
        _scores(log, use, settings, series=series, scored=scored, hindsight=hindsight), interrupted,
    )  # fmt: skip


def per_period(settings: BacktestSettings) -> int:
    """Return the number of windows in a planning period."""
    return max(round(settings.period_s / settings.window_s), 1)


def replay(log: UsageLog, use: Use, settings: BacktestSettings, series: ForecastSeries) -> Iterator[int]:
    """Forecast each window into `series`, then learn from it; yield the number of windows done."""
    ours = ReserveForecaster(settings.window_s, settings.confidence)
    plain = ReserveForecaster(settings.window_s, settings.confidence, common=False, calibrated=False)
    holder = Holder(settings.confidence, per_period(settings))
    for done, seen in enumerate(seen_by_window(log, use), 1):
        outlook = ours.ahead(seen.begin_s)
        series.held_gpus.append(holder.reserve(outlook.distribution) * outlook.unit_gpus)
        series.reserved_gpus.append(outlook.reserve_gpus)
        series.p50_gpus.append(outlook.quantiles_gpus[0])
        series.uncalibrated_gpus.append(outlook.uncalibrated_gpus)
        series.expected_models.append(outlook.expected_models)
        series.expected_peak_gpus.append(outlook.peak_expected_gpus)
        if settings.independent:
            series.independent_gpus.append(plain.ahead(seen.begin_s).reserve_gpus)
            plain.learn(seen)
        holder.learn(seen.peak_gpus / outlook.unit_gpus)
        ours.learn(seen)
        series.laws, series.common = ours.laws(), ours.common_setting()
        yield done


def _scores(
    log: UsageLog, use: Use, settings: BacktestSettings, *, series: ForecastSeries, scored: slice, hindsight: Floats
) -> list[ReserveScore]:
    peak = use.peak_gpus[scored]

    def of(name: str, reserved: Floats, held: Floats | None = None) -> ReserveScore:
        paid = reserved if held is None else held
        return grade(name, reserved, peak, hindsight, confidence=settings.confidence, held=paid)

    found = [of("fulcrum", np.array(series.reserved_gpus[scored]))]
    found.append(of("fulcrum, held for a period", np.array(series.held_gpus[scored])))
    found.append(of("fulcrum, not calibrated", np.array(series.uncalibrated_gpus[scored])))
    if settings.independent:
        found.append(of("independent models, not calibrated", np.array(series.independent_gpus[scored])))
    found.append(of("fixed Poisson rates", fixed_poisson(log, use, scored.start, settings.confidence)[scored]))
    for hold_s in KEEP_ALIVES_S:
        there, held = keep_alive(log, use, hold_s)
        found.append(of(f"keep-alive {hold_s:g} s", there[scored], held[scored]))
    found.append(
        of("one GPU a model" if np.all(log.gpus == 1) else "every model's GPUs", one_a_model(log, use)[scored])
    )
    return found


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


class Holder:
    """A fixed reservation per period, from the mean of the last period's forecasts.

    The calibration learns how far a period may stray from the previous one: each window is scored by the
    distribution held for it.
    """

    def __init__(self, confidence: float, windows: int) -> None:
        """Create a holder for periods of `windows` windows."""
        self._calibrator = Calibrator(confidence)
        self._windows = windows
        self._recent: list[Floats] = []
        self._held: Floats = np.ones(1)
        self._units = 0
        self._place = 0

    def reserve(self, distribution: Floats) -> int:
        """Return the units for the window that begins now, given its forecast; they stay the same for a period."""
        self._recent.append(distribution)
        if self._place % self._windows == 0:
            self._held = _mean_distribution(self._recent)
            self._units = not_passed(self._held, normal_miss(self._calibrator.deviate))
            self._recent = []
        self._place += 1
        return self._units

    def learn(self, came_units: float) -> None:
        """Learn from the peak of units in the window that `reserve` was last called for."""
        if self._place <= 2 * self._windows:
            return  # the first period, and most of the second, were reserved without knowledge
        came = int(np.ceil(came_units - 1e-9))
        self._calibrator.learn(self._held, came, covered=came <= self._units)


def _mean_distribution(rows: list[Floats]) -> Floats:
    total = np.zeros(max(map(len, rows)))
    for row in rows:
        total[: len(row)] += row
    return total / len(rows)
