"""A tenant's use within the last minute: a window that each use leaves a minute later.

A steadily refilling bucket would admit twice its limit in the minute after a pause. This window holds the limit in
every minute, whichever second it begins with. Times are in seconds of any clock that does not run backwards.
"""

from typing import Final, NamedTuple

WINDOW_S: Final = 60
# Whole seconds that count, the current one included; the oldest may have begun up to a second before the window.
SLOTS: Final = WINDOW_S + 1


class Span(NamedTuple):
    """The division of a limit's window into slots."""

    slot_s: int
    slots: int
    """The slots that count, including the current one: one more than the window has, as the oldest began before it."""

    @property
    def all_s(self) -> int:
        """The time after which a use no longer counts."""
        return self.slot_s * self.slots


MINUTE: Final = Span(1, SLOTS)
DAY: Final = Span(3600, 25)


class MinuteWindow:
    """The units used per slot, such as a whole second; never more entries than the span has slots."""

    def __init__(self, span: Span = MINUTE) -> None:
        self._span = span
        # Units by slot number, in chronological order.
        self._used: dict[int, int] = {}
        self._total = 0

    def _slot(self, now_s: float) -> int:
        return int(now_s) // self._span.slot_s

    def used(self, now_s: float) -> int:
        oldest = self._slot(now_s) - self._span.slots
        while self._used and (first := next(iter(self._used))) <= oldest:
            self._total -= self._used.pop(first)
        return self._total

    def take(self, limit: int, want: int, least: int, now_s: float) -> int:
        """Use up to `want` units within the limit and return how many; if fewer than `least` fit, use none and return
        0.
        """
        granted = min(want, limit - self.used(now_s))
        if granted < max(least, 1):
            return 0
        self.add(granted, now_s)
        return granted

    def add(self, units: int, now_s: float) -> None:
        """Count units regardless of the limit. Negative units return the latest ones that were taken but not used."""
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
        """Return the seconds until `need` units fit if nobody takes any; the whole span if they exceed the limit."""
        short = self.used(now_s) + need - limit
        if short <= 0:
            return 0.0
        for second, units in self._used.items():
            short -= units
            if short <= 0:
                return max((second + self._span.slots) * self._span.slot_s - now_s, 0.0)
        return float(self._span.all_s)
