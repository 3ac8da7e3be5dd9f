"""A reservation that is decided once for a whole planning period, and then kept. Pure."""

import numpy as np

from libs.policy.reserve.calibration import Calibrator, normal_miss
from libs.policy.reserve.counts import Floats, not_passed


class Holder:
    """Takes the mean of the last period's forecasts for what each of the next period's windows may bring.

    How far a period may stray from the one before it is what the calibration learns: each window is scored by the
    distribution that was held for it.
    """

    def __init__(self, confidence: float, windows: int) -> None:
        """windows: of a period."""
        self._calibrator = Calibrator(confidence)
        self._windows = windows
        self._recent: list[Floats] = []
        self._held: Floats = np.ones(1)
        self._units = 0
        self._place = 0

    def reserve(self, distribution: Floats) -> int:
        """Units for the window that begins now, of which `distribution` is forecast; the same all period long."""
        self._recent.append(distribution)
        if self._place % self._windows == 0:
            self._held = _mean(self._recent)
            self._units = not_passed(self._held, normal_miss(self._calibrator.deviate))
            self._recent = []
        self._place += 1
        return self._units

    def learn(self, came_units: float) -> None:
        """The most units at once in the window that `reserve` was last asked for."""
        if self._place <= 2 * self._windows:
            return  # what was held for the first period was held in ignorance, and most of the second
        came = int(np.ceil(came_units - 1e-9))
        self._calibrator.learn(self._held, came, covered=came <= self._units)


def _mean(rows: list[Floats]) -> Floats:
    total = np.zeros(max(map(len, rows)))
    for row in rows:
        total[: len(row)] += row
    return total / len(rows)
