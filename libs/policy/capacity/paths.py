"""Sample paths of demand from a forecast's quantiles, with correlated hours and phases.

The random numbers come in as normal deviates. A path's deviate of an hour becomes a rate by the quantiles of that
hour (a Gaussian copula).
"""

from typing import Final

import numpy as np

from libs.policy.forecast.bands import LEVELS
from libs.policy.forecast.history import Floats

_Z: Final = np.array([-1.6448536, -1.2815516, -0.6744898, 0.0, 0.6744898, 1.2815516, 1.6448536])
"""The deviates of a standard normal distribution at `LEVELS`."""
# Quantiles are known from 5 to 95 %. The last stretch is extrapolated up to here and no further.
MOST_Z: Final = 3.0
LEAST_HANG: Final = 0.5
MOST_HANG: Final = 0.98
_TINY: Final = 1e-12
assert len(_Z) == len(LEVELS)


def hang_together(values: Floats, day: int) -> float:
    """Return the correlation of neighbouring bins of a series about its daily profile.

    It lies within `LEAST_HANG` and `MOST_HANG`, and is the mean of both where too little is known.
    """
    off = residuals(values, day)
    pairs = np.isfinite(off[1:]) & np.isfinite(off[:-1])
    if pairs.sum() < 24:
        return (LEAST_HANG + MOST_HANG) / 2
    return float(np.clip(_correlation(off[1:][pairs], off[:-1][pairs]), LEAST_HANG, MOST_HANG))


def phases_together(prefill: Floats, decode: Floats, day: int) -> float:
    """Return the correlation of both phases about their daily profiles, 0 to 1; 0.5 with too little data."""
    mine, its = residuals(prefill, day), residuals(decode, day)
    both = np.isfinite(mine) & np.isfinite(its)
    return float(np.clip(_correlation(mine[both], its[both]), 0.0, 1.0)) if both.sum() >= 24 else 0.5


def residuals(values: Floats, day: int) -> Floats:
    """Return logarithms less the mean of their time of day, or less the overall mean with fewer than two days."""
    seen = values[np.isfinite(values) & (values > 0)]
    offset = 0.01 * float(np.median(seen)) if len(seen) else 1.0
    logs = np.log(np.maximum(values, 0.0) + offset)
    out = np.full(len(logs), np.nan)
    step = day if day > 1 and len(logs) >= 2 * day else 1
    for place in range(step):
        part = logs[place::step]
        known = part[np.isfinite(part)]
        if len(known):
            out[place::step] = part - known.mean()
    return out


def _correlation(first: Floats, second: Floats) -> float:
    spread = float(first.std() * second.std())
    return float(((first - first.mean()) * (second - second.mean())).mean() / spread) if spread > _TINY else 0.0


def sample_paths(quantiles: Floats, deviates: Floats, hang: float, together: float) -> Floats:
    """Return sampled rates of shape [paths, series, horizons].

    `quantiles` is [series, horizons, levels], sorted, at least 0. `deviates` is [paths, series + 1, horizons],
    independent standard normals, of which the last of each path is common to all series. `hang` is the correlation
    of neighbouring horizons, `together` that of series.
    """
    common = np.sqrt(together) * deviates[:, -1:] + np.sqrt(1 - together) * deviates[:, :-1]
    z = np.empty_like(common)
    z[..., 0] = common[..., 0]
    fresh = np.sqrt(1 - hang * hang)
    for at in range(1, common.shape[-1]):
        z[..., at] = hang * z[..., at - 1] + fresh * common[..., at]
    z = np.clip(z, -MOST_Z, MOST_Z)
    out: Floats = np.empty(z.shape)
    for series in range(quantiles.shape[0]):
        for at in range(quantiles.shape[1]):
            out[:, series, at] = quantile_at(quantiles[series, at], z[:, series, at])
    return out


def quantile_at(quantiles: Floats, z: Floats) -> Floats:
    """Return the rates at standard normal deviates, interpolating between logarithms of quantiles of shape [levels]."""
    top = float(quantiles[-1])
    if top <= _TINY:
        return np.full(z.shape, 0.0)
    offset = 1e-3 * top
    logs = np.log(quantiles + offset)
    inner = np.interp(z, _Z, logs)
    below = logs[0] + (z - _Z[0]) * (logs[1] - logs[0]) / (_Z[1] - _Z[0])
    above = logs[-1] + (z - _Z[-1]) * (logs[-1] - logs[-2]) / (_Z[-1] - _Z[-2])
    found = np.where(z < _Z[0], below, np.where(z > _Z[-1], above, inner))
    rates: Floats = np.maximum(np.exp(found) - offset, 0.0)
    return rates
