"""Agreement of sums: medians of a total and of its parts that add up.

The total's own forecast and the sum of its parts are weighted by their variances, as in weighted least squares. (See
Wickramasuriya, Athanasopoulos and Hyndman, JASA 114, 2019.) The parts take up the rest by their standard deviations:
the same rule for errors that move together. Bands stay those of each series, since quantiles do not add up.
"""

from typing import Final

import numpy as np

from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import Floats

MEDIAN: Final = LEVELS.index(0.5)
# Standard deviations between the 5 % and the 95 % quantile of a normal distribution.
_BAND: Final = 3.29
# Medians are multiples of the total over 2 to this power, so that floats add up without rounding in any order.
_BITS: Final = 36
# The minimum deviation of a series, relative to the sum of all medians; bands of zero width would divide by zero.
_LEAST: Final = 1e-9


def reconcile(total: Floats, parts: Floats) -> tuple[Floats, Floats]:
    """Return quantiles of (the total, the parts) whose medians add up exactly and are not negative.

    `total` is [horizons, levels] and `parts` [parts, horizons, levels]; both are at least 0.
    """
    sums = parts[:, :, MEDIAN].sum(axis=0)
    own, others = _deviations(total[None], sums)[0] ** 2, (_deviations(parts, sums) ** 2).sum(axis=0)
    median = total[:, MEDIAN] + own / (own + others) * (sums - total[:, MEDIAN])
    unit = _unit(median)
    agreed = with_median(total, np.round(median / unit) * unit)
    return agreed, share_out(agreed, parts)


def share_out(total: Floats, parts: Floats) -> Floats:
    """Return the parts with medians that add up exactly to the total's, which stays as it is."""
    wanted, medians = total[:, MEDIAN], parts[:, :, MEDIAN]
    weights, free = _deviations(parts, medians.sum(axis=0)), np.ones(medians.shape, np.bool_)
    found = medians
    # Parts that would be negative are 0, and the others take up the difference: each round ends or adds such a part.
    for _ in range(len(parts)):
        given = np.where(free, weights, 0.0)
        rest = wanted - np.where(free, medians, 0.0).sum(axis=0)
        found = np.where(free, medians + given / np.maximum(given.sum(axis=0), 1e-300) * rest, 0.0)
        if not (found < 0).any():
            break
        free &= found >= 0
    unit = _unit(wanted)
    found = np.floor(np.maximum(found, 0.0) / unit) * unit
    # The largest part absorbs the rounding error.
    largest, every = found.argmax(axis=0), np.arange(len(wanted))
    found[largest, every] += wanted - found.sum(axis=0)
    return np.stack([with_median(part, median) for part, median in zip(parts, found, strict=True)])


def with_median(quantiles: Floats, median: Floats) -> Floats:
    """Return the quantiles with another median; bands change only if they would not contain it."""
    found = quantiles.copy()
    found[:, :MEDIAN] = np.minimum(quantiles[:, :MEDIAN], median[:, None])
    found[:, MEDIAN + 1 :] = np.maximum(quantiles[:, MEDIAN + 1 :], median[:, None])
    found[:, MEDIAN] = median
    return found


def _deviations(quantiles: Floats, sums: Floats) -> Floats:
    """Return standard deviations by the width of the 90 % band, of shape [series, horizons]."""
    width = quantiles[:, :, -1] - quantiles[:, :, 0]
    return np.asarray(width / _BAND + _LEAST * (sums + quantiles[:, :, -1]) + 1e-150)


def _unit(values: Floats) -> Floats:
    """Return the grid of medians for totals of this size, a power of two."""
    return np.asarray(np.ldexp(1.0, np.maximum(np.frexp(values)[1] - _BITS, -1000)))
