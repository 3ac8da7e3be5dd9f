"""Grades of figures by a pair of thresholds: one to fire at and a lower one to clear at."""

from dataclasses import dataclass
from enum import IntEnum


class Grade(IntEnum):
    """The severity of a figure, ordered so that the minimum of several grades is their conjunction."""

    CLEAR = 0
    HOLD = 1
    """The figure lies between the thresholds: a firing alert goes on, and a quiet one stays quiet."""
    FIRE = 2


@dataclass(frozen=True, slots=True)
class Threshold:
    """Thresholds for a figure for which greater is worse; `clear` is below `fire`."""

    fire: float
    clear: float

    def grade(self, value: float) -> Grade:
        if value >= self.fire:
            return Grade.FIRE
        return Grade.CLEAR if value <= self.clear else Grade.HOLD
