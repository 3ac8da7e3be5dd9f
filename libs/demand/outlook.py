"""The expected demand of one model: forecasts of all series, stretch by stretch."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.policy.capacity import hang_together, phases_together
from libs.policy.forecast.bands import DAY_S, LEVELS
from libs.policy.forecast.history import SERIES, DemandHistory, Floats, SeriesName
from libs.policy.forecast.model import DemandForecaster, HorizonExplanation

# A week of hours is the most that a forecast covers.
MOST_STRETCHES: Final = 168
# The nearest stretches are each predicted; of later ones every few are, and the others are interpolated.
CLOSE: Final = 6
FAR: Final = 48
EXPLAINED_S: Final = (600.0, 3600.0, 10_800.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class DemandOutlook:
    """Forecasts of demand from the end of a history on."""

    start_s: float
    """The beginning of the first stretch, in the history's time."""
    step_s: float
    quantiles: dict[SeriesName, Floats]
    """Rates per second at `LEVELS`, of shape [stretches, levels]."""
    notes: tuple[str, ...]
    hang: float
    """Correlation between neighbouring stretches of a series."""
    together: float
    """Correlation between the prefill and decode series."""
    carried: dict[SeriesName, list[HorizonExplanation]]
    """The candidates behind the forecasts of some stretches; empty if nothing is predicted."""

    def __len__(self) -> int:
        return len(self.quantiles["requests"])


def make_outlook(history: DemandHistory, horizon_s: float) -> DemandOutlook:
    """Return forecasts in stretches of the history's bins, or of several bins to stay within `MOST_STRETCHES`.

    Raise ValueError for a horizon shorter than a bin.
    """
    times = max(-(-round(horizon_s / history.step_s) // MOST_STRETCHES), 1)
    seen = coarser_history(history, times)
    count = int(horizon_s / seen.step_s + 1e-9)
    if count < 1:
        raise ValueError(f"a horizon of {horizon_s:g} s is shorter than a bin of {seen.step_s:g} s")
    horizons = looked_at(count)
    model = DemandForecaster().fit(seen, horizons)
    found = model.forecast(seen)
    quantiles = {name: fill(horizons, found[name].quantiles, count) for name in SERIES}
    day = max(round(DAY_S / seen.step_s), 1)
    notes = dict.fromkeys((*history.notes, *(note for name in SERIES for note in found[name].notes)))
    hang = hang_together(seen.prefill + seen.decode, day)
    together = phases_together(seen.prefill, seen.decode, day)
    carried = {name: explained(model.explain(name), seen.step_s) for name in SERIES}
    start_s = seen.start_s + len(seen) * seen.step_s
    return DemandOutlook(start_s, seen.step_s, quantiles, tuple(notes), hang, together, carried)


def explained(found: list[HorizonExplanation], step_s: float) -> list[HorizonExplanation]:
    """Return the explanations nearest to 10 minutes and 1, 3 and 24 hours ahead."""
    near = [min(found, key=lambda each: abs(each.horizon * step_s - ahead_s)) for ahead_s in EXPLAINED_S if found]
    return [each for at, each in enumerate(near) if each not in near[:at]]


def looked_at(count: int) -> tuple[int, ...]:
    """Return the horizons from 1 to `count` that are predicted directly; the last one is among them."""
    apart = max(count // FAR, 1)
    return tuple(sorted({*range(1, min(CLOSE, count) + 1), *range(count, CLOSE, -apart)}))


def fill(horizons: tuple[int, ...], quantiles: Floats, count: int) -> Floats:
    """Interpolate quantiles to all horizons, of shape [count, levels]."""
    wanted = np.arange(1, count + 1)
    return np.stack([np.interp(wanted, horizons, quantiles[:, level]) for level in range(len(LEVELS))], axis=1)


def coarser_history(history: DemandHistory, times: int) -> DemandHistory:
    """Return longer bins that end with the history, as means of the known bins in each."""
    if times == 1:
        return history
    skip = len(history) % times

    def means(values: Floats) -> Floats:
        parts = values[skip:].reshape(-1, times)
        known = np.isfinite(parts)
        count = known.sum(axis=1)
        found = np.where(known, parts, 0.0).sum(axis=1) / np.maximum(count, 1)
        return np.asarray(np.where(2 * count >= times, found, np.nan))

    start_s = history.start_s + skip * history.step_s
    series = (means(history.requests), means(history.prefill), means(history.decode))
    return DemandHistory(history.step_s * times, start_s, *series, notes=history.notes)
