"""The figures of the first-hour bench: fitted growth, tables, verdicts. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from rich.table import Table

from load.measure import rounded, titled_table

IDLE, LOADED = "idle", "load"
SUM: Final = "sum"
CONTROL: Final = "(control)"
# The upper bound of idle CPU in hundredths of a core, by shape (prefill+decode workers).
MOST_IDLE_POINTS: Final = {"1+1": 12.0, "3+5": 25.0}
MOST_GROWTH_POINTS_PER_HOUR: Final = 1.0
LEAST_COVERAGE: Final = 99.0
MOST_FRESH_P99_S: Final = 1.0
FRESH_SHAPE: Final = "3+5"
# The order of processes in tables, by the prefix of a name. Other processes come last.
ORDER: Final = ("kafka", "redis", "gateway", "prefill", "decode", "planner", "metrics", "launcher")


@dataclass(frozen=True, slots=True)
class Fit:
    slope: float | None
    """The slope; None if the points determine no line."""
    error: float | None
    """The standard error of the slope; None if only two points determine it."""


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    if len(set(xs)) < 2:
        return Fit(None, None)
    x, y = np.array(xs, float), np.array(ys, float)
    dx, dy = x - x.mean(), y - y.mean()
    spread = float(dx @ dx)
    slope = float(dx @ dy) / spread
    rest = dy - slope * dx
    return Fit(slope, float(rest @ rest / (len(x) - 2) / spread) ** 0.5 if len(x) > 2 else None)


@dataclass(frozen=True, slots=True)
class Minute:
    """The figures of one minute of a phase. CPU is in points, which are hundredths of a core."""

    ended_s: float
    """The seconds from the start of the phase to the end of the minute."""
    cpu_points: Mapping[str, float]
    rss_mb: Mapping[str, float]
    restarted: Sequence[str]
    bench_points: float
    """The CPU of this bench, including its load and its reader of the stream."""
    elsewhere_points: float
    """The CPU of all other processes on this machine."""
    coverage: float
    """The coverage read after the phase. Anything missing then was lost rather than late."""
    coverage_soon: float
    """The coverage read some seconds after the minute's end."""
    fresh_p50_s: float
    fresh_p99_s: float
    stalest_p99_s: float
    """The age of the data of the worker that is furthest behind, at p99."""
    alerts: Sequence[str]
    """The id and reason of each alert that started to fire."""
    answers: int = 0
    answer_p50_s: float | None = None
    answer_p99_s: float | None = None
    failures: Mapping[str, int] = field(default_factory=dict)
    not_sent: int = 0
    control_points: float = 0.0
    """The CPU of a process that does the same in every minute. Its growth is due to the machine."""

    @property
    def sum_points(self) -> float:
        return sum(self.cpu_points.values())


@dataclass(frozen=True, slots=True)
class Phase:
    shape: str
    name: str
    minutes: Sequence[Minute]
    fresh_p50_s: float
    """The median over all samples of the phase."""
    fresh_p99_s: float
    stalest_p99_s: float

    @property
    def counted(self) -> Sequence[Minute]:
        """All minutes but the first, in which processes start."""
        return self.minutes[1:]

    def mean_points(self) -> float | None:
        """Return the suite's mean CPU in points over the counted minutes; None without any."""
        return _mean([minute.sum_points for minute in self.counted])

    def growth(self) -> Fit:
        """Return the growth of the suite's CPU in points an hour."""
        return _growth(self.counted, [minute.sum_points for minute in self.counted])

    def growth_beside_control(self) -> Fit:
        """Return the growth at the machine's mean speed. Each minute's points are divided by those of the control."""
        mean = _mean([minute.control_points for minute in self.counted])
        if not mean or not all(minute.control_points for minute in self.counted):
            return Fit(None, None)
        return _growth(self.counted, [minute.sum_points * mean / minute.control_points for minute in self.counted])


@dataclass(frozen=True, slots=True)
class Row:
    process: str
    first_points: float
    last_points: float
    mean_points: float | None
    """The mean points. The mean and the growth exclude the first minute."""
    growth_points_per_hour: float | None
    growth_error: float | None
    first_rss_mb: float
    last_rss_mb: float


