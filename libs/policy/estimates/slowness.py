"""How much slower a worker is than it says, learned from its own answers. Pure.

A worker tells its speed, and may be wrong: a device that was throttled, a neighbour on its host, a fit that lags. Where
its answers come later than predicted again and again, and by much, it is taken for slower by as much, and the other way
when they come sooner again. Small errors are left alone: predictions scatter, and each correction shifts work.
"""

from collections import deque
from typing import Final

WINDOW: Final = 12
"""Answers that a correction is read from; after one, as many new ones are waited for."""
TOLERANCE: Final = 1.3
"""A median further off than this is corrected."""
MOST: Final = 8.0
LEAST_NS: Final = 20_000_000
"""Answers that were predicted sooner say more of the network than of the worker."""


class Slowness:
    """How slow one worker is, beside one speed that it has reported."""

    def __init__(self) -> None:
        self.factor = 1.0
        """Times as long as its speed says."""
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def answered(self, predicted_ns: float, actual_ns: float) -> bool:
        """An answer has come that was predicted with `factor` in it; whether that has changed."""
        if predicted_ns < LEAST_NS:
            return False
        self._ratios.append(actual_ns / predicted_ns)
        if len(self._ratios) < WINDOW:
            return False
        median = sorted(self._ratios)[WINDOW // 2]
        if 1 / TOLERANCE <= median <= TOLERANCE or (median < 1 and self.factor == 1.0):
            return False
        self._ratios.clear()
        before, self.factor = self.factor, min(max(self.factor * median, 1.0), MOST)
        return self.factor != before
