"""When a series changed its level, and whose arrivals or lengths did it. Pure.

A level is the mean of the last half hour, in logarithms; it has changed when it is further from the day before than
half hours of that day were from each other. So slow waves within a day are no changes, and noise that hangs together
is judged by what half hours of it do, not by an assumption. The same with two and six hours finds smaller changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Final, Literal

import numpy as np

from libs.policy.forecast.history import Floats
from libs.policy.forecast.levels import hold

WINDOWS_S: Final = (1800.0, 7200.0, 21_600.0)
"""Over which levels are taken: a shift by half has to be found within the first; small ones need longer ones."""
REFERENCE_WINDOWS: Final = 48
"""Before it, a day of the first, with which it is compared; fewer after a change."""
LEAST_WINDOWS: Final = 12
"""Bins since the last change that a finding needs."""
Z: Final = 5.5
"""Standard deviations, of a normal distribution, that a level has to be off: 4e-8, as a month of a hundred series at
one minute makes four million looks."""
LEAST_RATIO: Final = 1.05
"""Smaller changes are left to the forecasts."""
SHOWN_RATIO: Final = 1.1
SHOWN_GPUS: Final = 0.1
"""A change of level by less, in share or in busy GPUs, is true and says nothing to a person."""
MOST_CHANGES: Final = 1000
_LEAST_SPREAD: Final = 0.01
_OFFSET: Final = 0.01


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change of a series' level."""

    began: int
    """First bin of the new level, as it looks at `found`."""
    found: int
    """Bin after which it was seen."""
    before: float
    after: float
    """Levels, in the series' unit."""

    @property
    def ratio(self) -> float:
        """After over before; inf from nothing."""
        return self.after / self.before if self.before else float("inf")


def matters(change: LevelChange, *, gpus: bool) -> bool:
    """Whether a change is large enough to be shown; `gpus`: its levels are busy GPUs."""
    low, high = sorted((change.before, change.after))
    return high >= low * SHOWN_RATIO and (not gpus or high - low >= SHOWN_GPUS)


def find_changes(values: Floats, step_s: float, expected: Floats | None = None) -> list[LevelChange]:
    """Changes of level in order; each depends on bins up to `found` alone. nan: not known.

    expected: what each bin was predicted to be a day before, where days have a season: the ratio to it is looked at.
    Levels are those of `values` all the same.
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
    """First bin from whose level those since `start` are too far off."""
    sums = np.concatenate([[0.0], np.cumsum(logs[start:])])
    means = (sums[window:] - sums[:-window]) / window  # of the window that ends at bin start + window - 1 + i
    first = LEAST_WINDOWS * window
    if len(means) <= first:
        return None
    places = np.arange(first, len(means))
    back = places[:, None] - window * np.arange(1, REFERENCE_WINDOWS + 1)[None]
    there = back >= 0
    earlier = np.where(there, means[np.maximum(back, 0)], 0.0)
    count = there.sum(axis=1)
    centre = earlier.sum(axis=1) / count
    spread = np.sqrt((((earlier - centre[:, None]) ** 2) * there).sum(axis=1) / (count - 1)) * np.sqrt(1 + 1 / count)
    # Student's quantile from the normal one, as the spread is of few windows (Wallace 1959).
    limit = np.sqrt((count - 1) * np.expm1(Z * Z / (count - 1))) * np.maximum(spread, _LEAST_SPREAD)
    alarms = np.flatnonzero(np.abs(means[places] - centre) > np.maximum(limit, log(LEAST_RATIO)))
    return start + window - 1 + int(places[alarms[0]]) if len(alarms) else None


def _began(logs: Floats, first: int, last: int) -> int:
    """Where `first` to `last` split best into two levels."""
    part = logs[first : last + 1]
    sizes = np.arange(1, len(part))
    sums = np.cumsum(part)[:-1]
    gap = (part.sum() - sums) / (len(part) - sizes) - sums / sizes
    return first + 1 + int(np.argmax(gap * gap * sizes * (len(part) - sizes)))


@dataclass(frozen=True, slots=True)
class TrafficRates:
    """Traffic of one tenant, model or class: requests a second, and tokens of each."""

    requests: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class ChangeCause:
    """A part of how much a phase's tokens changed."""

    who: str
    what: Literal["requests", "prompts", "outputs"]
    before: float
    after: float
    tokens_per_s: float
    """That it adds to the phase's tokens; all causes' add up to the change."""


def causes(
    before: Mapping[str, TrafficRates], after: Mapping[str, TrafficRates], phase: Literal["prefill", "decode"]
) -> list[ChangeCause]:
    """Whose arrivals and lengths changed a phase's tokens, the largest first.

    Parts add up without a rest: logarithmic mean Divisia index (Ang, Energy Policy 32, 2004). Who comes or goes counts
    by arrivals.
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
        # The logarithmic mean, by its series where both are close. By the parts' own sum, so that they leave no rest.
        share = sum(parts)
        mean = (new - old) / share if abs(share) > 1e-6 else (new + old) / 2
        found.append(ChangeCause(who, "requests", was.requests, now.requests, mean * parts[0]))
        found.append(ChangeCause(who, what, lengths[0], lengths[1], mean * parts[1]))
    return sorted(found, key=lambda each: -abs(each.tokens_per_s))


def in_words(found: list[ChangeCause], since: str, ratio_before: float, ratio_after: float) -> str:
    """One line: which way the balance went, by whom, and the ratio of prefill to decode work before and after."""
    tilt = "decode-heavy" if ratio_after < ratio_before else "prefill-heavy"
    reported = f"prefill : decode {ratio_before:.2g} → {ratio_after:.2g}"
    if not found:
        return f"{tilt} since {since}: {reported}"
    first = found[0]
    grew = "grew" if first.after > first.before else "fell"
    unit = "a second" if first.what == "requests" else "tokens"
    moved = f"{first.what} of {first.who} {grew} from {first.before:.3g} to {first.after:.3g} {unit}"
    return f"{tilt} since {since}: {moved}; {reported}"
