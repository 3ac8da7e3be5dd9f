"""How far predictions are off: quantiles of actual over predicted, learned from what came of them. Pure.

A histogram of the ratio's logarithm that forgets, and for each level that is published a correction that moves against
what was covered of late (adaptive conformal inference, Gibbs and Candès, arXiv:2106.00170): where answers are not drawn
alike, as in a load that turns, a histogram alone lags.
"""

from math import floor, log2
from typing import Final

LEVELS: Final[tuple[float, ...]] = (0.5, 0.8, 0.9)
"""Shares of answers that published quantiles are to cover."""
PER_OCTAVE: Final = 12
OCTAVES: Final = 8
"""Ratios from 1/16 to 16; what is beyond counts as the nearest."""
KEPT: Final = 512.0
"""Answers that the histogram remembers, about: the latest counts one, the one so long ago 1/e."""
LEAST: Final = 32
"""Answers before which nothing is known."""
REFRESH: Final = 8
"""Answers after which quantiles are read anew."""
CORRECTION: Final = 0.01
"""By which one answer moves a level, times how far it was off: 0.01 follows a change within a hundred answers."""
MOST_OFF: Final = 0.2
"""A level is corrected by at most so much."""

_BINS: Final = PER_OCTAVE * OCTAVES
_LOWEST: Final = -OCTAVES / 2
_RESCALE: Final = 1e12


class Ratios:
    """Ratios of one kind of prediction for one model. Adding is O(1), reading O(bins) once in `REFRESH` answers."""

    def __init__(self) -> None:
        self._weights = [0.0] * _BINS
        self._total = 0.0
        self._next = 1.0
        """Weight of the next answer: growing it is forgetting all before."""
        self._growth = 1 / (1 - 1 / KEPT)
        self._since = 0
        self._read: dict[float, float] = {}
        self._off = dict.fromkeys(LEVELS, 0.0)
        self.seen = 0

    def add(self, predicted_ns: float, actual_ns: float) -> None:
        """An answer has come; one of less than a nanosecond says nothing."""
        if predicted_ns < 1 or actual_ns < 1:
            return
        place = log2(actual_ns / predicted_ns)
        if self.seen >= LEAST:
            self._correct(2.0**place)
        self._weights[min(max(floor((place - _LOWEST) * PER_OCTAVE), 0), _BINS - 1)] += self._next
        self._total += self._next
        self._next *= self._growth
        self.seen += 1
        self._since += 1
        if self._since >= REFRESH:
            self._since = 0
            self._read.clear()
        if self._next > _RESCALE:
            self._weights = [each / self._next for each in self._weights]
            self._total /= self._next
            self._next = 1.0

    def quantile(self, level: float) -> float | None:
        """Actual over predicted that a share `level` of answers stays below; None as long as too few have come."""
        if self.seen < LEAST:
            return None
        if level not in self._read:
            self._read[level] = self._at(min(max(level + self._off.get(level, 0.0), 0.0), 1.0))
        return self._read[level]

    def _correct(self, ratio: float) -> None:
        for level in LEVELS:
            bound = self.quantile(level)
            covered = bound is not None and ratio <= bound
            moved = self._off[level] + CORRECTION * (level - covered)
            self._off[level] = min(max(moved, -MOST_OFF), MOST_OFF)

    def _at(self, level: float) -> float:
        """Value of the histogram at a level, evenly spread within a bin."""
        wanted = level * self._total
        passed = 0.0
        for number, weight in enumerate(self._weights):
            if weight and passed + weight >= wanted:
                return float(2.0 ** (_LOWEST + (number + (wanted - passed) / weight) / PER_OCTAVE))
            passed += weight
        return float(2.0 ** (_LOWEST + OCTAVES))
