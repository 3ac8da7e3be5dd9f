"""Scores of forecasts: errors of the point, scores of the band, and its coverage."""

from typing import Final

import numpy as np

from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import Floats

RESAMPLES: Final = 400
# Errors of neighbouring bins are correlated, so blocks of the bootstrap have at least this length.
BLOCK_BINS: Final = 36


def wape(actual: Floats, point: Floats) -> float:
    """Return the sum of absolute errors over the sum of outcomes; nan if that is 0."""
    whole = float(np.abs(actual).sum())
    return float(np.abs(actual - point).sum()) / whole if whole else float("nan")


def mase(actual: Floats, point: Floats, naive_error: float) -> float:
    """Return the mean absolute error over that of the naive forecast on the training days.

    Source: Hyndman and Koehler 2006.
    """
    return float(np.abs(actual - point).mean()) / naive_error if naive_error > 0 else float("nan")


def pinball(actual: Floats, quantiles: Floats) -> float:
    """Return the mean quantile loss over outcomes and `LEVELS`, for quantiles of shape [outcomes, levels]."""
    levels = np.array(LEVELS)
    short = actual[:, None] - quantiles
    return float(np.maximum(levels * short, (levels - 1) * short).mean())


def interval_score(actual: Floats, quantiles: Floats) -> float:
    """Return the weighted interval score of the median and its bands (Bracher et al., PLOS Comp. Biology 2021).

    With their weights it is twice the mean quantile loss.
    """
    return 2 * pinball(actual, quantiles)


def inside(actual: Floats, quantiles: Floats) -> Floats:
    """Return 1 for each outcome in the 90 % band, else 0."""
    return ((actual >= quantiles[:, 0]) & (actual <= quantiles[:, -1])).astype(np.float64)


def block_error(held: Floats, block: int, seed: int = 1) -> float:
    """Return the standard error of the mean of ordered outcomes by a moving block bootstrap.

    Blocks have at least `BLOCK_BINS` bins, but at most a third of the outcomes, as fewer blocks are no sample.
    """
    length = max(min(max(block, BLOCK_BINS), len(held) // 3), 1)
    if not len(held):
        return float("nan")
    blocks = -(-len(held) // length)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(held) - length + 1, (RESAMPLES, blocks))
    sums = np.concatenate([[0.0], np.cumsum(held)])
    return float(((sums[starts + length] - sums[starts]).sum(axis=1) / (blocks * length)).std())
