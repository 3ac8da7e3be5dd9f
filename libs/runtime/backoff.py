"""Waits between attempts at something that is away: doubling, bounded."""


class Backoff:
    """Each `next_s` is twice the last, from `first_s` up to `max_s`, until `reset`."""

    def __init__(self, *, first_s: float, max_s: float) -> None:
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
        return wait_s

    def reset(self) -> None:
        """It worked: the next failure starts from `first_s` again."""
        self._next_s = self._first_s
        self.failures = 0
