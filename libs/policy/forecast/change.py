"""Changes in the level of a series, and the arrivals or lengths that caused them.

A level is the mean of the last half hour, in logarithms. It has changed when it differs more from the day before than
half hours of that day differed from each other. Slow waves within a day are therefore not changes, and correlated noise
is judged by its half hours rather than by an assumption. Windows of two and six hours find smaller changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final, Literal

import numpy as np

from libs.policy.forecast.history import Floats, hold

# A shift by half must be found within the first window; small shifts need the longer ones.
WINDOWS_S: Final = (1800.0, 7200.0, 21_600.0)
# A level is compared with a day before it, counted in the first window; with less after a change.
REFERENCE_WINDOWS: Final = 48
LEAST_WINDOWS: Final = 12
"""The number of windows since the last change that a detection needs."""
# Standard deviations of a normal distribution by which a level must differ (probability 4e-8). A month of a hundred
# series at one minute makes four million tests.
Z: Final = 5.5
# Smaller changes are left to the forecasts.
LEAST_RATIO: Final = 1.05
SHOWN_RATIO: Final = 1.1
# A smaller change, as a share or in busy GPUs, is real but not worth reporting.
SHOWN_GPUS: Final = 0.1
MOST_CHANGES: Final = 1000
_LEAST_SPREAD: Final = 0.01
_OFFSET: Final = 0.01


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change in the level of a series between two bins."""

    began: int
    """The first bin of the new level, as estimated at `found`."""
    found: int
    """The bin after which the change was detected."""
    before: float
    after: float
    """The new level, in the series' unit like `before`."""

    @property
    def ratio(self) -> float:
        """The level after over the level before; inf if that was 0."""
        return self.after / self.before if self.before else float("inf")


def matters(change: LevelChange, *, gpus: bool) -> bool:
    """Return whether a change is large enough to be shown; `gpus` means that its levels are busy GPUs."""
    low, high = sorted((change.before, change.after))
    return high >= low * SHOWN_RATIO and (not gpus or high - low >= SHOWN_GPUS)


def find_changes(values: Floats, step_s: float, expected: Floats | None = None) -> list[LevelChange]:
    """Return the changes of level in order; each depends only on bins up to its `found`.

    nan marks unknown bins. `expected` holds the prediction for each bin made a day before, if days have a season;
    then changes are found in the ratio to it. Levels are those of `values` in either case.
    """
    seen = hold(values)
    if not len(values) or not np.isfinite(seen).all() or not (seen > 0).any():
        return []
    offset = _OFFSET * float(seen[(seen > 0).argmax()])
    logs = np.log(seen + offset)
    if expected is not None:
        logs = logs - np.log(np.maximum(hold(expected), 0.0) + offset)
    windows = sorted({max(round(each / step_s), 2) for each in WINDOWS_S})
    found: list[LevelChange] = []
    start = 0
    while len(found) < MOST_CHANGES:
        alarms = [(at, window) for window in windows if (at := _first_alarm(logs, start, window)) is not None]
        if not alarms:
            return found
        at, window = min(alarms)
        began = _began(logs, max(start, at - 2 * window), at)
        before = seen[max(began - window * LEAST_WINDOWS, start) : began]
        found.append(LevelChange(began, at, float(np.median(before)), float(np.median(seen[began : at + 1]))))
        start = began
    return found


