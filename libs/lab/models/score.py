"""What a reservation was worth: how often it was passed, with what certainty, and what hindsight would have taken."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from libs.lab.models.usage import Floats

RESAMPLES: Final = 2000
BLOCK_WINDOWS: Final = 30
"""Windows that follow one another and are drawn together, since a miss seldom comes alone."""
INTERVAL: Final = (0.025, 0.975)
SLACK: Final = 1.05
SLACK_GPUS: Final = 1.0
"""Over the best constant reservation in hindsight: as much as the larger of the two."""


@dataclass(frozen=True, slots=True)
class ReserveScore:
    """What one way to reserve comes to, over the windows that were not learned from alone."""

    policy: str
    coverage: float
    """Share of windows in which no more GPUs were needed at once than were reserved."""
    interval: tuple[float, float]
    """Of that, at 95 %, by block bootstrap."""
    reserved_gpus: float
    """Mean over windows."""
    cost: float
    """Reserved over what hindsight would have reserved."""
    keeps_confidence: bool
    """The interval reaches the confidence."""
    keeps_cost: bool


def clairvoyant(peak_gpus: Floats, per_period: int, confidence: float) -> Floats:
    """For each window the smallest whole reservation, constant over its planning period, that no more than 1 − the
    confidence of the period's windows pass. What is left at the end is a period too."""
    found = np.empty(len(peak_gpus))
    for begin in range(0, len(peak_gpus), per_period):
        part = np.sort(peak_gpus[begin : begin + per_period])
        allowed = int((1 - confidence) * len(part) + 1e-9)
        found[begin : begin + per_period] = np.ceil(part[len(part) - 1 - allowed] - 1e-9)
    return found


def grade(
    policy: str, reserved_gpus: Floats, peak_gpus: Floats, hindsight_gpus: Floats, *, confidence: float, held: Floats
) -> ReserveScore:
    """held: GPUs that are paid for, where a policy takes more within a window than it had at its start; else those
    reserved."""
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
    """Confidence interval of the mean: blocks that may overlap, drawn with replacement, as many as are as long as the
    whole."""
    count = len(values)
    block = min(BLOCK_WINDOWS, max(count // 4, 1))
    sums = np.convolve(values, np.ones(block), mode="valid")
    drawn = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, -(-count // block)))
    means = sums[drawn].mean(axis=1) / block
    low, high = np.quantile(means, INTERVAL)
    return float(low), float(high)
