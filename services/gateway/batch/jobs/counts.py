"""How many lines of a job are answered, counted by share; memory grows with the open shares only. Pure."""

from dataclasses import dataclass, field

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Progress


@dataclass(slots=True)
class ShareCounts:
    """The progress of each share. Counts only grow, so an older report that arrives late or twice has no effect."""

    completed: int = 0
    failed: int = 0
    open: dict[int, Progress] = field(default_factory=dict)
    """The latest progress of each share that still lacks answers."""
    whole_below: int = 0
    """The number below which every share has all its answers."""
    whole_above: dict[int, Progress] = field(default_factory=dict)
    """The final progress of complete shares from `whole_below` on."""

    def whole(self, share: int) -> bool:
        return share < self.whole_below or share in self.whole_above

    def add(self, progress: Progress) -> bool:
        """Add new progress; return False if it is older than the progress already counted."""
        share = progress.share
        if self.whole(share):
            return False
        known = self.open.get(share, Progress())
        if progress.completed + progress.failed <= known.completed + known.failed:
            return False
        self.completed += progress.completed - known.completed
        self.failed += progress.failed - known.failed
        if not progress.whole:
            self.open[share] = progress
            return True
        self.open.pop(share, None)
        self.whole_above[share] = progress
        while self.whole_below in self.whole_above:
            del self.whole_above[self.whole_below]
            self.whole_below += 1
        return True

    def merged(self, other: "ShareCounts") -> "ShareCounts":
        """Return the union of both counts, which may modify and reuse either."""
        most, least = (other, self) if other.whole_below > self.whole_below else (self, other)
        for progress in (*least.whole_above.values(), *least.open.values()):
            most.add(progress)
        return most
