"""What a tenant has used in the last minute: a bucket that what was taken leaves a minute later. Pure.

A bucket that refills steadily would let twice its limit through in the minute after a rest. This one holds to the limit
in every minute, whichever second it begins with. Time is in seconds of any clock that does not go back.
"""

from typing import Final, NamedTuple

WINDOW_S: Final = 60
SLOTS: Final = WINDOW_S + 1
"""Whole seconds that count, the current one included: the oldest may have begun up to a second before the window."""


class Span(NamedTuple):
    """How a limit's window is cut."""

    slot_s: int
    slots: int
    """That count, the current one included: one more than the window has, as the oldest began before it."""

    @property
    def all_s(self) -> int:
        """After which everything has left."""
        return self.slot_s * self.slots


MINUTE: Final = Span(1, SLOTS)
DAY: Final = Span(3600, 25)


class MinuteWindow:
    """Units used, by slot, such as a whole second: at most as many numbers as the span has slots."""

    def __init__(self, span: Span = MINUTE) -> None:
        self._span = span
        self._used: dict[int, int] = {}
        """In the order of time."""
        self._total = 0

    def _slot(self, now_s: float) -> int:
        return int(now_s) // self._span.slot_s

    def used(self, now_s: float) -> int:
        """Units that count now."""
        oldest = self._slot(now_s) - self._span.slots
        while self._used and (first := next(iter(self._used))) <= oldest:
            self._total -= self._used.pop(first)
        return self._total

    def take(self, limit: int, want: int, least: int, now_s: float) -> int:
        """Use up to `want` units as far as the limit allows; 0 where that is under `least`, and nothing is used."""
        granted = min(want, limit - self.used(now_s))
        if granted < max(least, 1):
            return 0
        self.add(granted, now_s)
        return granted

    def add(self, units: int, now_s: float) -> None:
        """Count units that were used whatever the limit; below 0, units that were taken and not used, the latest
        first."""
        if units >= 0:
            slot = self._slot(now_s)
            self._used[slot] = self._used.get(slot, 0) + units
            self._total += units
            return
        for second in reversed(self._used):
            back = min(-units, self._used[second])
            self._used[second] -= back
            self._total -= back
            units += back

    def wait_s(self, limit: int, need: int, now_s: float) -> float:
        """Until `need` units fit, if nobody takes any; the whole span where that is more than the limit."""
        short = self.used(now_s) + need - limit
        if short <= 0:
            return 0.0
        for second, units in self._used.items():
            short -= units
            if short <= 0:
                return max((second + self._span.slots) * self._span.slot_s - now_s, 0.0)
        return float(self._span.all_s)
