"""Small non-negative least squares with a prior. Pure."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Upper bound of the active-set search, which ends by itself long before.
MAX_TURNS: Final = 64
# Standard deviations beyond which residuals have no weight. Smaller ones have nearly full weight (95 % efficiency).
TUKEY: Final = 4.685
# Relative noise below which nothing is an outlier.
MIN_SCALE: Final = 0.002

# Rows that a kind needs for a scale of its own.
MIN_KIND_ROWS: Final = 8

Floats = NDArray[np.float64]


def nonnegative(gram: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimises x·gram·x / 2 − target·x, for a positive definite gram (Lawson and Hanson's
    method).
    """
    size = len(target)
    x, free = np.zeros(size), np.zeros(size, dtype=bool)
    for _ in range(MAX_TURNS):
        gradient = np.where(free, -np.inf, target - gram @ x)
        enters = int(gradient.argmax())
        if gradient[enters] <= 1e-12:
            break
        free[enters] = True
        while free.any():
            wanted = np.zeros(size)
            wanted[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            blocked = free & (wanted <= 0)
            if not blocked.any():
                x = wanted
                break
            step = (x[blocked] / np.maximum(x[blocked] - wanted[blocked], 1e-300)).min()
            x = np.where(free, np.maximum(x + min(step, 1.0) * (wanted - x), 0.0), 0.0)
            free &= x > 1e-15
    return x


def with_prior(design: Floats, weight: Floats, prior: Floats, prior_rows: float) -> Floats:
    """Return coefficients >= 0 for design·x ≈ 1, close to `prior` where the data leave them open.

    design: [rows, coefficients]. The prior has as much weight on each coefficient as `prior_rows` rows of that
    column's usual size. A column that no row uses keeps its prior.
    """
    size = np.sqrt((weight[:, None] * design**2).sum(axis=0) / max(weight.sum(), 1e-300))
    used = size > 0
    found = prior.copy()
    if not used.any():
        return found
    scaled = design[:, used] / size[used]
    gram = (scaled * weight[:, None]).T @ scaled + prior_rows * np.eye(int(used.sum()))
    target = scaled.T @ weight + prior_rows * prior[used] * size[used]
    found[used] = nonnegative(gram, target) / size[used]
    return found


def robust_weights(residual: Floats, kinds: Sequence[NDArray[np.bool_]]) -> Floats:
    """Return [rows]: 1 for residuals within the noise, falling to 0 for outliers.

    The weight is Tukey's biweight, with a scale from the median. kinds: each [rows], which together name every row
    once. Each kind has a scale of its own. With a single scale, the few rows of a badly predicted kind could all be
    outliers and never be learned from. A kind with too few rows takes the scale of all rows.
    """
    size = np.abs(residual)
    scale = np.full(len(size), np.median(size))
    for kind in kinds:
        if np.count_nonzero(kind) >= MIN_KIND_ROWS:
            scale[kind] = np.median(size[kind])
    inside = np.clip(1 - (size / (TUKEY * np.maximum(1.4826 * scale, MIN_SCALE))) ** 2, 0, None)
    return np.asarray(inside**2)
