"""Prediction error: quantiles of actual over predicted time, learned from completed answers.

A decaying histogram holds the logarithm of the ratio. Each published level also has a correction that moves against
the recent coverage (adaptive conformal inference, Gibbs and Candès, arXiv:2106.00170). Under a changing load the
histogram alone would lag.
"""

from math import floor, log2
from typing import Final

LEVELS: Final[tuple[float, ...]] = (0.5, 0.8, 0.9)
"""The shares of answers that the published quantiles should cover."""
PER_OCTAVE: Final = 12
# Ratios from 1/16 to 16; values beyond count in the outermost bin.
OCTAVES: Final = 8
MEMORY_ANSWERS: Final = 512.0
"""The histogram's memory in answers: an answer this old weighs 1/e of the latest."""
LEAST_ANSWERS: Final = 32
"""The answers needed before a quantile is returned."""
REFRESH: Final = 8
"""The number of answers after which cached quantiles are recomputed."""
CORRECTION: Final = 0.01
"""The step size of a level's correction per answer.

0.01 follows a change within a hundred answers.
"""
MAX_CORRECTION: Final = 0.2
"""The bound on a level's correction, in either direction."""

_BINS: Final = PER_OCTAVE * OCTAVES
_LOWEST: Final = -OCTAVES / 2
_RESCALE: Final = 1e12


class Ratios:
    """The ratios of one kind of prediction for one model.

    Adding is O(1). Reading is O(bins) once in `REFRESH` answers.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * _BINS
        self._total = 0.0
        # The weight of the next answer. Growing it decays all earlier answers at once.
        self._next = 1.0
        self._growth = 1 / (1 - 1 / MEMORY_ANSWERS)
        self._unread = 0
        self._cached: dict[float, float] = {}
        self._corrections = dict.fromkeys(LEVELS, 0.0)
        self.seen = 0

    def add(self, predicted_ns: float, actual_ns: float) -> None:
        """Record one answer; times below 1 ns are ignored."""
        if predicted_ns < 1 or actual_ns < 1:
            return
        octaves = log2(actual_ns / predicted_ns)
        if self.seen >= LEAST_ANSWERS:
            self._correct(2.0**octaves)
        self._weights[min(max(floor((octaves - _LOWEST) * PER_OCTAVE), 0), _BINS - 1)] += self._next
        self._total += self._next
        self._next *= self._growth
        self.seen += 1
        self._unread += 1
        if self._unread >= REFRESH:
            self._unread = 0
            self._cached.clear()
        if self._next > _RESCALE:
            self._weights = [each / self._next for each in self._weights]
            self._total /= self._next
            self._next = 1.0

    def quantile(self, level: float) -> float | None:
        """Return the ratio that a share `level` of answers stays below; None before `LEAST_ANSWERS` answers."""
        if self.seen < LEAST_ANSWERS:
            return None
        if level not in self._cached:
            self._cached[level] = self._at(min(max(level + self._corrections.get(level, 0.0), 0.0), 1.0))
        return self._cached[level]

    def _correct(self, ratio: float) -> None:
        for level in LEVELS:
            bound = self.quantile(level)
            covered = bound is not None and ratio <= bound
            moved = self._corrections[level] + CORRECTION * (level - covered)
            self._corrections[level] = min(max(moved, -MAX_CORRECTION), MAX_CORRECTION)

    def _at(self, level: float) -> float:
        """Return the histogram's value at a level, interpolating evenly within a bin."""
        wanted = level * self._total
        passed = 0.0
        for number, weight in enumerate(self._weights):
            if weight and passed + weight >= wanted:
                return float(2.0 ** (_LOWEST + (number + (wanted - passed) / weight) / PER_OCTAVE))
            passed += weight
        return float(2.0 ** (_LOWEST + OCTAVES))
