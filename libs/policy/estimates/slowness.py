"""Correct a worker's reported speed by the answers it actually gives.

The reported speed can be wrong: a throttled device, a noisy neighbour on the host, a fit that lags. When a worker's
answers are consistently and clearly later than predicted, it is treated as that much slower, until they come sooner
again. Small errors are ignored, because predictions scatter and every correction shifts work.
"""

from collections import deque
from typing import Final

WINDOW: Final = 12
"""The answers behind one correction; after each, the window starts empty."""
TOLERANCE: Final = 1.3
"""The median ratio, or its inverse, beyond which a correction is made."""
MOST: Final = 8.0
# Shorter predictions measure the network rather than the worker.
LEAST_NS: Final = 20_000_000


class Slowness:
    """The correction of one worker's reported speed."""

    def __init__(self) -> None:
        self.factor = 1.0
        """The actual time as a multiple of the time its reported speed predicts."""
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def answered(self, predicted_ns: float, actual_ns: float) -> bool:
        """Record an answer predicted with `factor` included, and return whether `factor` changed."""
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
