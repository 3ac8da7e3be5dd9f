"""How many lines of a job are answered, counted by share; memory grows with the open shares only. Pure."""

from dataclasses import dataclass, field

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Progress


@dataclass(slots=True)
class ShareCounts:
    """Counts of a share only grow: an older one, read late or twice, takes nothing back."""

    completed: int = 0
    failed: int = 0
    open: dict[int, Progress] = field(default_factory=dict)
    """Latest progress of each share that still lacks answers."""
    whole_below: int = 0
    """Every share with a lower number has all its answers."""
    whole_above: dict[int, Progress] = field(default_factory=dict)
    """Final progress of complete shares from `whole_below` on."""

    def whole(self, share: int) -> bool:
        """Whether every line of the share is answered."""
        return share < self.whole_below or share in self.whole_above

    def add(self, progress: Progress) -> bool:
        """Count new progress; returns False where it is older than what was counted."""
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
        """The union of both counts. May modify and return either of the two."""
        most, least = (other, self) if other.whole_below > self.whole_below else (self, other)
        for progress in (*least.whole_above.values(), *least.open.values()):
            most.add(progress)
        return most
