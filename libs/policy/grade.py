"""Whether a figure calls for an alert: a threshold to fire at, and another one, apart from it, to clear at. Pure."""

from dataclasses import dataclass
from enum import IntEnum


class Grade(IntEnum):
    """Ordered, so that all of several conditions hold to the degree of the least."""

    CLEAR = 0
    HOLD = 1
    """Between the thresholds: what fires goes on, what does not stays quiet."""
    FIRE = 2


@dataclass(frozen=True, slots=True)
class Threshold:
    """For a figure that is worse the greater it is; `clear` is below `fire`."""

    fire: float
    clear: float

    def grade(self, value: float) -> Grade:
        """Grade a measured value."""
        if value >= self.fire:
            return Grade.FIRE
        return Grade.CLEAR if value <= self.clear else Grade.HOLD
