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
_MOST_ROWS: Final = 800
"""The stride of origins that are learned from, fewer in a long history: neighbours say the same."""
_STEP: Final = 1.12
"""Between checkpoints, at least; in a short history it is a day."""
_LEAST_ROWS: Final = 12


def checkpoints(bins: int, day: int) -> list[int]:
    """Bins at which weights are learned anew: quarter and half a day, days, then every eighth of the history."""
    found, at = [day // 4, day // 2], day
    while at < bins:
        found.append(at)
        at = max(at + day, int(at * _STEP))
    return [at for at in found if 0 < at < bins]


def learn(targets: Targets, actual: Floats, horizons: Sequence[int], day: int) -> tuple[Floats, Floats]:
    """(weights [horizons, targets], forecasts [horizons, n] of each origin by weights learned before it).

    actual: [n] logarithms, nan where unknown; bins before the first checkpoint are predicted by the prior.
    """
    count = len(actual)
    points = checkpoints(count, day)
    weights = targets.prior.copy()
    predicted = np.empty((len(horizons), count))
    for at, following in zip([0, *points], [*points, count], strict=True):
        weights = _descend(targets, actual[:at], horizons, weights, _ROUNDS)
        predicted[:, at:following] = (targets.values[:, at:following] @ weights[:, :, None])[:, :, 0]
    return _descend(targets, actual, horizons, weights, _LAST_ROUNDS), predicted


def _descend(targets: Targets, actual: Floats, horizons: Sequence[int], start: Floats, rounds: int) -> Floats:
    """From `start` towards the least error over the origins whose outcome is in `actual`."""
    count = len(actual)
    origins = np.arange(0, max(count - min(horizons), 0), max(_STRIDE, -(-count // _MOST_ROWS)))
    origins = origins[np.isfinite(actual[origins])]
    after = origins[None] + np.array(horizons)[:, None]
    wanted = np.where(after < count, actual[np.minimum(after, count - 1)], np.nan) if len(origins) else after * np.nan
    known = np.isfinite(wanted)
    rows = known.sum(axis=1)
    learning = rows >= _LEAST_ROWS
    if not learning.any():
        return start
    wanted, share = np.where(known, wanted, 0.0), known / np.maximum(rows, 1)[:, None]  # [horizons, origins]
    candidates = targets.values[:, origins]
    turned = np.ascontiguousarray(candidates.transpose(0, 2, 1))
    log_prior = np.log(targets.prior)
    pull = PRIOR_PULL * np.maximum(1.0, PRIOR_ROWS / (_STRIDE * np.maximum(rows, 1)))[:, None]
    off = np.abs(wanted - (candidates @ targets.prior[:, :, None])[:, :, 0])
    scale = ((off * share).sum(axis=1) + 1e-9)[:, None]
    logs = np.log(np.maximum(start, 1e-12))
    weights = start
    for _ in range(rounds):
        errors = wanted - (candidates @ weights[:, :, None])[:, :, 0]
        signs = errors / np.sqrt(errors * errors + _SOFT * _SOFT) * share
        gradient = pull * (logs - log_prior) - (turned @ signs[:, :, None])[:, :, 0] / scale
        gradient -= (gradient * weights).sum(axis=1, keepdims=True)
        logs = logs - _RATE / (1 + pull) * gradient
        weights = np.exp(logs - logs.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        logs = np.log(np.maximum(weights, 1e-12))
    return np.asarray(np.where(learning[:, None], weights, start))
