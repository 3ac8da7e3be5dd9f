"""Delays between attempts to reach an unavailable peer.

They double up to a bound. Each is shortened at random, so that the victims of one outage do not all return at the same
moment.
"""

import random
from collections.abc import Callable
from typing import Final

# Each delay is shortened at random by up to this share.
SPREAD: Final = 0.5


class Backoff:
    """Delays that double with each `next_s` from `first_s` up to `max_s`, until `reset`."""

    def __init__(self, *, first_s: float, max_s: float, draw: Callable[[], float] = random.random) -> None:
        """Create the delays; `draw` returns a random number in [0, 1)."""
        self._draw = draw
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self.failures = 0
        """Consecutive failed attempts; callers log an outage at the first."""

    def next_s(self) -> float:
        """Return the delay before the next attempt."""
        self.failures += 1
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s * (1 - SPREAD * self._draw())

    def reset(self) -> None:
        """Record a success: the next failure starts from `first_s` again."""
        self._next_s = self._first_s
        self.failures = 0
