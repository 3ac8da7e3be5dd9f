"""How many GPUs the active models need: distributions of sums of independent variables, and their mixtures."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

RARE: Final = 1e-3
"""The probability below which models are counted together, as a Poisson number of their mean size.

By Le Cam's bound this changes no probability by more than half the sum of the squares of their probabilities.
"""
POISSON_TAIL: Final = 1e-12


def gpu_units(gpus: Floats) -> tuple[Whole, float]:
    """Return sizes as integer multiples of a unit, rounded up, and the unit: 1 GPU, 1/2, 1/4 or, at the finest, 1/8."""
    for parts in (1, 2, 4):
        if np.all(np.abs(gpus * parts - np.rint(gpus * parts)) < 1e-9):
            return np.rint(gpus * parts).astype(np.int64), 1 / parts
    return np.ceil(gpus * 8 - 1e-9).astype(np.int64), 1 / 8


def sum_distribution(probability: Floats, units: Whole) -> Floats:
    """Return the distribution of the units of the active models, which are active independently of each other.

    It is Poisson-binomial if all have one unit. `probability` has the shape [cases, models], with one distribution
    per case. The result has the shape [cases, sum of units + 1]. Its last place also holds the mass beyond the tail
    of rare models.
    """
    cases = probability.shape[0]
    is_rare = probability.max(axis=0, initial=0.0) < RARE
    often = np.flatnonzero(~is_rare)
    rare_mean = probability[:, is_rare] @ np.ones(int(is_rare.sum()))
    rare_units = max(round(float(units[is_rare].mean())), 1) if is_rare.any() else 1
    rare_most = _poisson_most(float(rare_mean.max(initial=0.0)))
    size = int(units[often].sum()) + rare_units * rare_most + 1
    found = np.zeros((cases, size))
    found[:, 0] = 1.0
    top = 1
    for place in often:
        chance, width = probability[:, place, None], int(units[place])
        top += width
        moved = found[:, : top - width] * chance
        found[:, :top] *= 1 - chance
        found[:, width:top] += moved
    return _plus_poisson(found, top, rare_mean, rare_units, rare_most) if rare_most else found


def _poisson_most(mean: float) -> int:
    """Return the number beyond which a Poisson variable of this mean has less than `POISSON_TAIL`."""
    most, term, tail = 0, float(np.exp(-mean)), 1 - float(np.exp(-mean))
    while tail > POISSON_TAIL and most < 1000:
        most += 1
        term *= mean / most
        tail -= term
    return most


def _plus_poisson(found: Floats, top: int, mean: Floats, width: int, most: int) -> Floats:
    total = np.zeros_like(found)
    weight = np.exp(-mean)
    left = np.ones_like(weight)
    for count in range(most + 1):
        share = left if count == most else weight
        total[:, count * width : count * width + top] += found[:, :top] * share[:, None]
        left = np.maximum(left - weight, 0.0)
        weight = weight * mean / (count + 1)
    return total


def quantile(distribution: Floats, level: float) -> int:
    """Return the smallest number that is not exceeded with at least this probability."""
    return not_passed(distribution, 1 - level + 1e-12)


def not_passed(distribution: Floats, miss: float) -> int:
    """Return the smallest number that is exceeded with at most this probability."""
    # Summing from the far end keeps tiny probabilities exact.
    beyond = np.cumsum(distribution[::-1])[::-1]
    found = np.searchsorted(-beyond, -miss, side="left")
    return max(min(int(found), len(distribution)) - 1, 0)


def mean_of(distribution: Floats) -> float:
    return float(distribution @ np.arange(len(distribution)))
