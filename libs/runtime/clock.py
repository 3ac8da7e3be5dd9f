"""Time, injected. Unix nanoseconds that never step back within a process: wall time at start plus monotonic time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from; tests and the lab bring their own."""

    def now_ns(self) -> int:
        """Unix time in nanoseconds, never decreasing."""
        ...


class SystemClock:
    """The real clock, anchored once so that a corrected wall clock cannot make a step negative."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """Unix time in nanoseconds, never decreasing."""
        return self._offset_ns + time.monotonic_ns()


class ManualClock:
    """A clock that a test moves by hand."""

    def __init__(self, now_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """The time it was last moved to."""
        return self._now_ns

    def advance_ms(self, ms: float) -> None:
        """Move forward by `ms` milliseconds."""
        self._now_ns += int(ms * 1_000_000)
