"""Arithmetic that works alike on one number and on an array with one element per split.

Pressures of single splits and of many side by side are written once, in these terms.
"""

from math import floor
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Truths = NDArray[np.bool_]
N = TypeVar("N", float, Numbers)


def least(one: N, other: N | float) -> N:
    """Return the elementwise minimum."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def most(one: N, other: N | float) -> N:
    """Return the elementwise maximum."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def where(condition: bool | Truths, then: N | float, other: N) -> N:
    """Return `then` where the condition holds, else `other`."""
    found: Any = other
    if not isinstance(condition, np.ndarray):
        found = then if condition else other
    elif np.count_nonzero(condition):  # most conditions hold nowhere, and this check takes a tenth of the time
        found = np.where(condition, then, other)
    return cast("N", found)


def over(one: N | float, other: N, none: float) -> N:
    """Return one / other elementwise, with `none` where `other` is 0."""
    if isinstance(other, np.ndarray):
        if np.count_nonzero(other) == other.size:
            return one / other
        nothing = other == 0
        return np.where(nothing, none, one / np.where(nothing, 1.0, other))
    return one / other if other else none


def whole(one: N) -> N:
    return np.floor(one) if isinstance(one, np.ndarray) else floor(one)


def rounded(one: N) -> N:
    """Round to the nearest whole number; ties go to the even one, as in `round`."""
    return np.rint(one) if isinstance(one, np.ndarray) else round(one)
