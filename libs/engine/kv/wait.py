"""KV wait and starvation in exact nanoseconds: time without a step while some sequence awaits KV. Pure; time is passed
in.

Such time is KV wait while some of that KV is ready at its source and not here. It is starvation while all of it is
still to be computed there.
"""


class _Spans:
    """Intervals, in Unix nanoseconds, in which a condition held."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, int]] = []
        self.since_ns = 0

    def now(self, holds: bool, now_ns: int) -> None:
        """Record whether the condition holds from now on."""
        if holds and not self.since_ns:
            self.since_ns = now_ns
        elif not holds and self.since_ns:
            if now_ns > self.since_ns:
                self.ended.append((self.since_ns, now_ns))
            self.since_ns = 0

    def take_ended(self) -> tuple[tuple[int, int], ...]:
        ended, self.ended = tuple(self.ended), []
        return ended


class KvWait:
    """A clock that cuts time into intervals of KV wait and of starvation."""

    def __init__(self) -> None:
        self._awaiting = False
        self._ready = False
        self._stepping = False
        self._waits = _Spans()
        self._starved = _Spans()

    @property
    def ended(self) -> list[tuple[int, int]]:
        """Intervals of KV wait (start, end) that ended since `take_ended`; none is empty."""
        return self._waits.ended

    @property
    def since_ns(self) -> int:
        """Start of the KV wait in progress; 0 if there is none."""
        return self._waits.since_ns

    @property
    def starved_ended(self) -> list[tuple[int, int]]:
        """Intervals of starvation that ended since `take_starved`."""
        return self._starved.ended

    @property
    def starved_since_ns(self) -> int:
        """Start of the starvation in progress; 0 if there is none."""
        return self._starved.since_ns

    def awaiting(self, some: bool, now_ns: int, *, ready: bool = True) -> None:
        """Record whether any sequence awaits KV from now on, and whether any of that KV is ready at its source."""
        self._awaiting, self._ready = some, ready
        self._settle(now_ns)

    def stepping(self, running: bool, now_ns: int) -> None:
        """Record whether a step runs from now on."""
        self._stepping = running
        self._settle(now_ns)

    def take_ended(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of KV wait that ended since the last call."""
        return self._waits.take_ended()

    def take_starved(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of starvation that ended since the last call."""
        return self._starved.take_ended()

    def _settle(self, now_ns: int) -> None:
        rests = self._awaiting and not self._stepping
        self._waits.now(rests and self._ready, now_ns)
        self._starved.now(rests and not self._ready, now_ns)
