"""Waits between attempts at something that is away: doubling, bounded, and spread, so that those whom one outage met do
not all come back in one moment."""

import random
from collections.abc import Callable
from typing import Final

SPREAD: Final = 0.5
"""Each wait is shorter by up to this share of it, at random."""


class Backoff:
    """Each `next_s` is twice the last, from `first_s` up to `max_s`, until `reset`; less its spread."""

    def __init__(self, *, first_s: float, max_s: float, draw: Callable[[], float] = random.random) -> None:
        """draw: from 0 to below 1."""
        self._draw = draw
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s
        self.failures = 0
        """Attempts in a row that failed: an outage is logged at the first."""

    def next_s(self) -> float:
        """How long to wait before the next attempt."""
        self.failures += 1
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s * (1 - SPREAD * self._draw())

    def reset(self) -> None:
        """It worked: the next failure starts from `first_s` again."""
        self._next_s = self._first_s
        self.failures = 0
