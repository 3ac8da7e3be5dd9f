"""The burn rate of a service level's error budget, from counts by 30 s over 3 days.

Windows and rates are those of the Site Reliability Workbook, chapter 5 (multiwindow, multi-burn-rate alerts). The
long window shows that errors matter, the short one that they still occur.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from libs.policy.alerts.rules import AlertLimits, Burn, Condition, Name, RequestCount, Severity
from libs.policy.verdict.state import Grade

SLOS: Final = ("ttft", "tpot")
BUCKET_S: Final = 30
MINUTE_S: Final = 60
HOUR_S: Final = 3600
# A model takes 250 kB; requests for models beyond these are not judged.
MAX_MODELS: Final = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair of windows that fires if, over both, the budget burns at `rate` times the allowed speed."""

    rate: float
    long_s: int
    short_s: int
    severity: Severity


PAIRS: Final = (
    Pair(14.4, HOUR_S, 5 * MINUTE_S, "critical"),
    Pair(6.0, 6 * HOUR_S, 30 * MINUTE_S, "critical"),
    Pair(1.0, 72 * HOUR_S, 6 * HOUR_S, "warning"),
)
WINDOWS_S: Final = tuple(sorted({window for pair in PAIRS for window in (pair.long_s, pair.short_s)}))
# A pair does not clear above this share of the rate at which it fires.
CLEAR_SHARE: Final = 0.9
BUCKETS: Final = max(WINDOWS_S) // BUCKET_S


class BurnLog:
    """Running sums of all requests and of bad ones, by model and service level.

    The counts of a window are a difference of two sums.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], np.ndarray[tuple[int, int], np.dtype[np.int64]]] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._began_ns: dict[tuple[str, str], int] = {}

    def add(self, model: str, slo: str, now_ns: int, *, bad: bool) -> None:
        """Count a request that ended at `now_ns`."""
        key = (model, slo)
        if key not in self._sums:
            if len(self._sums) >= MAX_MODELS * len(SLOS):
                return
            self._sums[key] = np.zeros((BUCKETS + 1, 2), np.int64)
            self._newest[key] = now_ns // (BUCKET_S * 10**9)
            self._began_ns[key] = now_ns
        row = self._advance(key, now_ns)
        self._sums[key][row] += (1, int(bad))

    def burns(self, now_ns: int) -> list[Burn]:
        """Return the counts of every service level over all windows."""
        found = []
        for key, sums in self._sums.items():
            row = self._advance(key, now_ns)
            rows = np.array([row - min(window // BUCKET_S, BUCKETS) for window in WINDOWS_S]) % (BUCKETS + 1)
            spans = (sums[row] - sums[rows]).tolist()
            windows = {window: RequestCount(*span) for window, span in zip(WINDOWS_S, spans, strict=True)}
            found.append(Burn(*key, windows, max(now_ns - self._began_ns[key], 0) / 1e9))
        return found

    def _advance(self, key: tuple[str, str], now_ns: int) -> int:
        """Return the row for `now_ns`. Rows skipped since the last call are filled with the last sums."""
        sums, newest = self._sums[key], self._newest[key]
        number = max(now_ns // (BUCKET_S * 10**9), newest)
        last = sums[newest % (BUCKETS + 1)].copy()
        for skipped in range(max(newest + 1, number - BUCKETS), number + 1):
            sums[skipped % (BUCKETS + 1)] = last
        self._newest[key] = number
        return int(number % (BUCKETS + 1))


def burn_conditions(burns: list[Burn], limits: AlertLimits) -> Iterator[Condition]:
    """Yield one condition for each service level and severity, graded by the worst of its pairs of windows.

    The severity is a label, so a firing warning hides no critical alert.
    """
    for burn in burns:
        critical = _condition(burn, "critical", limits)
        warning = _condition(burn, "warning", limits)
        if critical.grade is Grade.FIRE and warning.grade is Grade.FIRE:
            warning = replace(warning, grade=Grade.HOLD)  # the critical alert covers this warning
        yield from (critical, warning)


def _condition(burn: Burn, severity: Severity, limits: AlertLimits) -> Condition:
    budget = 1 - limits.slo_objective
    pairs = [pair for pair in PAIRS if pair.severity == severity]
    graded = [(_grade(burn, pair, budget, limits.slo_requests), pair) for pair in pairs]
    grade = max(grade for grade, _ in graded)
    pair = next(pair for own, pair in graded if own is grade)
    counted = burn.windows[pair.long_s]
    reason = (
        f"{counted.bad} of {counted.total} requests in {duration(pair.long_s)} missed {burn.slo.upper()}: "
        f"{_rate(burn, pair.long_s, budget):.1f}x what {limits.slo_objective:.2%} allows, "
        f"{burn.windows[pair.short_s].share / budget:.1f}x in {duration(pair.short_s)}"
    )
    labels = (("model", burn.model), ("slo", burn.slo), ("severity", severity))
    return Condition(Name.SLO_BURN, labels, grade, reason, severity)


def _rate(burn: Burn, window_s: int, budget: float) -> float:
    """Return the burn rate over a window as a multiple of the budget's.

    Time before the first request counts as harmless: a new service does not judge three days by one minute.
    """
    return burn.windows[window_s].share / budget * min(burn.age_s / window_s, 1.0)


def _grade(burn: Burn, pair: Pair, budget: float, least: int) -> Grade:
    """Grade one pair of windows; a short window with fewer than `least` requests does not fire."""
    rates = [_rate(burn, pair.long_s, budget), burn.windows[pair.short_s].share / budget]
    if min(rates) >= pair.rate:
        return Grade.FIRE if burn.windows[pair.short_s].total >= least else Grade.HOLD
    return Grade.CLEAR if min(rates) < CLEAR_SHARE * pair.rate else Grade.HOLD


def duration(seconds: int) -> str:
    """Format seconds as "5 min", "1 h" or "3 d"."""
    for size, unit in ((24 * HOUR_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """A finished request with its own targets; a target of 0 means that none was set."""

    failed: bool
    """True if a fault of the service, rather than of the client, ended it."""
    shed: bool
    """True if the request was refused because no room or worker was free, rather than for its content."""
    arrival_unix_ns: int
    ttft_ns: int
    """The time to the first token; 0 if no token was sent."""
    ttft_deadline_unix_ns: int
    decode_ns: int
    """The time from the first token to the last one."""
    output_tokens: int
    tpot_target_ns: int


class MissedLevels(NamedTuple):
    """For each service level, True if the request missed it; None if unknown."""

    ttft: bool | None
    tpot: bool | None


def missed_levels(request: JudgedRequest) -> MissedLevels:
    """Judge a request; a failed or shed request missed its TTFT even without a target."""
    ttft = tpot = None
    if request.failed or request.shed:
        ttft = True
    elif request.ttft_ns and request.ttft_deadline_unix_ns:
        ttft = request.arrival_unix_ns + request.ttft_ns > request.ttft_deadline_unix_ns
    if request.output_tokens > 1 and request.tpot_target_ns:
        tpot = request.decode_ns > request.tpot_target_ns * (request.output_tokens - 1)
    return MissedLevels(ttft, tpot)
