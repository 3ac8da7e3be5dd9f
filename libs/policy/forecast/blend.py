"""Weights of candidate forecasts, learned from how each would have done: convex, and near a prior. Pure.

Exponentiated gradient descent on the mean absolute error (Kivinen and Warmuth, Information and Computation 132,
1997), stopped early: with days of history and horizons of hours there are few independent errors to learn from.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from libs.policy.forecast.history import Floats
from libs.policy.forecast.targets import Targets

PRIOR_PULL: Final = 0.03
PRIOR_ROWS: Final = 600
"""The prior pulls harder with fewer rows than these."""
_RATE: Final = 0.3
_SOFT: Final = 0.03
"""Errors below count quadratically."""
_ROUNDS: Final = 60
_LAST_ROUNDS: Final = 150
_STRIDE: Final = 3
"""Every so many-th origin is learned from: neighbours say the same."""
_LEAST_ROWS: Final = 12


def checkpoints(bins: int, day: int) -> list[int]:
    """Bins at which weights are learned anew: quarter and half a day, then each whole one."""
    early = [at for at in (day // 4, day // 2) if 0 < at < bins]
    return [*early, *range(day, bins, day)] if day > 1 else early


def learn(targets: Targets, actual: Floats, horizons: Sequence[int], day: int) -> tuple[Floats, Floats]:
    """(weights [horizons, targets], forecasts [horizons, n] of each origin by weights learned before it).

    actual: [n] logarithms, nan where unknown; bins before the first checkpoint are foretold by the prior.
    """
    count = len(actual)
    foretold = np.einsum("hnd,hd->hn", targets.values, targets.prior)
    weights = targets.prior.copy()
    points = checkpoints(count, day)
    for at, following in zip(points, [*points[1:], count], strict=False):
        weights = _descend(targets, actual[:at], horizons, weights, _ROUNDS)
        foretold[:, at:following] = np.einsum("hnd,hd->hn", targets.values[:, at:following], weights)
    return _descend(targets, actual, horizons, weights, _LAST_ROUNDS), foretold


def _descend(targets: Targets, actual: Floats, horizons: Sequence[int], start: Floats, rounds: int) -> Floats:
    """From `start` towards the least error over the origins whose outcome is in `actual`."""
    out = start.copy()
    for place, horizon in enumerate(horizons):
        origins = np.arange(0, len(actual) - horizon, _STRIDE)
        origins = origins[np.isfinite(actual[origins + horizon]) & np.isfinite(actual[origins])]
        if len(origins) < _LEAST_ROWS:
            continue
        candidates, wanted = targets.values[place, origins], actual[origins + horizon]
        prior = targets.prior[place]
        pull = PRIOR_PULL * max(1.0, PRIOR_ROWS / (_STRIDE * len(origins)))
        scale = len(origins) * (float(np.abs(wanted - candidates @ prior).mean()) + 1e-9)
        logs, log_prior = np.log(np.maximum(out[place], 1e-12)), np.log(prior)
        weights, rows = out[place], np.ascontiguousarray(candidates.T)
        for _ in range(rounds):
            errors = wanted - candidates @ weights
            gradient = pull * (logs - log_prior) - rows @ (errors / np.sqrt(errors * errors + _SOFT * _SOFT)) / scale
            logs = logs - _RATE / (1 + pull) * (gradient - gradient @ weights)
            logs -= logs.max()
            weights = np.exp(logs)
            weights /= weights.sum()
            logs = np.log(np.maximum(weights, 1e-12))
        out[place] = weights
    return out