def _first_alarm(logs: Floats, start: int, window: int) -> int | None:
    """Return the first bin whose level is too far from those since `start`."""
    sums = np.concatenate([[0.0], np.cumsum(logs[start:])])
    means = (sums[window:] - sums[:-window]) / window  # means[i] ends at bin start + window - 1 + i
    first = LEAST_WINDOWS * window
    if len(means) <= first:
        return None
    indices = np.arange(first, len(means))
    back = indices[:, None] - window * np.arange(1, REFERENCE_WINDOWS + 1)[None]
    there = back >= 0
    earlier = np.where(there, means[np.maximum(back, 0)], 0.0)
    count = there.sum(axis=1)
    centre = earlier.sum(axis=1) / count
    spread = np.sqrt((((earlier - centre[:, None]) ** 2) * there).sum(axis=1) / (count - 1)) * np.sqrt(1 + 1 / count)
    # Few windows give the spread, so Student's quantile is approximated from the normal one (Wallace 1959).
    limit = np.sqrt((count - 1) * np.expm1(Z * Z / (count - 1))) * np.maximum(spread, _LEAST_SPREAD)
    alarms = np.flatnonzero(np.abs(means[indices] - centre) > np.maximum(limit, log(LEAST_RATIO)))
    return start + window - 1 + int(indices[alarms[0]]) if len(alarms) else None


def _began(logs: Floats, first: int, last: int) -> int:
    """Return the bin that best splits `first` to `last` into two levels."""
    part = logs[first : last + 1]
    sizes = np.arange(1, len(part))
    sums = np.cumsum(part)[:-1]
    gap = (part.sum() - sums) / (len(part) - sizes) - sums / sizes
    return first + 1 + int(np.argmax(gap * gap * sizes * (len(part) - sizes)))


@dataclass(frozen=True, slots=True)
class TrafficRates:
    """The traffic of one tenant, model or class: requests per second, and tokens per request."""

    requests: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class ChangeCause:
    """One contribution to the change of a phase's tokens."""

    who: str
    what: Literal["requests", "prompts", "outputs"]
    before: float
    after: float
    tokens_per_s: float
    """The change that the cause contributes; the causes add up to the whole change."""


def causes(
    before: Mapping[str, TrafficRates], after: Mapping[str, TrafficRates], phase: Literal["prefill", "decode"]
) -> list[ChangeCause]:
    """Return the arrivals and lengths that changed a phase's tokens, the largest first.

    The parts add up without remainder: logarithmic mean Divisia index (Ang, Energy Policy 32, 2004). Tenants that
    appear or disappear count by their arrivals.
    """
    found: list[ChangeCause] = []
    what: Literal["prompts", "outputs"] = "prompts" if phase == "prefill" else "outputs"
    nobody = TrafficRates(0.0, 0.0, 0.0)
    for who in sorted({*before, *after}):
        was, now = before.get(who, nobody), after.get(who, nobody)
        lengths = [each.prompt_tokens if phase == "prefill" else each.output_tokens for each in (was, now)]
        old, new = was.requests * lengths[0], now.requests * lengths[1]
        if old <= 0 or new <= 0:
            found.append(ChangeCause(who, "requests", was.requests, now.requests, new - old))
            continue
        parts = [log(now.requests) - log(was.requests), log(lengths[1]) - log(lengths[0])]
        # The logarithmic mean, by its series where both are close. The parts' own sum leaves no remainder.
        share = sum(parts)
        mean = (new - old) / share if abs(share) > 1e-6 else (new + old) / 2
        found.append(ChangeCause(who, "requests", was.requests, now.requests, mean * parts[0]))
        found.append(ChangeCause(who, what, lengths[0], lengths[1], mean * parts[1]))
    return sorted(found, key=lambda each: -abs(each.tokens_per_s))


def in_words(found: list[ChangeCause], since: str, ratio_before: float, ratio_after: float) -> str:
    """Return a line with the direction of the balance, its causes, and the ratio of prefill to decode work."""
    tilt = "decode-heavy" if ratio_after < ratio_before else "prefill-heavy"
    reported = f"prefill : decode {ratio_before:.2g} → {ratio_after:.2g}"
    if not found:
        return f"{tilt} since {since}: {reported}"
    first = found[0]
    grew = "grew" if first.after > first.before else "fell"
    unit = "a second" if first.what == "requests" else "tokens"
    moved = f"{first.what} of {first.who} {grew} from {first.before:.3g} to {first.after:.3g} {unit}"
    return f"{tilt} since {since}: {moved}; {reported}"
