"""Small non-negative least squares with a prior. Pure."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_TURNS: Final = 64
"""Of the active-set search; it ends by itself long before."""
TUKEY: Final = 4.685
"""Standard deviations beyond which residuals count nothing; nearer ones nearly all (95 % efficient)."""
MIN_SCALE: Final = 0.002
"""Relative noise below which nothing is an outlier."""

MIN_KIND_ROWS: Final = 8
"""Rows of a kind from which its own scale is taken."""

Floats = NDArray[np.float64]


def nonnegative(gram: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimises x·gram·x / 2 − target·x, for a positive definite gram (Lawson and Hanson's method)."""
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
    """Coefficients >= 0 for design·x ≈ 1, where the data leave them open near `prior`.

    design: [rows, coefficients]. The prior pulls on each coefficient like `prior_rows` rows of that column's usual
    size; a column that no row uses keeps its prior.
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
    """[rows]: 1 for residuals within the noise, falling to 0 for outliers (Tukey's biweight, scale from the median).

    kinds: each [rows], which together name every row once. Each kind has a scale of its own: where many rows of one are
    predicted well, few of another that is predicted badly would all be outliers, and nothing would ever be learned of
    them. A kind with too few rows for a scale of its own takes the scale of all.
    """
    size = np.abs(residual)
    scale = np.full(len(size), np.median(size))
    for kind in kinds:
        if np.count_nonzero(kind) >= MIN_KIND_ROWS:
            scale[kind] = np.median(size[kind])
    inside = np.clip(1 - (size / (TUKEY * np.maximum(1.4826 * scale, MIN_SCALE))) ** 2, 0, None)
    return np.asarray(inside**2)
