"""A reservation that is fixed for a whole planning period."""

import numpy as np

from libs.policy.reserve.calibration import Calibrator, normal_miss
from libs.policy.reserve.counts import Floats, not_passed


class Holder:
    """A fixed reservation per period, from the mean of the last period's forecasts.

    The calibration learns how far a period may stray from the previous one: each window is scored by the
    distribution held for it.
    """

    def __init__(self, confidence: float, windows: int) -> None:
        """Hold reservations for periods of `windows` windows."""
        self._calibrator = Calibrator(confidence)
        self._windows = windows
        self._recent: list[Floats] = []
        self._held: Floats = np.ones(1)
        self._units = 0
        self._place = 0

    def reserve(self, distribution: Floats) -> int:
        """Return the units for the window that begins now, given its forecast; they stay the same for a period."""
        self._recent.append(distribution)
        if self._place % self._windows == 0:
            self._held = _mean(self._recent)
            self._units = not_passed(self._held, normal_miss(self._calibrator.deviate))
            self._recent = []
        self._place += 1
        return self._units

    def learn(self, came_units: float) -> None:
        """Learn from the peak of units in the window that `reserve` was last called for."""
        if self._place <= 2 * self._windows:
            return  # the first period, and most of the second, were reserved without knowledge
        came = int(np.ceil(came_units - 1e-9))
        self._calibrator.learn(self._held, came, covered=came <= self._units)


def _mean(rows: list[Floats]) -> Floats:
    total = np.zeros(max(map(len, rows)))
    for row in rows:
        total[: len(row)] += row
    return total / len(rows)