@dataclass(frozen=True, slots=True)
class Verdict:
    shape: str
    phase: str
    aim: str
    bound: float
    value: float | None
    error: float | None
    met: bool | None

    @property
    def text(self) -> str:
        """A line of text. It marks a value so close to its bound that chance may have decided."""
        if self.met is None or self.value is None:
            return f"not measured: {self.shape} {self.phase}: {self.aim}"
        text = f"{'met' if self.met else 'not met'}: {self.shape} {self.phase}: {self.aim}: {self.value:.2f}"
        if self.error is None:
            return text
        near = ", within two standard errors of the aim" * (abs(self.value - self.bound) < 2 * self.error)
        return f"{text} ± {self.error:.2f}{near}"


def rows(phase: Phase) -> list[Row]:
    """Return a row for each process, then a row with their sum."""
    if not phase.minutes:
        return []
    names = sorted({name for minute in phase.minutes for name in minute.cpu_points}, key=_place)
    found = [
        _row(phase, name, [(m.cpu_points.get(name, 0.0), m.rss_mb.get(name, 0.0)) for m in phase.minutes])
        for name in names
    ]
    control = [_row(phase, CONTROL, [(m.control_points, 0.0) for m in phase.minutes])] * _has_control(phase)
    return [*found, _row(phase, SUM, [(m.sum_points, sum(m.rss_mb.values())) for m in phase.minutes]), *control]


def verdicts(phase: Phase) -> list[Verdict]:
    def at_most(aim: str, value: float | None, most: float, error: float | None = None) -> Verdict:
        met = None if value is None else value <= most
        return Verdict(phase.shape, phase.name, f"{aim}, at most {most:g}", most, value, error, met)

    found = []
    if phase.name == IDLE and phase.shape in MOST_IDLE_POINTS:
        found.append(at_most("mean CPU, % of a core", phase.mean_points(), MOST_IDLE_POINTS[phase.shape]))
    fits = {"": phase.growth()}
    if _has_control(phase):
        fits[" beside the control"] = phase.growth_beside_control()
    for beside, growth in fits.items():
        slope = None if growth.error is None else growth.slope  # two minutes show no trend
        aim = f"growth{beside}, points of a core an hour"
        found.append(at_most(aim, slope, MOST_GROWTH_POINTS_PER_HOUR, growth.error))
    if phase.name == LOADED:
        least = min((100 * minute.coverage for minute in phase.minutes), default=None)
        met = None if least is None else least >= LEAST_COVERAGE
        aim = f"coverage of the worst minute, %, at least {LEAST_COVERAGE:g}"
        found.append(Verdict(phase.shape, phase.name, aim, LEAST_COVERAGE, least, None, met))
        if phase.shape == FRESH_SHAPE:
            fresh_s = phase.fresh_p99_s if phase.minutes else None
            found.append(at_most("p99 age of the newest data, s", fresh_s, MOST_FRESH_P99_S))
    return found


def progress(phase: str, number: int, of: int, minute: Minute) -> str:
    parts = [
        f"{phase}, minute {number} of {of}: suite {minute.sum_points:.1f} % of a core",
        f"bench {minute.bench_points:.1f}, elsewhere {minute.elsewhere_points:.1f}",
        f"{sum(minute.rss_mb.values()):.0f} MB",
        f"coverage {minute.coverage_soon:.2%}",
        f"age p50 {minute.fresh_p50_s:.2f} s, p99 {minute.fresh_p99_s:.2f} s",
    ]
    if minute.answers or minute.failures or minute.not_sent:
        parts.append(f"{minute.answers} answers, p99 {_figure(minute.answer_p99_s)} s")
        parts.append(f"failed {_counts(minute.failures)}, not sent {minute.not_sent}")
    if minute.restarted:
        parts.append(f"restarted {' '.join(minute.restarted)}")
    if minute.alerts:
        parts.append(f"alerts {_alerts([minute])}")
    return "; ".join(parts)


