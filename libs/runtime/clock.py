"""Time, injected. Unix nanoseconds that never step back within a process: wall time at start plus monotonic time."""

import time
from typing import Protocol


class Clock(Protocol):
    """The source of time; tests and the lab bring their own."""

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
