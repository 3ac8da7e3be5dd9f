"""The score of a reservation: how often demand exceeded it, how certain that is, and its cost against hindsight."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.lab.models.usage import Floats

RESAMPLES: Final = 2000
# Consecutive windows are drawn together, since misses seldom come alone.
BLOCK_WINDOWS: Final = 30
INTERVAL: Final = (0.025, 0.975)
SLACK: Final = 1.05
SLACK_GPUS: Final = 1.0
"""Allowances over the best constant reservation in hindsight, of which the larger one counts."""


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
    """The mean reservation over that in hindsight."""
    keeps_confidence: bool
    """Whether the upper end of the interval reaches the confidence."""
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
    """Score one policy. `held` is the GPUs paid for, which may exceed those reserved at the start of a window."""
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