def process_table(phase: Phase) -> Table:
    heads = ("minute 1", "last", "mean*", "growth* an hour", "±", "MB, minute 1", "MB, last")
    table = titled_table(f"{phase.shape} {phase.name}: % of a core, by process", "process", *heads)
    for row in rows(phase):
        table.add_row(
            row.process,
            f"{row.first_points:.2f}",
            f"{row.last_points:.2f}",
            _figure(row.mean_points),
            _figure(row.growth_points_per_hour),
            _figure(row.growth_error),
            f"{row.first_rss_mb:.0f}",
            f"{row.last_rss_mb:.0f}",
        )
    return table


def summary(phase: Phase) -> str:
    """Return a line with the figures that do not belong to a process."""
    minutes = phase.minutes
    restarted = [name for minute in minutes for name in minute.restarted]
    failures: Counter[str] = sum((Counter(minute.failures) for minute in minutes), Counter())
    parts = [
        f"coverage {min((minute.coverage for minute in minutes), default=float('nan')):.2%} in the worst minute, "
        f"{min((minute.coverage_soon for minute in minutes), default=float('nan')):.2%} seconds after it",
        f"age of the newest data p50 {phase.fresh_p50_s:.2f} s, p99 {phase.fresh_p99_s:.2f} s, "
        f"worst minute's p99 {max((minute.fresh_p99_s for minute in minutes), default=float('nan')):.2f} s, "
        f"of the worker furthest behind p99 {phase.stalest_p99_s:.2f} s",
        f"alerts: {_alerts(minutes)}",
        f"restarted: {' '.join(restarted) or 'none'}",
        f"elsewhere on this machine {_figure(_mean([minute.elsewhere_points for minute in minutes]))} % of a core",
    ]
    if phase.name == LOADED:
        p99s = [f"{m.answer_p99_s:.2f} s" for m in minutes if m.answer_p99_s is not None]
        parts += [
            f"{sum(minute.answers for minute in minutes)} answers, failed {_counts(failures)}, "
            f"not sent {sum(minute.not_sent for minute in minutes)}",
            f"p99 of an answer {p99s[0]} in the first minute with one, {p99s[-1]} in the last" if p99s else "no answer",
            f"bench {_figure(_mean([minute.bench_points for minute in minutes]))} % of a core",
        ]
    return f"{phase.shape} {phase.name}: " + "; ".join(parts)


def as_json(phases: Sequence[Phase]) -> dict[str, Any]:
    """Return every figure of tables and progress lines, and the verdicts."""
    found = [
        {
            **asdict(phase),
            "processes": [asdict(row) for row in rows(phase)],
            "minutes": [asdict(minute) | {"sum_points": minute.sum_points} for minute in phase.minutes],
        }
        for phase in phases
    ]
    aims = [asdict(verdict) for phase in phases for verdict in verdicts(phase)]
    return dict(rounded({"phases": found, "verdicts": aims}, 4))


def _has_control(phase: Phase) -> bool:
    return any(minute.control_points for minute in phase.minutes)


def _row(phase: Phase, name: str, values: Sequence[tuple[float, float]]) -> Row:
    points = [value for value, _ in values]
    fit = _growth(phase.counted, points[1:])
    return Row(
        process=name,
        first_points=points[0],
        last_points=points[-1],
        mean_points=_mean(points[1:]),
        growth_points_per_hour=fit.slope,
        growth_error=fit.error,
        first_rss_mb=values[0][1],
        last_rss_mb=values[-1][1],
    )


def _growth(minutes: Sequence[Minute], points: Sequence[float]) -> Fit:
    return fit_line([minute.ended_s / 3600 for minute in minutes], points)


def _place(name: str) -> tuple[int, str]:
    return next((place for place, begin in enumerate(ORDER) if name.startswith(begin)), len(ORDER)), name


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _alerts(minutes: Sequence[Minute]) -> str:
    """Return the number of times that each kind of alert started to fire. The JSON has ids and reasons."""
    return _counts(Counter(alert.partition("{")[0] for minute in minutes for alert in minute.alerts))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "0"
