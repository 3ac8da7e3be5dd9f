"""KV wait, in exact nanoseconds: no step runs and at least one sequence awaits KV. Pure; time is passed in."""


class KvWait:
    """Cuts time into KV-wait intervals from the two facts that define them."""

    def __init__(self) -> None:
        self._awaiting = False
        self._stepping = False
        self.ended: list[tuple[int, int]] = []
        """Intervals (start, end) that ended since `take_ended`; none is empty."""
        self.since_ns = 0
        """Start of the wait that goes on; 0 when none does."""

    def awaiting(self, some: bool, now_ns: int) -> None:
        """Whether any sequence awaits KV, from now on."""
        self._awaiting = some
        self._settle(now_ns)

    def stepping(self, running: bool, now_ns: int) -> None:
        """Whether a step runs, from now on."""
        self._stepping = running
        self._settle(now_ns)

    def take_ended(self) -> tuple[tuple[int, int], ...]:
        """The intervals that ended since the last call."""
        ended, self.ended = tuple(self.ended), []
        return ended

    def _settle(self, now_ns: int) -> None:
        waits = self._awaiting and not self._stepping
        if waits and not self.since_ns:
            self.since_ns = now_ns
        elif not waits and self.since_ns:
            if now_ns > self.since_ns:
                self.ended.append((self.since_ns, now_ns))
            self.since_ns = 0
