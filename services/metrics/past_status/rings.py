"""Means of figures over time in rings of windows, the finest first. Pure."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.telemetry.windows.rollups import TIERS as OCCUPANCY_TIERS

TIERS: Final = OCCUPANCY_TIERS[1:]
"""The tiers of occupancy but for its finest, as a status covers seconds: an hour, six hours, two days."""


class Rings:
    """Rows of `fields` numbers by time, NaN where unknown. The 8,640 windows take 35 kB a field."""

    def __init__(self, fields: int) -> None:
        self._fields = fields
        self._sums = [np.zeros((tier.windows, fields), np.float32) for tier in TIERS]
        self._known = [np.zeros((tier.windows, fields), np.uint8) for tier in TIERS]
        """Number of rows in each sum, 120 at most."""
        self._numbers = [np.full(tier.windows, -1, np.int64) for tier in TIERS]

    def add(self, unix_ns: int, row: NDArray[np.float32]) -> None:
        """Add the figures of a moment; one older than the rings reach is ignored."""
        known = ~np.isnan(row)
        values = np.where(known, row, np.float32(0))
        for tier, sums, counts, numbers in zip(TIERS, self._sums, self._known, self._numbers, strict=True):
            number = unix_ns // tier.window_ns
            place = number % tier.windows
            if numbers[place] > number:
                continue
            if numbers[place] < number:
                numbers[place], sums[place], counts[place] = number, 0, 0
            sums[place] += values
            counts[place] += known

    def read(self, window_ns: int, first_ns: int, last_ns: int) -> NDArray[np.float32]:
        """Return the means [windows, fields] of the windows that start in [first, last), NaN where nothing is known.

        Both bounds are multiples of `window_ns`, which is one of the lengths in `TIERS`.
        """
        place = [tier.window_ns for tier in TIERS].index(window_ns)
        wanted = np.arange(first_ns // window_ns, last_ns // window_ns)
        at = wanted % TIERS[place].windows
        counts = np.where((self._numbers[place][at] == wanted)[:, None], self._known[place][at], 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[np.float32] = np.where(counts > 0, self._sums[place][at] / counts, np.float32(np.nan))
        return found
