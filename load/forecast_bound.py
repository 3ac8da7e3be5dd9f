"""Compute the best errors that forecasts of synthetic series could reach a day ahead. The last line is JSON.

    python -m load.forecast_bound

The first figures are errors of a forecaster that knows how a series was drawn, over those of the best baseline *in
hindsight*. It knows the season, the level without noise, and a change from its first moment on. It does not know future
noise. The second figures are the shares of draws in which exact bands contain 87 to 93 % of four days of outcomes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from libs.cli.console import plain_table
from libs.forecast.backtest import BacktestPlan, make_plan, run, score
from libs.forecast.baselines import light_baselines
from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import DemandHistory, Floats, SeriesName
from load.forecast_series import (
    CHANGED_DAY,
    DAY,
    OUTPUT_BINS,
    PROMPT_BINS,
    STEP_S,
    SUITE,
    WEEKS,
    DrawnParts,
    draw_parts,
)
from load.measure import show

AHEAD: Final = DAY
EVERY: Final = 2
DRAWS: Final = 600
SCORED: Final = 4 * DAY
# (size of the noise, half-life of its level in hours, drift of the level per bin).
NOISES: Final = {
    "as trend, migration": (0.12, 4.0, 0.0),
    "as resets": (0.2, 4.0, 0.0),
    "as bursty": (0.5, 0.7, 0.0),
    "as regime, changed": (0.25, 1.0, 0.0),
    "as drifting": (0.08, 4.0, 0.035),
}
Medians = dict[SeriesName, Floats]


def _medians(parts: DrawnParts, added: Floats | float, lengths: float = 0.0) -> Medians:
    """Return the median at `AHEAD` bins after each origin. `added` is the part of the level that the origin knows."""
    target = np.minimum(np.arange(WEEKS) + AHEAD, WEEKS - 1)
    arrivals = parts.season[target] + 0.5 ** (AHEAD / (6 * parts.hours)) * parts.level + added
    prompts = arrivals + 0.5 ** (AHEAD / PROMPT_BINS) * parts.prompts + np.log(900.0)
    outputs = arrivals + 0.5 ** (AHEAD / OUTPUT_BINS) * parts.outputs + np.log(220.0) + lengths
    return {"requests": np.exp(arrivals), "prefill": np.exp(prompts), "decode": np.exp(outputs)}


def _trend() -> Medians:
    parts = draw_parts(21)
    return _medians(parts, np.log(4.0) + 0.09 * (parts.at_day + AHEAD / DAY))


def _launch() -> Medians:
    """Return medians that know the present level. Future growth counts as noise."""
    parts = draw_parts(23, noise=0.2)
    return _medians(parts, np.log(40.0) - 4.0 / (1 + np.exp((parts.at_day - CHANGED_DAY) * 3)))


def _regime() -> Medians:
    parts, other = draw_parts(26), draw_parts(27, day=0.2, noise=0.25, hours=1)
    changed = DrawnParts(
        parts.rng, parts.at_day, other.season, other.level, other.hours, other.noise, other.burst, parts.prompts,
        parts.outputs,
    )  # fmt: skip
    before, after = _medians(parts, np.log(6.0)), _medians(changed, np.log(6.0) + 0.7, 1.1)
    return {name: np.where(parts.at_day >= CHANGED_DAY, after[name], before[name]) for name in before}


def _resets() -> Medians:
    return _medians(draw_parts(29, noise=0.2), np.log(15.0))


def _drifting() -> Medians:
    parts = draw_parts(32, day=0.25, noise=0.08)
    return _medians(parts, np.log(30.0) + np.cumsum(parts.rng.normal(0, 0.035, WEEKS)))


KNOWING: Final[dict[str, Callable[[], Medians]]] = {
    "trend": _trend, "launch": _launch, "regime": _regime, "resets": _resets, "drifting": _drifting,
}  # fmt: skip


class Knowing:
    """A forecaster that returns given medians."""

    def __init__(self, medians: Medians) -> None:
        self._medians = medians

    def fit(self, history: DemandHistory, horizons: tuple[int, ...]) -> "Knowing":
        del history, horizons
        return self

    def forecast_at(self, history: DemandHistory, name: SeriesName, origins: Sequence[int]) -> Floats:
        del history
        return np.repeat(self._medians[name][list(origins), None, None], len(LEVELS), axis=2)


def error_over_best(history: DemandHistory, medians: Medians) -> dict[str, float]:
    """Return, by series, the error a day ahead over that of the best baseline in hindsight."""
    plan: BacktestPlan = make_plan(history, (AHEAD * STEP_S,))
    found = score(run(history, plan, Knowing(medians), light_baselines(), every=EVERY))
    return {each["series"]: each["wape"] / each["baselines"][each["best_in_hindsight"]]["wape"] for each in found}


def _noise(rng: np.random.Generator, bins: int, kind: tuple[float, float, float]) -> Floats:
    size, hours, drift = kind
    made = draw_parts(int(rng.integers(2**31)), bins, noise=size, hours=hours)
    drifted = np.cumsum(rng.normal(0, drift, bins + AHEAD))
    return np.asarray(made.level + made.noise + made.burst + drifted[AHEAD:] - drifted[:-AHEAD])


def exact_bands(kind: tuple[float, float, float], draws: int = DRAWS) -> float:
    """Return the share of draws in which the exact 90 % band contains 87 to 93 % of four days of outcomes."""
    rng = np.random.default_rng(5)
    low, high = np.quantile(np.concatenate([_noise(rng, 20_000, kind) for _ in range(10)]), [0.05, 0.95])
    errors = np.stack([_noise(rng, SCORED, kind)[::EVERY] for _ in range(draws)])
    held = ((errors >= low) & (errors <= high)).mean(axis=1)
    return float(((held >= 0.87) & (held <= 0.93)).mean())


def main() -> None:
    table = plain_table("series", "requests", "prefill", "decode", left=("series",))
    errors = {
        each.name: error_over_best(each.read(Path()), KNOWING[each.name]()) for each in SUITE if each.name in KNOWING
    }
    for name, by_series in errors.items():
        table.add_row(name, *(f"{each:.2f}" for each in by_series.values()))
    show(table)
    held = {name: exact_bands(kind) for name, kind in NOISES.items()}
    for name, share in held.items():
        print(f"exact bands, noise {name}: {share:.0%} of series hold 0.87 to 0.93")
    print(json.dumps({"bench": "forecast-bound", "errors": errors, "exact_bands": held}))


if __name__ == "__main__":
    main()
