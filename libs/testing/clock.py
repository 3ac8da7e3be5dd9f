"""Time that a test moves."""


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
