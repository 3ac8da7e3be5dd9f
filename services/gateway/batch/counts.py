"""How many lines of a job are answered, share by share, in memory for the shares that are out. Pure."""

from dataclasses import dataclass, field

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Progress


@dataclass(slots=True)
class Counts:
    """Counts of a share only grow: an older one, read late or twice, takes nothing back."""

    completed: int = 0
    failed: int = 0
    open: dict[int, Progress] = field(default_factory=dict)
    """What was told last of each share that is not whole yet."""
    whole_below: int = 0
    """Every share before this one is whole."""
    whole_above: dict[int, Progress] = field(default_factory=dict)
    """Others that are, and what was told last of them."""

    def whole(self, share: int) -> bool:
        """Whether every line of it is answered."""
        return share < self.whole_below or share in self.whole_above

    def add(self, progress: Progress) -> bool:
        """Whether it says more of its share than was known."""
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

    def merged(self, other: "Counts") -> "Counts":
        """What both know; either may be changed."""
        most, least = (other, self) if other.whole_below > self.whole_below else (self, other)
        for progress in (*least.whole_above.values(), *least.open.values()):
            most.add(progress)
        return most
