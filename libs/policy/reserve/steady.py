"""The long-run share of time that a model is active, from the laws of its arrivals and of its run times."""

from collections.abc import Callable
from math import lgamma
from typing import Final

import numpy as np

from libs.policy.reserve.counts import Floats

STEPS: Final = 2400
"""The number of grid points on which the renewal equation is solved."""
REACH: Final = 16.0
"""The end of the grid in mean run times, by which an exponential run has certainly ended."""

Cdf = Callable[[Floats], Floats]


def poisson_active(rate_per_s: Floats, run_s: Floats) -> Floats:
    """Return the share of time with at least one request in flight, for Poisson arrivals and any run times of that
    mean.

    It is 1 − exp(−λT) (M/G/∞). The sum over models is the expected number of active ones.
    """
    return -np.expm1(-rate_per_s * run_s)


def gamma_cdf(shape: float, at: Floats) -> Floats:
    """Return the cumulative distribution of a gamma distribution of scale 1.

    It sums the series of the incomplete gamma function, whose terms are all positive.
    """
    x = np.clip(at, 0.0, 60.0)
    term = np.full_like(x, 1 / shape)
    total = term.copy()
    for n in range(1, 240):
        term = term * x / (shape + n)
        total += term
    with np.errstate(divide="ignore"):
        found = np.exp(shape * np.log(x) - x - lgamma(shape)) * total
    return np.where(at >= 60.0, 1.0, np.clip(found, 0.0, 1.0))


def renewal_active(gap: Cdf, mean_gap_s: float, run: Cdf, reach_s: float) -> float:
    """Return the share of time with at least one request in flight, for independent gaps and runs (GI/G/∞).

    Suppose the latest request before some time came s earlier. Let h(s) be the probability that neither it nor any
    earlier request is still in flight. Then h(s) = run(s)·∫h(s + x) dgap(x), solved backwards from h = 1 at
    `reach_s`. The idle share is the mean of h over the equilibrium law of the time since the last arrival, whose
    density is (1 − gap)/mean.
    """
    step_s = reach_s / STEPS
    edges: Floats = np.arange(STEPS + 1, dtype=np.float64) * step_s
    middles: Floats = edges[:-1] + step_s / 2
    below = gap(edges + step_s / 2)
    at_zero, weights = float(below[0]), np.diff(below)
    ended = run(middles)
    idle = np.ones(2 * STEPS)
    for place in range(STEPS - 1, -1, -1):
        later = idle[place + 1 : place + 1 + STEPS]
        beyond = 1 - float(below[-1])
        if len(later) < STEPS:
            beyond += float(weights[len(later) :].sum())
        reached = float(weights[: len(later)] @ later) + beyond
        idle[place] = ended[place] * reached / (1 - ended[place] * at_zero)
    surviving = 1 - gap(edges)
    inside = (surviving[:-1] + surviving[1:]) / 2 * step_s / mean_gap_s
    return float(np.clip(inside @ (1 - idle[:STEPS]), 0.0, 1.0))


def gamma_active(rate_per_s: float, gap_cv: float, run_s: float) -> float:
    """Return `renewal_active` for gamma gaps with this coefficient of variation and exponential runs."""
    shape = 1 / (gap_cv * gap_cv)
    scale_s = 1 / (rate_per_s * shape)
    return renewal_active(
        lambda at: gamma_cdf(shape, at / scale_s), 1 / rate_per_s, lambda at: -np.expm1(-at / run_s), REACH * run_s
    )
